// Generation: greedy, sampled, or by beam search (mirrors generation/beam_search.py).

/** log softmax of one row. */
export function logProbabilities(logits) {
  let largest = -Infinity, sum = 0;
  for (const x of logits) if (x > largest) largest = x;
  for (const x of logits) sum += Math.exp(x - largest);
  const shift = largest + Math.log(sum);
  return Float32Array.from(logits, (x) => x - shift);
}

function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

/** The n largest values as [[value, index]…], in descending order; the earlier one first among equals. */
function largest(values, n) {
  const best = [];
  for (let i = 0; i < values.length; i++) {
    if (best.length === n && values[i] <= best[n - 1][0]) continue;
    let at = best.length;
    while (at && best[at - 1][0] < values[i]) at--;
    best.splice(at, 0, [values[i], i]);
    if (best.length > n) best.pop();
  }
  return best;
}

/** A generator of numbers in [0, 1): mulberry32 with a seed, else Math.random. */
function randomNumbers(seed) {
  if (seed === undefined || seed === null) return Math.random;
  let state = Number(BigInt.asUintN(32, BigInt(seed)));
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** Sample one token from logits with temperature, top_k and top_p. */
function draw(logits, { temperature = 1, top_k: topK, top_p: topP }, random) {
  let pairs = largest(logits, topK ?? logits.length).map(([x, index]) => [x / temperature, index]);
  const top = pairs[0][0];
  pairs = pairs.map(([x, index]) => [Math.exp(x - top), index]);
  const total = pairs.reduce((sum, [p]) => sum + p, 0);
  if (topP !== undefined && topP !== null) {
    let before = 0;
    pairs = pairs.filter(([p]) => { const keep = before < topP * total; before += p; return keep; });
  }
  let rest = random() * pairs.reduce((sum, [p]) => sum + p, 0);
  for (const [p, index] of pairs) if ((rest -= p) < 0) return index;
  return pairs.at(-1)[1];
}

/** Yield to the browser so that the page can repaint. */
const breathe = () => new Promise((resolve) => setTimeout(resolve));

/**
 * `engine`: {prefill(copies) → rows of logits, step(rows, tokens) → rows of logits}; `rules`: the ids that end a text
 * and those that none contains.
 * Returns {tokens without the end, has_end, steps, hypotheses}.
 */
export async function write(engine, options, limit, rules, onToken = () => {}) {
  if ((options.beam ?? 1) > 1) return beamSearch(engine, options, limit, rules);
  const { ends, forbidden } = rules;
  const drawn = ["temperature", "top_k", "top_p"].some((name) => options[name] !== undefined && options[name] !== null);
  const random = randomNumbers(options.seed), tokens = [];
  let [logits] = await engine.prefill(1), score = 0, ended = false;
  while (tokens.length < limit) {
    const allowed = without(logits, forbidden), token = drawn ? draw(allowed, options, random) : argmax(allowed);
    score += logProbabilities(logits)[token];
    tokens.push(token);
    if ((ended = ends.includes(token))) break;
    onToken(token);
    if (tokens.length % 4 === 0) await breathe();
    if (tokens.length < limit) [logits] = await engine.step([0], [token]);
  }
  const own = ended && tokens.at(-1) === ends[0];
  const hypotheses = [{ tokens, score: score / penalty(options, tokens.length) }];
  return { tokens: ended ? tokens.slice(0, -1) : tokens, has_end: own, steps: null, hypotheses };
}

/** Logits or log P in which the tokens `ids` cannot be chosen. */
function without(row, ids) {
  const allowed = ids.length ? row.slice() : row;
  for (const id of ids) allowed[id] = -Infinity;
  return allowed;
}

/** The length penalty that divides log P: n^α, or ((5 + n) / 6)^α (Wu et al. 2016, eq. 14). */
function penalty({ length_penalty: alpha = 1, penalty_form: form = "hf" }, n) {
  return (form === "hf" ? n : (5 + n) / 6) ** alpha;
}

/** Beam search with k beams; ended hypotheses go into a pool of the k best. */
async function beamSearch(engine, options, limit, { ends, forbidden }) {
  const k = options.beam, nCandidates = Math.max(2, 1 + ends.length) * k;
  let beams = [{ score: 0, tokens: [] }], pool = [], open = true;
  let rows = await engine.prefill(1);
  const steps = [];
  for (let step = 0; open; step++) {
    const all = beams.flatMap((beam, b) => largest(without(logProbabilities(rows[b]), forbidden), nCandidates)
      .map(([x, token]) => ({ score: Math.fround(x + beam.score), beam: b, token })));
    const best = all.sort((a, b) => b.score - a.score || a.beam - b.beam || a.token - b.token).slice(0, nCandidates);
    const atLimit = step + 1 >= limit, isEnd = ({ token }) => ends.includes(token);
    const going = best.filter((one) => !isEnd(one)).slice(0, k);
    const finished = best.slice(0, k).filter((one) => isEnd(one) || atLimit);
    pool.push(...finished.map((one) => ({
      score: one.score / penalty(options, step + 1), tokens: [...beams[one.beam].tokens, one.token], ended: isEnd(one) })));
    pool = pool.sort((a, b) => b.score - a.score).slice(0, k); // the sort is stable
    steps.push([
      ...finished.map(({ beam, token, score }) => ({ beam: null, parent: beam, token, score })),
      ...going.map(({ beam, token, score }, n) => ({ beam: n, parent: beam, token, score })),
    ]);
    const top = Math.max(...going.map(({ score }) => score));
    open = !atLimit && going.length > 0 && (pool.length < k || top / penalty(options, step + 1) > pool.at(-1).score);
    if (!open) break;
    rows = await engine.step(going.map(({ beam }) => beam), going.map(({ token }) => token));
    beams = going.map(({ score, beam, token }) => ({ score, tokens: [...beams[beam].tokens, token] }));
    await breathe();
  }
  const [first] = pool, ended = first.ended;
  const hypotheses = pool.map(({ tokens, score }) => ({ tokens, score }));
  const tokens = ended ? first.tokens.slice(0, -1) : first.tokens;
  return { tokens, has_end: ended && first.tokens.at(-1) === ends[0], steps, hypotheses };
}
