"""The oracle of every exercise: inputs, and the right answers computed by the library's own functions.

A case is (arguments, expected result). Inputs are drawn with a fixed seed per exercise, so that checks are repeatable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..attention import AttentionMap, attend, explain
from ..attention.biases import alibi_slopes
from ..attention.gradients import attention_gradients, d_scores
from ..attention.masks import causal, from_dense, padding, window
from ..attention.readings import rollout
from ..data.packing import IGNORE
from ..generation.generation_config import GenerateConfig
from ..generation.sampling import top_k, top_p
from ..layers import FeedForward, LayerNorm, RMSNorm, Rope, Sinusoidal, TokenEmbedding
from ..lens.patterns import Pairs, map_patterns
from ..training.loss import cross_entropy, shift_targets
from ..training.optimiser import noam, paper_lr

Case = tuple[tuple[Any, ...], Any]
Oracle = Callable[["Draw"], Iterator[Case]]
_ORACLES: dict[str, Oracle] = {}


class Draw:
    """Random tensors from one seed: standard normal, integers, or rows that sum to 1."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ids(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def weights(self, *shape: int) -> Tensor:
        """Positive rows that sum to 1."""
        return torch.softmax(self(*shape), dim=-1)


def oracle(number: str) -> Callable[[Oracle], Oracle]:
    """Decorator that registers the oracle of an exercise."""

    def register(function: Oracle) -> Oracle:
        _ORACLES[number] = function
        return function

    return register


@cache
def oracle_cases(number: str) -> list[Case]:
    """The cases of an exercise."""
    with torch.no_grad():
        return list(_ORACLES[number](Draw(sum(map(ord, number)))))


def _head(x: Tensor) -> Tensor:
    """(T, D) → (1, 1, T, D)."""
    return x[None, None]


# ------------------------------------------------------------------------------------------- 1 · tokens and vectors


@oracle("1.1")
def merge_step(draw: Draw) -> Iterator[Case]:
    for texts in ("low lower lowest slow", "aaaa aaab", "banana bandana", "aba aba cd cd cd abab"):
        words = [list(text) for text in texts.split()]
        pairs = Counter(pair for word in words for pair in pairwise(word))
        joined = "".join(best := pairs.most_common(1)[0][0])
        # A character that occurs in no word stands for the joined pair while the word is split.
        cut = ["".join(word).replace("".join(best), "\0") for word in words]
        yield (words,), [[joined if letter == "\0" else letter for letter in word] for word in cut]


@oracle("1.2")
def embed(draw: Draw) -> Iterator[Case]:
    for size, width, shape in ((11, 16, (2, 5)), (30, 9, (1, 7))):
        table, ids = draw(size, width), draw.ids(size, *shape)
        layer = TokenEmbedding(size, width, scale=width**0.5)
        layer.weight.data = table
        yield (ids, table), layer(ids)


@oracle("1.3")
def pad_batch(draw: Draw) -> Iterator[Case]:
    for texts, pad in (([[5, 6, 7], [8]], 0), ([[3], [1, 0, 2, 4], [0, 9]], 0), ([[4, 4]], 9)):
        rows = [torch.tensor(text) for text in texts]
        mask = pad_sequence([torch.ones(len(text), dtype=torch.bool) for text in texts], batch_first=True)
        yield (texts, pad), (pad_sequence(rows, batch_first=True, padding_value=pad), mask)


@oracle("1.4")
def sinusoids(draw: Draw) -> Iterator[Case]:
    for n, d in ((6, 8), (50, 16)):
        yield (n, d), Sinusoidal(d)(torch.arange(n))


# ------------------------------------------------------------------------------------------- 2 · the formula


@oracle("2.1")
def scaled_scores(draw: Draw) -> Iterator[Case]:
    for n, m, d in ((3, 5, 16), (4, 4, 9)):
        q, k = draw(n, d), draw(m, d)
        yield (q, k), explain(_head(q), _head(k), _head(k)).scaled[0, 0]


@oracle("2.2")
def softmax(draw: Draw) -> Iterator[Case]:
    for scores in (draw(3, 5), draw(4, 4), 1000 * draw(2, 6)):
        yield (scores,), torch.softmax(scores, dim=-1)


@oracle("2.3")
def attention(draw: Draw) -> Iterator[Case]:
    for (b, h, n, m, d), e in (((2, 3, 4, 6, 16), 16), ((1, 2, 5, 5, 8), 4)):
        q, k, v = draw(b, h, n, d), draw(b, h, m, d), draw(b, h, m, e)
        yield (q, k, v), attend(q, k, v, backend="reference").output


@oracle("2.4")
def attend_one(draw: Draw) -> Iterator[Case]:
    for n, d, e in ((3, 2, 2), (5, 9, 4)):
        q, k, v = draw(1, d), draw(n, d), draw(n, e)
        output = attend(_head(q), _head(k), _head(v), backend="reference").output[0, 0, 0]
        yield (q[0].tolist(), k.tolist(), v.tolist()), output.tolist()


# ------------------------------------------------------------------------------------------- 3 · masks and positions


@oracle("3.1")
def causal_mask(draw: Draw) -> Iterator[Case]:
    for n in (1, 4, 7):
        yield (n,), causal().dense(n)[0, 0]


@oracle("3.2")
def masked_attention(draw: Draw) -> Iterator[Case]:
    for n, d in ((5, 8), (4, 16)):
        q, k, v = draw(3, n, d)
        mask = (draw(n, n) > 0) | torch.eye(n, dtype=torch.bool)
        for allowed in (mask, causal().dense(n)[0, 0]):
            heads = (_head(x) for x in (q, k, v))
            yield (q, k, v, allowed), attend(*heads, mask=from_dense(allowed), backend="reference").output[0, 0]


@oracle("3.3")
def window_mask(draw: Draw) -> Iterator[Case]:
    for n, size in ((6, 3), (5, 1), (8, 4)):
        yield (n, size), (causal() & window(size)).dense(n)[0, 0]


@oracle("3.4")
def alibi(draw: Draw) -> Iterator[Case]:
    for n_heads, n in ((8, 5), (4, 3), (2, 6)):
        position = torch.arange(n)
        distance = (position[:, None] - position[None]).abs()
        yield (n_heads, n), -torch.tensor(alibi_slopes(n_heads))[:, None, None] * distance


@oracle("3.5")
def rope(draw: Draw) -> Iterator[Case]:
    for (b, h, n, d), start in (((2, 2, 5, 8), 0), ((1, 3, 4, 16), 7)):
        x, positions = draw(b, h, n, d), torch.arange(start, start + n)
        yield (x, positions), Rope(d)(x, positions)


# ------------------------------------------------------------------------------------------- 4 · many heads


@oracle("4.1")
def split_heads(draw: Draw) -> Iterator[Case]:
    for b, n, h, d in ((2, 5, 4, 3), (1, 3, 2, 8)):
        x = draw(b, n, h * d)
        yield (x, h), torch.stack(x.split(d, dim=-1), dim=1)


@oracle("4.2")
def multi_head(draw: Draw) -> Iterator[Case]:
    for b, n, h, d in ((2, 5, 4, 4), (1, 6, 2, 9)):
        x, matrices = draw(b, n, h * d), draw(4, h * d, h * d) / (h * d) ** 0.5
        q, k, v = (torch.stack((x @ w.T).split(d, dim=-1), dim=1) for w in matrices[:3])
        joined = attend(q, k, v, backend="reference").output.unbind(1)
        yield (x, *matrices, h), torch.cat(joined, dim=-1) @ matrices[3].T


@oracle("4.3")
def cross_attention(draw: Draw) -> Iterator[Case]:
    for n, m, d in ((4, 4, 8), (3, 6, 8)):
        x, memory, matrices = draw(2, n, d), draw(2, m, d), draw(3, d, d) / d**0.5
        lengths = torch.tensor([m, m - 2])
        real = torch.arange(m)[None] < lengths[:, None]
        q, k, v = (source @ w.T for source, w in zip((x, memory, memory), matrices, strict=True))
        output = attend(q[:, None], k[:, None], v[:, None], mask=padding(lengths), backend="reference").output[:, 0]
        yield (x, memory, *matrices, real), output


@oracle("4.4")
def grouped_query(draw: Draw) -> Iterator[Case]:
    for h, g in ((4, 2), (6, 3)):
        q, k, v = draw(2, h, 5, 8), draw(2, g, 5, 8), draw(2, g, 5, 8)
        yield (q, k, v), attend(q, k, v, backend="reference").output


# ------------------------------------------------------------------------------------------- 5 · gradients


@oracle("5.1")
def softmax_backward(draw: Draw) -> Iterator[Case]:
    for n, m in ((3, 5), (4, 4)):
        weights, d_weights = draw.weights(n, m), draw(n, m)
        yield (weights, d_weights), d_scores(weights, d_weights)


@oracle("5.2")
def attention_backward(draw: Draw) -> Iterator[Case]:
    for n, m, d, e in ((4, 6, 8, 8), (5, 5, 4, 4)):
        q, k, v, d_output = draw(n, d), draw(m, d), draw(m, e), draw(n, e)
        heads = [_head(x) for x in (q, k, v)]
        weights = explain(*heads).weights
        gradients = attention_gradients(heads[0], heads[1], heads[2], weights, _head(d_output), d**-0.5)
        yield (q, k, v, d_output), tuple(x[0, 0] for x in (gradients.d_q, gradients.d_k, gradients.d_v))


@oracle("5.3")
def cross_entropy_gradient(draw: Draw) -> Iterator[Case]:
    for n, size in ((3, 5), (4, 7)):
        logits, targets = draw(n, size), draw.ids(size, n)
        with torch.enable_grad():
            leaf = logits.clone().requires_grad_()
            (cross_entropy(leaf, targets) / n).backward()
        yield (logits, targets), leaf.grad


@oracle("5.4")
def clip_gradients(draw: Draw) -> Iterator[Case]:
    for factor, limit in ((3.0, 1.0), (0.01, 1.0), (1.0, 2.5)):
        gradients = [factor * draw(4, 3), factor * draw(5), 0.1 * factor * draw(2, 2)]
        parameters = [torch.nn.Parameter(g.clone()) for g in gradients]
        for parameter, g in zip(parameters, gradients, strict=True):
            parameter.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        yield (gradients, limit), [parameter.grad for parameter in parameters]


# ------------------------------------------------------------------------------------------- 6 · the Transformer


@oracle("6.1")
def layer_norm(draw: Draw) -> Iterator[Case]:
    for b, n, d, size in ((2, 4, 8, 3.0), (1, 3, 5, 3e-3)):  # in small numbers, eps counts
        x, norm = size * draw(b, n, d) + size / 3, LayerNorm(d)
        weight, bias = draw(d), draw(d)
        norm.load_state_dict({"weight": weight, "bias": bias})
        yield (x, weight, bias), norm(x)


@oracle("6.2")
def rms_norm(draw: Draw) -> Iterator[Case]:
    for b, n, d, size in ((2, 4, 8, 3.0), (1, 3, 5, 1e-3)):
        x, norm = size * draw(b, n, d) + size / 3, RMSNorm(d)
        weight = norm.weight.data = draw(d)
        yield (x, weight), norm(x)


@oracle("6.3")
def pre_norm_block(draw: Draw) -> Iterator[Case]:
    for n, d in ((4, 8), (3, 6)):
        x, a, f = 2 * draw(1, n, d) + 1, draw(d, d), draw(d, d)
        norms = [LayerNorm(d), LayerNorm(d)]
        norms[1].weight.data = 1 + draw(d).abs()

        def mix(y: Tensor, w: Tensor = a) -> Tensor:
            return y.mean(1, keepdim=True) @ w + y

        def think(y: Tensor, w: Tensor = f) -> Tensor:
            return torch.relu(y @ w)

        middle = x + mix(norms[0](x))
        yield (x, mix, think, *norms), middle + think(norms[1](middle))


@oracle("6.4")
def swiglu(draw: Draw) -> Iterator[Case]:
    for d, wide in ((6, 10), (8, 8)):
        x, layer = draw(2, 3, d), FeedForward(d, wide, "swiglu", bias=False)
        yield (x, layer.w_gate.clone(), layer.w_up.clone(), layer.w_out.weight.data), layer(x)


@oracle("6.5")
def teacher_forcing(draw: Draw) -> Iterator[Case]:
    for target in ([5, 6, 7], [9], [4, 4, 8, 5, 6]):
        inputs, labels = shift_targets(torch.tensor([[1, *target, 2]]), pad_id=0)
        yield (target, 1, 2), (inputs[0].tolist(), labels[0].tolist())


@oracle("6.6")
def token_loss(draw: Draw) -> Iterator[Case]:
    for b, n, size, pad in ((2, 5, 7, 0), (3, 4, 6, 5)):
        logits, targets = 2 * draw(b, n, size), (draw.ids(size - 1, b, n) + pad + 1) % size
        targets[0, -2:] = pad
        counted = torch.where(targets == pad, IGNORE, targets)
        yield (logits, targets, pad), cross_entropy(logits, counted) / (targets != pad).sum()


@oracle("6.7")
def smoothed_loss(draw: Draw) -> Iterator[Case]:
    for n, size, eps in ((4, 6, 0.1), (3, 9, 0.3)):
        logits, targets = 2 * draw(n, size), draw.ids(size, n)
        yield (logits, targets, eps), cross_entropy(logits, targets, eps) / n


@oracle("6.8")
def noam_rate(draw: Draw) -> Iterator[Case]:
    for step, width, warmup in ((1, 512, 4000), (2000, 512, 4000), (4000, 256, 4000), (50_000, 1024, 8000)):
        yield (step, width, warmup), paper_lr(width, warmup) * noam(warmup)(step)


# ------------------------------------------------------------------------------------------- 7 · generation


@oracle("7.1")
def greedy(draw: Draw) -> Iterator[Case]:
    size, eos = 9, 0
    table = draw(4, size, size)
    table[:, 6, eos] = 9.0  # a text ends after a 6
    table[:, 3:5, 6] = 9.0
    for prompt, max_new in (([3, 5], 6), ([1], 3), ([2, 2, 7], 12), ([4, 8], 12)):

        def next_logits(tokens: list[int]) -> Tensor:
            """Depends on the last token and on the number of tokens."""
            return table[len(tokens) % 4, tokens[-1]]

        text = list(prompt)
        while len(text) < len(prompt) + max_new and (len(text) == len(prompt) or text[-1] != eos):
            text.append(int(next_logits(text).argmax()))
        yield (next_logits, prompt, eos, max_new), text


@oracle("7.2")
def top_k_probabilities(draw: Draw) -> Iterator[Case]:
    for temperature, k in ((0.5, 3), (2.0, 5), (1.3, 1)):
        logits = 2 * draw(9)
        yield (logits, temperature, k), top_k(logits[None] / temperature, k)[0].softmax(-1)


@oracle("7.3")
def nucleus(draw: Draw) -> Iterator[Case]:
    for p in (0.9, 0.5, 0.7):
        logits = 2 * draw(9)
        yield (logits, p), top_p(logits[None], p)[0].softmax(-1)


@oracle("7.4")
def beam_step(draw: Draw) -> Iterator[Case]:
    for k, size in ((3, 7), (2, 5), (4, 6)):
        scores, log_probs = -draw(k).abs() * 3, torch.log_softmax(draw(k, size), -1)
        ranked = sorted(
            ((float(scores[b] + log_probs[b, t]), b, t) for b in range(k) for t in range(size)), reverse=True
        )[:k]
        best, parents, tokens = zip(*ranked, strict=True)
        yield (scores, log_probs), (torch.tensor(parents), torch.tensor(tokens), torch.tensor(best))


@oracle("7.5")
def best_hypothesis(draw: Draw) -> Iterator[Case]:
    many = [[-0.9], [-0.5, -0.6], [-0.4, -0.4, -0.45, -0.4], [-0.33] * 7]
    two = [[-0.9], [-0.4, -0.45]]
    for hypotheses, alpha in ((many, 0.0), (many, 0.6), (many, 0.3), (many, 1.0), (two, 0.6)):
        config = GenerateConfig(beam=4, length_penalty=alpha)
        scores = [sum(log_probs) / config.length_penalty_at(len(log_probs)) for log_probs in hypotheses]
        yield (hypotheses, alpha), max(range(len(scores)), key=scores.__getitem__)


@oracle("7.6")
def cached_step(draw: Draw) -> Iterator[Case]:
    for b, h, n, d in ((2, 2, 5, 8), (1, 3, 1, 4)):
        q, k, v = draw(3, b, h, 1, d)
        k_past, v_past = draw(2, b, h, n, d)
        k_all, v_all = torch.cat([k_past, k], dim=2), torch.cat([v_past, v], dim=2)
        output = attend(q, k_all, v_all, mask=causal(), backend="reference").output
        yield (q, k, v, k_past, v_past), (output, k_all, v_all)


# ------------------------------------------------------------------------------------------- 8 · never stored


@oracle("8.1")
def attend_in_blocks(draw: Draw) -> Iterator[Case]:
    for n, d, size, sharp in ((10, 8, 4, 1.0), (7, 16, 1, 3.0), (9, 4, 20, 1.0), (8, 4, 2, 200.0)):
        q, k, v = sharp * draw(d), draw(n, d), draw(n, 5)
        output = attend(q[None, None, None], _head(k), _head(v), backend="reference").output[0, 0, 0]
        yield (q, k, v, size), output


@oracle("8.2")
def entropy(draw: Draw) -> Iterator[Case]:
    for mask in (None, causal()):
        q, k = draw(2, 1, 2, 6, 8)
        weights = explain(q, k, k, mask=mask).weights
        yield (weights,), AttentionMap(q, k, mask).entropy()


@oracle("8.3")
def attention_rollout(draw: Draw) -> Iterator[Case]:
    for n_layers, h, n in ((3, 2, 5), (2, 4, 4)):
        layers = [draw.weights(h, n, n) for _ in range(n_layers)]
        yield (layers,), rollout([layer[None] for layer in layers])[0]


@oracle("8.4")
def logit_lens(draw: Draw) -> Iterator[Case]:
    norm = partial(torch.nn.functional.normalize, dim=-1)  # of one state or of all
    for n_layers, d, size in ((4, 8, 11), (3, 6, 9)):
        states, table = 3 * draw(n_layers, d) + 1, draw(size, d)
        yield (states, norm, table), torch.stack([(table @ norm(state)).softmax(0) for state in states])


@oracle("8.5")
def induction_score(draw: Draw) -> Iterator[Case]:
    for tokens in ([1, 2, 3, 1, 2, 3, 1], [4, 4, 4, 5, 4, 5], [7, 1, 7, 2, 7, 3, 1]):
        q, k = draw(2, 1, 1, len(tokens), 8)
        attention = AttentionMap(q, k, causal())
        pairs = Pairs(len(tokens), len(tokens), tokens=torch.tensor(tokens))
        score = float(map_patterns(attention, pairs)["induction"][0])
        yield (attention.dense()[0, 0], tokens), score
