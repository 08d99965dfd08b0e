"""Caches in bf16 and int8: less memory, nearly the same logits, and everything else as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.small import small
from regard.attention.cache import RingCache, StaticCache
from regard.generation import generate

# What rounding may do to a logit, as a share of how far logits lie apart.
DRIFT = {"bf16": 0.02, "int8": 0.05}


def logits_by_token(model: Any, tokens: torch.Tensor, cache_dtype: str) -> torch.Tensor:
    cache = model.new_cache(*tokens.shape, cache_dtype)
    with torch.no_grad():
        return torch.cat([model(tokens[:, n : n + 1], cache=cache) for n in range(tokens.shape[1])], 1)


@pytest.mark.parametrize("cache_dtype", ["bf16", "int8"])
@pytest.mark.parametrize(("name", "fields"), [("gpt2", {}), ("llama-1b", {}), ("mistral-7b", {"window": 6})], ids=str)
def test_logits_drift_by_little_and_by_something(name: str, fields: dict[str, Any], cache_dtype: str) -> None:
    model = small(name, **fields)
    tokens = torch.randint(3, 31, (3, 14), generator=torch.Generator().manual_seed(0))
    exact, rounded = (logits_by_token(model, tokens, kind) for kind in ("model", cache_dtype))
    off = (exact - rounded).square().mean().sqrt() / exact.std()
    assert 0 < off < DRIFT[cache_dtype]


@pytest.mark.parametrize("kind", [StaticCache, RingCache])
def test_memory_is_a_half_and_a_quarter(kind: type[StaticCache] | type[RingCache]) -> None:
    sizes = {
        cache_dtype: kind(2, 4, 256, 64, cache_dtype=cache_dtype).memory() for cache_dtype in ("model", "bf16", "int8")
    }
    assert sizes["bf16"] / sizes["model"] == pytest.approx(0.5, abs=0.02)
    assert sizes["int8"] / sizes["model"] == pytest.approx(0.25, abs=0.03)  # and a scale for every 64 numbers


@pytest.mark.parametrize("cache_dtype", ["bf16", "int8"])
def test_what_is_read_is_what_was_written_to_within_a_step(cache_dtype: Any) -> None:
    cache = StaticCache(2, 3, 8, 16, torch.float32, cache_dtype=cache_dtype)
    k, v = (torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    k[0, 0, 0] = 0.0
    cache.update(k[:, :, :3], v[:, :, :3])
    read = cache.update(k[:, :, 3:], v[:, :, 3:])
    for x, found in zip((k, v), read, strict=True):
        assert found.dtype == torch.float32
        step = x.abs().amax(-1, keepdim=True) / (254 if cache_dtype == "int8" else 256)
        assert ((found[:, :, :4] - x).abs() <= step * 1.01).all()
        assert (found[:, :, 4:] == 0).all()
    cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(cache.keys()[0][0], read[0][1])


@pytest.mark.parametrize("cache", ["static-bf16", "static-int8"])
@pytest.mark.parametrize("search", [{}, {"beam": 3}, {"sample": True, "seed": 1}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "t5-small"])
def test_every_search_writes_whole_texts(name: str, search: dict[str, Any], cache: Any) -> None:
    model, prompts = small(name), [[5, 6, 7, 8], [3], [4, 9]]
    made = generate(model, prompts, max_new_tokens=8, cache=cache, **search)
    plain = generate(model, prompts, max_new_tokens=8, cache="static", **search)
    for some, others in zip(made.hypotheses, plain.hypotheses, strict=True):
        assert some[0].tokens[:1] == others[0].tokens[:1] or search  # the prompt itself is read unrounded
        assert some[0].score == pytest.approx(others[0].score, abs=0.3)


def test_what_cannot_be_rounded_says_so() -> None:
    with pytest.raises(ValueError, match="cache_dtype='int8' needs a preallocated cache"):
        small("gpt2").new_cache(cache_dtype="int8")
    with pytest.raises(ValueError, match="does not apply to a recurrent model"):
        generate(small("luong-lstm"), [[5, 6]], max_new_tokens=3, cache="static-int8")
