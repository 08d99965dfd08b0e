// Names of the parts that write into the residual stream: embeddings, heads, feed-forward networks, biases.
import { shown } from "./dom.js";

/** The name of a part; for a head also the token that it attended to most, if known. */
export function writerName(t, { name, layer, head, from }, token) {
  if (head !== undefined) {
    const called = t(`writer.${name}`, { l: layer + 1, h: head + 1 });
    return from ? t("writer.read", { head: called, token: shown(from) }) : called;
  }
  if (layer !== undefined) return t(`writer.${name}`, { l: layer + 1 });
  return token && name === "token" ? t("writer.the", { token: shown(token) }) : t(`writer.${name}`);
}

/** A number with an explicit sign. */
export const withSign = (value, digits = 3) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;
