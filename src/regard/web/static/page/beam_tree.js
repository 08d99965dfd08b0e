// The nodes of a beam search with their parents; mirrors BeamTree in web/look_queries.py.
const MOST = 6000; // maximum number of nodes: a larger tree is shown without the dropped hypotheses

/** `generated.steps`: the hypotheses kept at each step, {beam (null: it ended), parent, token, score}. */
export function beamTree({ steps, hypotheses }, vocabulary) {
  const nodes = [{ id: 0, parent: null, text: "", score: 0, best: true, kept: true }], tokens = [-1], children = new Map();
  const add = (parent, token, score) => {
    const key = `${parent} ${token}`;
    if (!children.has(key)) {
      children.set(key, nodes.length);
      nodes.push({ id: nodes.length, parent, text: vocabulary.text(token), score, best: false, kept: false });
      tokens.push(token);
    }
    return children.get(key);
  };
  let ofBeam = new Map();
  for (const step of steps) {
    const before = ofBeam;
    ofBeam = new Map();
    for (const { beam, parent, token, score } of step) {
      const node = add(before.get(parent) ?? 0, token, score);
      if (beam === null) nodes[node].ended = true;
      else ofBeam.set(beam, node);
    }
  }
  hypotheses.forEach(({ tokens: text, score }, rank) => {
    let node = 0;
    for (const token of text) {
      node = children.get(`${node} ${token}`);
      Object.assign(nodes[node], { kept: true, best: nodes[node].best || rank === 0 });
    }
    Object.assign(nodes[node], { final: score, rank });
  });
  const shown = nodes.filter((node) => node.kept || nodes.length <= MOST);
  nameNodes(shown, nodes, tokens, vocabulary);
  return { nodes: shown, left_out: nodes.length - shown.length };
}

/** Give each node the label of its token in its text; the tokens of one character share its label. */
function nameNodes(shown, nodes, tokens, vocabulary) {
  const inner = new Set(shown.map(({ parent }) => parent)), leaves = shown.filter(({ id }) => !inner.has(id));
  for (const leaf of leaves.sort((a, b) => (a.rank ?? shown.length) - (b.rank ?? shown.length))) {
    const path = [leaf];
    while (path[0].parent) path.unshift(nodes[path[0].parent]);
    vocabulary.labels(path.map(({ id }) => tokens[id])).forEach((label, n) => { path[n].label ??= label.text; });
  }
  nodes[0].label = "";
}
