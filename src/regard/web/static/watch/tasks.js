// The tasks. A text is a few given letters followed by those to write; token 0 is the sign → between them,
// 1 … 26 are letters. `source(tokens, row)` is the position of the letter to be written after `row`.

const letterOf = (id) => (id ? String.fromCharCode(96 + id) : "→");
const idsOf = (word) => [...word].map((letter) => letter.charCodeAt(0) - 96);
const N_LETTERS = 26;

/** A seeded generator of numbers in [0, 1) (mulberry32). */
export function generator(seed) {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** Standard normal samples from uniform ones (Box and Muller 1958). */
export const normalFrom = (random) => () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());

const randomWord = (random, n) => Array.from({ length: n }, () => 1 + Math.floor(random() * N_LETTERS));

function distinctLetters(random, n) {
  const letters = Array.from({ length: N_LETTERS }, (_, i) => i + 1);
  for (let i = 0; i < n; i++) {
    const j = i + Math.floor(random() * (N_LETTERS - i));
    [letters[i], letters[j]] = [letters[j], letters[i]];
  }
  return letters.slice(0, n);
}

const PIECE = 4;

export const TASKS = {
  /** regard → drager: where to attend depends only on the position. */
  reverse: {
    n_given: 6, first: 6, length: 13, example: "regard",
    takes: (word) => /^[a-z]{6}$/.test(word),
    text: (word) => [...idsOf(word), 0, ...idsOf(word).reverse()],
    draw(random) { const word = randomWord(random, 6); return [...word, 0, ...word.toReversed()]; },
    source: (tokens, row) => 11 - row,
  },
  /** fragment agme: a piece is repeated from a random position; only its letters tell where to attend. */
  repeat: {
    n_given: 8, first: 8, length: 8 + PIECE, example: "fragment",
    takes: (word) => /^[a-z]{8}$/.test(word) && new Set(word).size === 8,
    text: (word) => [...idsOf(word), ...idsOf(word).slice(2, 2 + PIECE)],
    draw(random) {
      const word = distinctLetters(random, 8), start = Math.floor(random() * (8 - PIECE + 1));
      return [...word, ...word.slice(start, start + PIECE)];
    },
    source: (tokens, row) => tokens.indexOf(tokens[row + 1]),
  },
};

export const letters = (tokens) => tokens.map(letterOf);

/** Texts held out from training: 32 random ones, and the one on the screen. */
export function heldOut(task, shown) {
  const random = generator(20170612), texts = Array.from({ length: 32 }, () => task.draw(random));
  const known = new Set([...texts, shown].map((text) => given(task, text)));
  return { texts, isHeldOut: (text) => known.has(given(task, text)) };
}

const given = (task, text) => text.slice(0, task.n_given).join();

/** A batch of texts without their last letters, and the next letter at each position; −1 where none is learned. */
export function batchOf(task, texts) {
  const ids = texts.flatMap((text) => text.slice(0, -1));
  const targets = texts.flatMap((text) => text.slice(1).map((id, row) => (row < task.first ? -1 : id)));
  return { ids, targets };
}
