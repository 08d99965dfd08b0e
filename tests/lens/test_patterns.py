"""Pattern scores of heads that were made to follow a pattern, and of random ones against the formula."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.spoken import captioner, image_classifier, language_model, translator
from regard.attention import AttentionMap, masks
from regard.lens import look
from regard.lens.labels import Label
from regard.lens.patterns import Pairs, is_delimiter, map_patterns, patterns

from .planted import map_of, pointing_at

N = 9
TEXT = torch.tensor([7, 3, 4, 9, 3, 4, 7, 8, 3])


def pairs_of(tokens: torch.Tensor, delimiters: tuple[int, ...] = ()) -> Pairs:
    n = len(tokens)
    marked = torch.zeros(n, dtype=torch.bool)
    marked[list(delimiters)] = True
    return Pairs(n, n, tokens=tokens, delimiters=marked, coordinates=torch.arange(n, dtype=torch.float32)[:, None])


PLANTED = {
    "previous": [max(i - 1, 0) for i in range(N)],
    "current": list(range(N)),
    "next": [min(i + 1, N - 1) for i in range(N)],
    "first": [0] * N,
    "last": [N - 1] * N,
    "delimiter": [3] * N,
    # 3 stands at 1, 4, 8; 4 at 2, 5; 7 at 0, 6. Others look at 3, where they have no business.
    "repeated": [3, 3, 3, 3, 1, 2, 0, 3, 4],
    "induction": [3, 3, 3, 3, 2, 3, 1, 3, 5],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_head_that_follows_a_pattern_scores_one(name: str) -> None:
    found = map_patterns(map_of(pointing_at(PLANTED[name], N, n_heads=2)), pairs_of(TEXT, (3,)))
    assert found[name].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    others = {other for other in PLANTED if other != name and float(found[other][0]) > 0.75}
    assert not others
    assert float(found["entropy"][0]) == pytest.approx(0, abs=1e-4)


def test_only_queries_that_could_follow_it_count() -> None:
    """The first token has none before it; where every other one looks back, the score is 1, not (N - 1) / N."""
    found = map_patterns(map_of(pointing_at([4, *range(N - 1)], N)), pairs_of(TEXT))
    assert float(found["previous"][0]) == pytest.approx(1.0)
    unique = map_patterns(map_of(pointing_at([0] * N, N)), pairs_of(torch.arange(N)))
    assert math.isnan(unique["repeated"][0])
    assert math.isnan(unique["induction"][0])
    assert math.isnan(unique["delimiter"][0])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.booleans(), st.integers(0, 10_000))
def test_scores_are_those_of_the_whole_matrix(n: int, heads: int, causal: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, heads, n, 5, generator=generator)
    tokens = torch.randint(0, 5, (n,), generator=generator)
    found = AttentionMap(q, k, masks.causal() if causal else None)
    weights, scores = found.dense()[0].double(), map_patterns(found, pairs_of(tokens, (0,)))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    wanted = {
        "previous": (j == i - 1),
        "current": j == i,
        "next": j == i + 1,
        "local": (i - j).abs() <= 2,
        "first": (j == 0) & (i >= 0),
        "last": (j == n - 1) & (i >= 0),
        "delimiter": (j == 0) & (i >= 0),
        "repeated": (tokens[:, None] == tokens[None]) & (j < i),
        "induction": torch.tensor(
            [[1 <= c < r and bool(tokens[c - 1] == tokens[r]) for c in range(n)] for r in range(n)]
        ),
    }
    for name, pattern in wanted.items():
        could = pattern.any(-1)
        expected = (weights * pattern).sum(-1)[:, could].mean(-1) if could.any() else torch.full((heads,), math.nan)
        torch.testing.assert_close(scores[name].double(), expected.double(), atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(
        scores["distance"].double(), (weights * (i - j).abs()).sum(-1).mean(-1), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(scores["entropy"], found.entropy()[0].mean(-1), atol=1e-4, rtol=1e-4)


def test_many_blocks_are_summed_as_one() -> None:
    q, k = torch.randn(2, 1, 2, 700, 8)
    tokens = torch.randint(0, 50, (700,))
    for mask in (None, masks.causal(), masks.causal() & masks.window(100)):
        found = AttentionMap(q, k, mask)
        scores, weights = map_patterns(found, pairs_of(tokens)), found.dense()[0]
        same = (tokens[:, None] == tokens[None]).tril(-1)
        torch.testing.assert_close(scores["repeated"], (weights * same).sum(-1)[:, same.any(-1)].mean(-1))
        torch.testing.assert_close(scores["previous"], weights.diagonal(-1, 1, 2).mean(-1))
        assert sum(r.stop - r.start for r, c, _ in found.blocks() if c.start == 0) <= 700


def test_blocks_are_the_matrix_in_pieces() -> None:
    q, k = torch.randn(2, 2, 2, 300, 8)
    for mask in (None, masks.causal(), masks.window(40)):
        found = AttentionMap(q, k, mask)
        whole, filled = found.dense(), torch.zeros(2, 2, 300, 300)
        for rows, cols, weights in found.blocks():
            assert torch.is_grad_enabled()
            filled[:, :, rows, cols] += weights
        torch.testing.assert_close(filled, whole)


def test_a_row_without_keys_is_no_row() -> None:
    allowed = torch.ones(4, 4, dtype=torch.bool)
    allowed[2] = False
    q = torch.randn(1, 1, 4, 8)
    scores = map_patterns(AttentionMap(q, q, allowed), pairs_of(torch.arange(4)))
    sums = [scores[name] for name in ("previous", "current", "next")]
    assert all(torch.isfinite(x).all() for x in sums)
    first = AttentionMap(q, q, allowed).dense()[0, 0, [0, 1, 3], 0].mean()
    assert float(scores["first"][0]) == pytest.approx(float(first))


# ---- of looks


def test_patterns_of_every_kind_and_layer() -> None:
    seen = look(translator(), "the cat sat on the mat.", "고양이가 매트 위에 앉았다.")
    for kind in seen.kinds:
        found = patterns(seen, kind=kind)
        assert all(x.shape == (2, 4) for x in found.scores.values())
        known = ("previous", "distance", "local")
        assert all(torch.isnan(getattr(found, name)).all() == (kind == "cross") for name in known)
        assert torch.isfinite(found.current).all()
        assert torch.isfinite(found.delimiter).all()
        torch.testing.assert_close(found.entropy[1], seen.entropy(kind=kind, layer=1).mean(-1), atol=1e-4, rtol=1e-4)
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["labels"][1][3] == found.label(1, 3)
    torch.testing.assert_close(seen.patterns(kind="cross").entropy, found.entropy)
    only = patterns(seen, kind="self", layers=[1])
    torch.testing.assert_close(only.first[0], patterns(seen, kind="self").first[1])


def test_distance_is_that_of_the_look_in_texts_and_images(tmp_path: object) -> None:
    for model, what in ((language_model(), "the cat ran too."), (image_classifier(), torch.rand(3, 16, 16))):
        seen = look(model, what)
        found = patterns(seen)
        torch.testing.assert_close(found.distance[1], seen.distance(layer=1).mean(-1), atol=1e-4, rtol=1e-4)
    assert torch.isnan(found.repeated).all()
    assert (found.delimiter > 0).all()


def test_patches_looked_at_by_words_have_no_distance() -> None:
    found = patterns(look(captioner(), torch.rand(3, 16, 16), "the cat sat"), kind="cross")
    assert torch.isnan(found.distance).all()
    assert torch.isnan(found.induction).all()


def test_heads_are_called_after_what_they_do() -> None:
    seen = look(language_model(), "the cat sat on the mat.")
    n = len(seen.rows())
    seen._maps[("self", 0)] = map_of(
        torch.cat([pointing_at([max(i - 1, 0) for i in range(n)], n), torch.full((3, n, n), 1 / n)])
    )
    found = patterns(seen)
    assert found.label(0, 0) == "previous token"
    assert found.label(0, 1) == "mixed"
    assert found.label(0, 1, least=0.01) != "mixed"


def test_what_separates_is_a_delimiter() -> None:
    assert all(is_delimiter(Label(text)) for text in (".", ",", "…", "“"))
    assert is_delimiter(Label("<eos>", special=True))
    assert not any(is_delimiter(Label(text)) for text in ("a.", "고양이", "3", "+"))
