// Translate with the directory that `regard export RUN onnx shipped` wrote, in JavaScript: greedy, with the KV cache.
//
// npm install onnxruntime-web @huggingface/tokenizers      (onnxruntime-node has the same interface)
// node translate.mjs shipped "The teacher read a book."
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { Tokenizer } from "@huggingface/tokenizers";
import * as ort from "onnxruntime-web";

const [root, text] = process.argv.slice(2);
const read = (...path) => JSON.parse(readFileSync(join(root, ...path), "utf8"));
const about = read("onnx", "onnx.json"); // tokens, lengths, every input and output
const { bos, eos } = about.tokens;
const ids = (values, shape) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);

function openTokenizer(side) {
  const own = `tokenizer.${side}.json`; // where source and target do not share one
  return new Tokenizer(read(existsSync(join(root, own)) ? own : "tokenizer.json"), {});
}

const open = (name) => ort.InferenceSession.create(readFileSync(join(root, "onnx", `${name}.onnx`)));
const [encoder, decoder] = [await open("encoder"), await open("decoder")];
const source = openTokenizer("source").encode(text).ids;
const keep = new ort.Tensor("bool", source.map(() => 1), [1, source.length]); // 1 for real tokens, 0 for padding
const memory = await encoder.run({ source: ids(source, [1, source.length]), keep }); // cross_k_0, cross_v_0, …
let past = {};
for (const [name, { shape }] of Object.entries(about.graphs.decoder.inputs))
  if (/^past_[kv]/.test(name)) past[name] = new ort.Tensor("float32", [], [1, shape[1], 0, shape[3]]);
const tokens = [bos];
while (tokens.length < about.longest.target) {
  const n = tokens.length - 1; // the position of the new token
  const fresh = { tokens: ids([tokens[n]], [1, 1]), positions: ids([n], [1, 1]), wanted: ids([0], [1]) };
  const past_positions = ids([...Array(n).keys()], [1, n]);
  const out = await decoder.run({ ...fresh, past_positions, ...past, ...memory, keep });
  const logits = out.logits.data;
  const token = logits.reduce((best, value, at) => (value > logits[best] ? at : best), 0);
  if (token === eos) break;
  tokens.push(token);
  past = Object.fromEntries(Object.keys(past).map((name) => [name, out[name.replace("past", "present")]]));
}
console.log(openTokenizer("target").decode(tokens.slice(1), { skip_special_tokens: true }));
