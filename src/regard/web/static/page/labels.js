// Labels of rows and columns, as in lens/labels.py: tokens spelled with the vocabulary in page.json, image patches
// with their boxes, and sub-words joined into words.
const SMALL = "₀₁₂₃₄₅₆₇₈₉";
const VISIBLE = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };
const CONTROLS = { "\n": "⏎", "\t": "⇥", "\r": "␍" };
const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });

/** A text without surrounding spaces, with symbols for invisible characters. */
export function visibleText(text) {
  const core = text.trim(), signs = core ? core.replace(/[\n\t\r]/g, (x) => CONTROLS[x]) : text.replace(/[ \n\t\r]/g, (x) => VISIBLE[x]);
  return signs.replace(/[\p{Cc}\p{Cs}\p{Co}\p{Cn}]/gu, "·") || "∅";
}

/** The number of trailing bytes that belong to an incomplete character. */
function unfinished(bytes) {
  for (let n = 1; n <= Math.min(3, bytes.length); n++) {
    const byte = bytes[bytes.length - n], size = byte >= 0xf0 && byte < 0xf5 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc2 ? 2 : 1;
    if ((byte & 0xc0) === 0x80) continue;
    return byte < 0xf5 && size > n && utf8.decode(Uint8Array.from(bytes.slice(-n))).length === 1 ? n : 0;
  }
  return 0;
}

/** The vocabulary of one side. `table` comes from describe_vocabulary; if it is null, ids are shown. */
export class Vocabulary {
  constructor(table, { pad_id, bos_id, eos_id }) { Object.assign(this, { table, ends: [pad_id, bos_id, eos_id] }); }

  /** [name, special] of a token without bytes, else null. */
  name(id) {
    if (!this.table) return [` ${id}`, this.ends.includes(id)];
    return typeof this.table.pieces[id] === "string" ? null : this.table.names[id] ?? [`<${id}>`, false];
  }

  /** The text of tokens as spans {text, first, last, special}; tokens that are parts of one character share a span. */
  spans(ids) {
    const out = [];
    let first = 0, text = "", pending = [], atStart = true;
    const close = (last) => {
      if (first < last) out.push({ text, first, last, special: false });
      [first, text] = [last, ""];
    };
    const flush = () => { text += utf8.decode(Uint8Array.from(pending)); pending = []; };
    ids.forEach((id, at) => {
      const named = this.name(id);
      if (named) {
        flush();
        close(at);
        out.push({ text: named[0], first: at, last: at + 1, special: named[1] });
        first = at + 1;
        atStart &&= named[1] || this.table?.native;
        return;
      }
      const { first: starts, pieces } = this.table, piece = atStart && id in starts ? starts[id] : pieces[id];
      atStart = false;
      pending.push(...Array.from(piece, (letter) => letter.charCodeAt(0)));
      const rest = unfinished(pending), tail = rest ? pending.slice(-rest) : [];
      pending = rest ? pending.slice(0, -rest) : pending;
      flush();
      pending = tail;
      if (!rest) close(at + 1);
    });
    flush();
    close(ids.length);
    return out;
  }

  /** A label for each token: {text, special, id, span, whole, newWord}. */
  labels(ids) {
    const out = [];
    let before = "";
    for (const { text, first, last, special } of this.spans(ids)) {
      for (let n = 0; n < last - first; n++) {
        const number = last - first > 1 ? [...String(n + 1)].map((digit) => SMALL[digit]).join("") : "";
        const newWord = n === 0 && (special || beginsWord(before, text));
        out.push({ text: visibleText(text) + number, special, id: ids[first + n], span: [first + n, first + n + 1], whole: [first, last], newWord });
      }
      before = special ? "" : before.slice(-8) + text;
    }
    return out;
  }

  /** The text of one token, with its leading space; a part of a character as its bytes. */
  text(id) {
    if (this.table?.parts[id]) return this.table.parts[id];
    return this.table?.native ? this.spans([id, id]).at(-1).text : this.spans([id])[0].text;
  }
}

/** Whether `text` after `before` starts a word: at a space, between letters and other characters, between ideographs. */
export function beginsWord(before, text) {
  if (!before.trim()) return !before; // spaces belong to the following word
  if (!text || /^\s/.test(text)) return Boolean(text);
  const last = [...before].at(-1), [first] = text;
  if (/\s/.test(last)) return false;
  if (isIdeograph(last) && isIdeograph(first)) return true;
  const joiners = "'’_-"; // don't, long-term
  if (joiners.includes(first) || (joiners.includes(last) && before.length > 1 && isWordLetter([...before].at(-2)))) return false;
  return isWordLetter(last) !== isWordLetter(first);
}

const isWordLetter = (letter) => /[\p{L}\p{M}\p{N}\u200d\ufffd]/u.test(letter);
const isIdeograph = (letter) => (letter >= "\u3040" && letter <= "\u30ff") || (letter >= "\u3400" && letter <= "\u9fff");

const thing = (text, n, special, box) => ({ text, special, id: null, span: [n, n + 1], whole: [n, n + 1], newWord: true, ...(box ? { box } : {}) });

/** The label of the row after a text without an end token. */
export const moreLabel = (n) => thing("…", n, true);

/** Labels of class tokens, registers, then patches row by row, each with its box. */
export function patchLabels({ image_size: size, patch_size: patch, n_class_tokens: classes = 0, n_registers: registers = 0 }) {
  const side = Math.floor(size / patch), out = [];
  for (let n = 0; n < classes; n++) out.push(thing("[class]", n, true));
  for (let n = 0; n < registers; n++) out.push(thing("[register]", classes + n, true));
  for (let y = 0; y < side; y++) {
    for (let x = 0; x < side; x++) out.push(thing(`patch ${y},${x}`, out.length, false, [x / side, y / side, (x + 1) / side, (y + 1) / side]));
  }
  return out;
}

/** Join sub-words into words, or bytes into characters, with or without special tokens. */
export function joinLabels(labels, words, specials) {
  const groups = [];
  for (const label of labels) {
    if (label.special && !specials) continue;
    const last = groups.at(-1)?.at(-1), isPlain = last && !label.special && !last.special && !label.box;
    const continues = last && ((last.whole[0] === label.whole[0] && last.whole[1] === label.whole[1]) || (words && !label.newWord));
    if (isPlain && last.span[1] === label.span[0] && continues) groups.at(-1).push(label);
    else groups.push([label]);
  }
  return groups.map(joined);
}

function joined(group) {
  const first = group[0], last = group.at(-1), parts = new Map();
  if (group.length === 1) return first;
  for (const { text, whole } of group) parts.set(whole.join(), whole[1] - whole[0] > 1 ? text.replace(/[₀-₉]+$/, "") : text);
  const text = [...parts.values()].join(""), span = [first.span[0], last.span[1]];
  return { ...first, text: text.replace(/^[␣⏎⇥␍]+/, "") || text, id: null, span, whole: span };
}

/** Words split into three or more tokens of fewer than three letters each on average. */
export function spelledWords(labels) {
  return joinLabels(labels, true, true).filter(({ text, special, span: [a, b] }) => !special && b - a > 2 && [...text].length < 3 * (b - a)).map(({ text }) => text);
}
