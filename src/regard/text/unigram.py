"""Deterministic training of the unigram model (Kudo 2018, "Subword regularization").

The probability of a word is the product over its pieces, p(x) = Π p(xᵢ). EM fits p, and the pieces whose removal
reduces the likelihood least are dropped until ``size`` remain. The trainer of ``tokenizers`` iterates over hash
tables, so its vocabulary changes from process to process; here everything is sorted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

_MAX_PIECE_LENGTH = 16
_SEED_FACTOR = 6  # initial number of pieces as a multiple of the final one
_SURVIVING_SHARE = 0.7  # share of the pieces kept in each round of pruning
_ROUNDS_OF_EM = 2
_MIN_PROBABILITY = 1e-250
_UNKNOWN_SCORE = -30.0  # log probability of a character that is not a piece


def train_unigram(words: Mapping[str, int], size: int) -> list[tuple[str, float]]:
    """At most ``size`` pieces with their log probabilities, most probable first, from the counts of words.

    Single characters are always kept as far as ``size`` allows, the most frequent first.
    """
    ordered = sorted(words.items())
    letters = Counter[str]()
    for word, n in ordered:
        letters.update({letter: n * count for letter, count in Counter(word).items()})
    always = sorted(letters, key=lambda letter: (-letters[letter], letter))[:size]
    scores = _seed_pieces(ordered, letters, always, size)
    while True:
        for _ in range(_ROUNDS_OF_EM):
            scores = _log_shares(_expected_counts(ordered, scores), always)
        if len(scores) <= size:
            break
        scores = _prune(ordered, scores, always, max(size, int(len(scores) * _SURVIVING_SHARE)))
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def _seed_pieces(
    words: list[tuple[str, int]], letters: Mapping[str, int], always: list[str], size: int
) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for word, n in words:
        for start in range(len(word)):
            for end in range(start + 2, min(len(word), start + _MAX_PIECE_LENGTH) + 1):
                counts[word[start:end]] += n
    weights = {piece: float(n * len(piece)) for piece, n in counts.items() if n > 1}
    heaviest = sorted(weights, key=lambda piece: (-weights[piece], piece))[: max(0, _SEED_FACTOR * size)]
    chosen = {piece: weights[piece] for piece in heaviest}
    return _log_shares(chosen | {letter: float(letters[letter]) for letter in always}, always)


def _log_shares(counts: Mapping[str, float], always: list[str]) -> dict[str, float]:
    """M step: the log of each piece's share of all counts; pieces expected less than 0.5 times are dropped."""
    positive = {piece: n for piece, n in counts.items() if n >= 0.5}
    positive |= {letter: max(counts.get(letter, 0.0), 0.5) for letter in always}
    total = math.log(math.fsum(positive.values()))
    return {piece: math.log(n) - total for piece, n in positive.items()}


def _expected_counts(words: list[tuple[str, int]], scores: Mapping[str, float]) -> dict[str, float]:
    """E step: the expected count of each piece over all segmentations of every word (forward–backward)."""
    share = {piece: math.exp(score) for piece, score in scores.items()}
    counts = dict.fromkeys(scores, 0.0)
    unknown = min(share.values(), default=1.0) * 1e-4
    for word, n in words:
        size = len(word)
        edges: list[list[tuple[int, str, float]]] = []
        ahead = [0.0] * size + [1.0]
        for start in range(size - 1, -1, -1):
            here = [(end, piece, share[piece]) for end, piece in _pieces(word, start, share)]
            here = here or [(start + 1, "", unknown)]
            edges.append(here)
            ahead[start] = sum(p * ahead[end] for end, _, p in here)
        if ahead[0] < _MIN_PROBABILITY:  # a very long word: dividing by its probability would overflow, so skip it
            continue
        behind = [n / ahead[0]] + [0.0] * size
        for start in range(size):
            flow = behind[start]
            for end, piece, p in edges[size - 1 - start]:
                behind[end] += flow * p
                if piece:
                    counts[piece] += flow * p * ahead[end]
    return counts


def _pieces(word: str, start: int, known: Mapping[str, float]) -> list[tuple[int, str]]:
    """(end, piece) of all known pieces that begin at ``start``."""
    ends = range(start + 1, min(len(word), start + _MAX_PIECE_LENGTH) + 1)
    return [(end, word[start:end]) for end in ends if word[start:end] in known]


def _prune(words: list[tuple[str, int]], scores: Mapping[str, float], always: list[str], size: int) -> dict[str, float]:
    """Keep the ``size`` pieces whose removal would cost most likelihood.

    The cost of a piece is its count in the best segmentations × the log probability lost by its best replacement.
    """
    uses: Counter[str] = Counter()
    for word, n in words:
        for piece in _best_cut(word, scores):
            uses[piece] += n

    def loss(piece: str) -> float:
        if not uses[piece]:
            return 0.0
        replacement = _best_cut(piece, scores, without=piece)
        return uses[piece] * (scores[piece] - sum(scores.get(part, _UNKNOWN_SCORE) for part in replacement))

    others = sorted(scores.keys() - always, key=lambda piece: (-loss(piece), piece))
    chosen = {*always, *others[: max(0, size - len(always))]}
    return {piece: score for piece, score in scores.items() if piece in chosen}


def _best_cut(word: str, scores: Mapping[str, float], without: str | None = None) -> list[str]:
    """The most probable segmentation of a word (Viterbi)."""
    best = [0.0] + [-math.inf] * len(word)
    back = [0] * (len(word) + 1)
    for start in range(len(word)):
        options = [(end, piece) for end, piece in _pieces(word, start, scores) if piece != without]
        for end, piece in options or [(start + 1, "")]:
            score = best[start] + scores.get(piece, _UNKNOWN_SCORE)
            if score > best[end]:
                best[end], back[end] = score, start
    cut, end = [], len(word)
    while end:
        cut.append(word[back[end] : end])
        end = back[end]
    return cut[::-1]
