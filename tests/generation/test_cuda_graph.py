"""Captured decoding: the step written out is the model, and what runs ahead writes what the eager search writes.

Without a GPU the same code runs uncaptured, with the same buffers and indices; the kernels run in Triton's interpreter
where TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from models.small import small, source_of
from regard.attention.taps import record
from regard.config import RopeScalingConfig
from regard.generation import Generated, cuda_graph, generate, stream_tokens
from regard.generation.captured_search import SearchBuffers
from regard.generation.cuda_graph import (
    CapturedStep,
    CudaGraphEngine,
    GraphDecoder,
    GraphShape,
    PromptPass,
    can_capture,
    release_captures,
)
from regard.generation.decode_step import DecodeStep, TorchOps, can_fuse, capture_obstacle, merge_parts
from regard.generation.generate import prepare
from regard.generation.generation_config import GenerateConfig
from regard.generation.prompts import ModelInputs, pad_prompts, pad_sources
from regard.generation.step_keys import DecodeState, StepKeys
from regard.models import Decoder, EncoderDecoder, Model

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICES = [pytest.param("cpu", id="interpreted") if INTERPRETED else pytest.param("cuda", id="cuda", marks=gpu)]

PROMPTS = [[5, 6, 7, 8, 9], [3], [4, 11, 12]]
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"sample": True, "seed": 3, "n_best": 2},
    "nucleus": {"temperature": 1.3, "top_p": 0.8, "top_k": 9, "min_p": 0.01, "seed": 5},
    "penalty": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {5: 4.0, 7: float("-inf")}},
    "stops": {"stop": [[9], [12, 4]]},
    "by step": {"no_repeat_ngram": 2, "min_new_tokens": 1},
    "not too short": {"min_new_tokens": 6},
    "forced": {"prefix": (8, 9)},
    "beam": {"beam": 3, "n_best": 2},
    "beam of groups": {"beam": 4, "groups": 2, "diversity_penalty": 0.4, "n_best": 3},
    "beam to the end": {"beam": 3, "early_stopping": "never", "length_penalty": 0.6, "penalty_form": "gnmt"},
    "beam that ends": {"beam": 3, "early_stopping": True, "ended_first": True, "logit_bias": {2: 3.0}},
    "beam not too short": {"beam": 3, "min_new_tokens": 6},
    "beam by step": {"beam": 3, "no_repeat_ngram": 2, "stop": [[9]]},
}
FEW = ("greedy", "drawn", "beam")  # of them
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "untied": ("gpt2", {"tie_head": False, "head_bias": True}),
    "gelu": ("gpt2", {"activation": "gelu"}),
    "llama": ("llama-1b", {}),
    "grouped": ("gpt2", {"n_kv_heads": 2, "positions": "rope", "qk_norm": True}),
    "sinusoidal": ("gpt2", {"positions": "sinusoidal", "scale_embeddings": True}),
    "scaled": ("gpt2", {"logit_scale": 0.3, "attention_scale": 0.2, "norm_bias": False}),
    "shared": ("gpt2", {"share_layers": True, "norm": "rms"}),
}
FORMS |= {
    "post-norm": ("gpt2", {"norm_place": "post"}),
    "post-norm rms": ("gpt2", {"norm_place": "post", "norm": "rms", "embedding_norm": True}),
    "alibi": ("gpt2", {"positions": "alibi"}),
}
WITH_ENCODER: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("transformer-base", {}),
    "pre-norm": ("transformer-base", {"norm_place": "pre", "n_kv_heads": 2, "target_vocab_size": 29}),
    "t5": ("t5-small", {}),
    "gated t5": ("t5-small", {"activation": "geglu", "tie_head": False}),
    "captioner": ("captioner", {}),
}
ONLY_PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "both norms": ("gpt2", {"norm_place": "both"}),
    "no norm": ("gpt2", {"norm": "none"}),
}


def decoder(name: str, **fields: Any) -> Decoder:
    model = small(name, **fields)
    assert isinstance(model, Decoder)
    return model


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but without capture."""
    as_on_cuda = lambda model: model not in cuda_graph._refused and capture_obstacle(model) is None  # noqa: E731
    monkeypatch.setattr(sys.modules[prepare.__module__], "can_capture", as_on_cuda)


def eager(*inputs: Any, **fields: Any) -> Generated:
    """``generate`` without captured steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[prepare.__module__], "can_capture", lambda model: False)
        return generate(*inputs, **fields)


def sources_of(model: Model) -> Any:
    """Three sources: of different lengths, where they are texts."""
    whole = source_of(model.config)
    return whole if model.config.source == "image" else [row[:n] for row, n in zip(whole, (9, 4, 6), strict=True)]


def texts(made: Generated) -> list[list[tuple[list[int], str]]]:
    return [[(text.tokens, text.finish) for text in some] for some in made.hypotheses]


def same(one: Generated, other: Generated) -> None:
    assert texts(one) == texts(other)
    for some, others in zip(one.hypotheses, other.hypotheses, strict=True):
        assert [t.score for t in some] == pytest.approx([t.score for t in others], abs=1e-4)


# ---- the step


def steps_of(model: Model, form: Any, parts: Any, n: int = 4, copies: int = 1) -> tuple[Tensor, Tensor]:
    """Logits (n, R, V) of n given tokens a row after ragged prompts: by the step, and by whole texts.

    Of several copies, each row continues another one at every step.
    """
    rows, device = len(PROMPTS) * copies, model.device
    prompts = pad_prompts(PROMPTS, model.config, GenerateConfig(max_new_tokens=n + 1), device)
    generator = torch.Generator().manual_seed(1)
    given = torch.randint(3, 29, (n, rows), generator=generator).to(device)
    sources = None if model.is_decoder_only else [x.to(device) for x in sources_of(model)]
    told = [[*row] for row in PROMPTS for _ in range(copies)]
    with torch.no_grad():
        engine = CudaGraphEngine(model, None if sources is None else pad_sources(sources, model))
        decoder = GraphDecoder(
            model, GraphShape(len(PROMPTS), copies, 12, 0 if sources is None else 32), form=form, ops=parts
        )
        engine._capture = lambda *_: decoder.logit_step()  # type: ignore[method-assign]
        engine.decoder = decoder
        engine.prefill(prompts, copies)
        made, whole = [], []
        for step, tokens in enumerate(given):
            order = torch.randint(copies, (rows,), generator=generator) + torch.arange(rows) // copies * copies
            if step:
                engine.select(order.to(device))
                told = [[*told[row]] for row in order.tolist()]
            made.append(engine.decode_one_token(tokens))
            for row, token in zip(told, tokens.tolist(), strict=True):
                row.append(token)
            whole.append(
                torch.stack([_last_logits(model, text, sources, row // copies) for row, text in enumerate(told)])
            )
    return torch.stack(made), torch.stack(whole)


def _last_logits(model: Model, text: list[int], sources: list[Tensor] | None, number: int) -> Tensor:
    tokens = torch.tensor([text], device=model.device)
    if sources is None:
        return model(tokens)[0, -1].float()
    return model(pad_sources([sources[number]], model).values, tokens)[0, -1].float()


@pytest.mark.parametrize("form", ["plain", "few", "many"])
@pytest.mark.parametrize("which", FORMS)
def test_every_form_of_the_step_is_the_model(which: str, form: str) -> None:
    name, fields = FORMS[which]
    model = small(name, **fields).double()
    assert can_fuse(model)
    made, whole = steps_of(model, form, TorchOps)
    torch.testing.assert_close(made, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["plain", "few", "many"])
@pytest.mark.parametrize("which", WITH_ENCODER)
def test_every_form_of_the_step_reads_the_encoder(which: str, form: str) -> None:
    name, fields = WITH_ENCODER[which]
    model = small(name, **fields).double()
    assert isinstance(model, EncoderDecoder)
    made, whole = steps_of(model, form, TorchOps)
    torch.testing.assert_close(made, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "t5-small", "transformer-base"])
def test_beams_continue_one_another_without_copies_of_keys(name: str) -> None:
    model = small(name).double()
    made, whole = steps_of(model, None, TorchOps, copies=3)
    torch.testing.assert_close(made, whole, rtol=1e-5, atol=1e-5)


def test_an_encoders_keys_are_held_once_a_source() -> None:
    keys = StepKeys(small("transformer-base"), 12, 16, copies=4, source_len=8)
    assert {x.shape[0] for pair in keys.memory for x in pair} == {3}
    assert {x.shape[0] for pair in keys.layers for x in pair} == {12}


@pytest.mark.parametrize("which", ONLY_PLAIN)
def test_other_layers_keep_their_own_order(which: str) -> None:
    name, fields = ONLY_PLAIN[which]
    model = decoder(name, **fields).double()
    made, whole = steps_of(model, None, TorchOps)
    torch.testing.assert_close(made, whole)
    with pytest.raises(ValueError, match="form='few' needs plain pre-norm or post-norm layers"):
        steps_of(model, "few", TorchOps)


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": "xl"},
        {"mixer": "additive"},
        {"mixer": "linear"},
        {"sparsity": "strided", "sparsity_size": 4},
        {"positions": "rope", "rope_scaling": RopeScalingConfig(kind="dynamic", factor=4.0)},
    ],
    ids=str,
)
def test_what_cannot_be_written_out_says_why(fields: dict[str, Any]) -> None:
    model = decoder("gpt2", **fields)
    why = capture_obstacle(model)
    assert why is not None
    with pytest.raises(ValueError, match=why):
        DecodeStep(model, StepKeys(model, 1, 8), DecodeState.empty(1, 8, model.device))
    assert capture_obstacle(small("bahdanau-gru")) is not None


def test_rows_that_are_done_stay_at_their_last_place() -> None:
    state = DecodeState.empty(2, 4, torch.device("cpu"))
    state.begin(torch.tensor([3, 7]), torch.tensor([4, 9]))
    for _ in range(3):
        state.advance()
    assert state.lengths.tolist() == [4, 9]


def test_a_capture_without_cuda_is_the_function() -> None:
    count = torch.zeros(1)
    step = CapturedStep(lambda: count.add_(1), torch.device("cpu"))
    assert [float(step() or 0) for _ in range(3)] == [1, 2, 3]  # not warmed up


def test_models_with_threads_of_their_own_are_captured_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch captures on one stream, and synchronises the device before: neither while another thread captures."""
    capturing, both_run = threading.Lock(), threading.Barrier(2)

    @contextmanager
    def capture(*_: Any, **__: Any) -> Iterator[None]:
        assert capturing.acquire(blocking=False), "the stream is capturing already"
        time.sleep(0.1)
        yield
        capturing.release()

    cuda = mock.MagicMock(graph=capture, synchronize=lambda: capturing.locked() and pytest.fail("while capturing"))
    monkeypatch.setattr(torch, "cuda", cuda)

    def begin(_: int) -> None:
        both_run.wait()
        CapturedStep(lambda: None, torch.device("cuda"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(begin, range(2)))


# ---- the texts


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    ("name", "search"), [*(("gpt2", search) for search in SEARCHES), ("llama-1b", "greedy"), ("llama-1b", "beam")]
)
def test_what_runs_ahead_writes_what_the_search_writes(name: str, search: str) -> None:
    model, fields = decoder(name).double(), SEARCHES[search]
    for n_new in (fields.get("min_new_tokens", 1), 40):  # 40: beyond max_len, where rows end one by one
        told = eager(model, PROMPTS, max_new_tokens=n_new, **fields)
        same(generate(model, PROMPTS, max_new_tokens=n_new, **fields), told)
    for index, prompt in enumerate(PROMPTS[:2]):  # the same decoder serves, whatever it held before
        alone = generate(model, prompt, max_new_tokens=40, cache="static", **fields)
        assert texts(alone)[0] == texts(told)[index]


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    ("which", "search"),
    [
        *(("transformer", search) for search in ("greedy", "drawn", "stops", "beam", "beam of groups", "beam by step")),
        *((which, search) for which in ("pre-norm", "t5", "gated t5", "captioner") for search in ("greedy", "beam")),
    ],
)
def test_captured_translations_are_those_of_the_eager_search(which: str, search: str) -> None:
    name, given = WITH_ENCODER[which]
    model, fields = small(name, **given).double(), SEARCHES[search]
    sources = sources_of(model)
    target = PROMPTS if search in ("greedy", "beam") else None
    told = eager(model, sources, max_new_tokens=14, target=target, **fields)
    same(generate(model, sources, max_new_tokens=14, target=target, **fields), told)
    assert model in cuda_graph._decoders
    assert model not in cuda_graph._refused


@pytest.mark.usefixtures("graphed")
def test_a_batch_fills_a_part_of_a_larger_capture() -> None:
    """Five and six texts share the decoder of eight, and further rows change nothing."""
    model = small("transformer-base").double()
    sources = source_of(model.config, batch=6)
    for fields in ({}, {"beam": 3}):
        for n in (5, 6):
            told = eager(model, sources[:n], max_new_tokens=9, **fields)
            same(generate(model, sources[:n], max_new_tokens=9, **fields), told)
    assert [shape.prompts for shape in cuda_graph._decoders[model]] == [8, 8]


@pytest.mark.usefixtures("graphed")
def test_a_captured_search_records_what_each_step_kept() -> None:
    model = small("transformer-base").double()
    fields: dict[str, Any] = {"beam": 3, "max_new_tokens": 20, "logit_bias": {2: 2.5}}
    told, made = eager(model, sources_of(model), **fields), generate(model, sources_of(model), **fields)
    n = len(told.steps or ())
    assert n
    assert made.steps is not None
    assert made.parents is not None
    assert told.parents is not None
    for one, other in zip(made.steps[:n], told.steps or (), strict=True):
        assert one.prompt.tolist() == other.prompt.tolist()
        for name in ("parent", "token", "score", "ended_parent", "ended_token", "ended_score"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-4)
    for prompt, hypotheses in enumerate(told.hypotheses):
        n_steps = max(len(text.tokens) for text in hypotheses)
        assert torch.equal(made.parents[:n_steps, prompt], told.parents[:n_steps, prompt])


@pytest.mark.usefixtures("graphed")
def test_steps_end_soon_after_the_last_text(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = DecodeStep.logits
    monkeypatch.setattr(DecodeStep, "logits", lambda step: calls.append(1) or plain(step))
    model = small("transformer-base", max_len=300).double()
    for fields in ({}, {"beam": 2, "early_stopping": True}):
        calls.clear()
        generate(model, sources_of(model), max_new_tokens=250, logit_bias={2: 60.0}, **fields)
        assert len(calls) <= 2 * cuda_graph.BLOCK_STEPS


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("name", ["gpt2", "llama-7b"])
def test_prompts_that_come_again_are_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = decoder(name).double(), []
    plain = PromptPass.__call__
    monkeypatch.setattr(PromptPass, "__call__", lambda step, prompts: calls.append(prompts) or plain(step, prompts))
    shorter = [row[: max(1, len(row) - 1)] for row in PROMPTS]
    for prompts in (PROMPTS, shorter, PROMPTS, shorter):
        assert texts(generate(model, prompts, max_new_tokens=3)) == texts(eager(model, prompts, max_new_tokens=3))
    assert len(calls) == 3
    monkeypatch.setattr(PromptPass, "__init__", mock.Mock(side_effect=RuntimeError("no memory")))
    for _ in range(3):
        made, told = (write(model, PROMPTS[:2], max_new_tokens=3) for write in (generate, eager))
        assert texts(made) == texts(told)
    assert len(calls) == 3


@pytest.mark.usefixtures("graphed")
def test_the_decoder_is_used_again_until_the_weights_move() -> None:
    model = decoder("gpt2").double()
    config = GenerateConfig(max_new_tokens=4)

    def used() -> GraphDecoder:
        engine, prompts = prepare(model, ModelInputs(PROMPTS, None), config)
        assert isinstance(engine, CudaGraphEngine)
        with torch.no_grad():
            engine.prefill(prompts)
        assert engine.decoder is not None
        return engine.decoder

    first = used()
    gc.collect()
    assert used() is first
    before = texts(generate(model, PROMPTS, config))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.0)  # trained in place: the capture reads the new values
    assert texts(generate(model, PROMPTS, config)) == texts(eager(model, PROMPTS, config)) != before
    assert used() is first
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    assert used() is not first
    release_captures(model)
    assert model not in cuda_graph._decoders


@pytest.mark.usefixtures("graphed")
def test_a_model_is_let_go() -> None:
    model = decoder("gpt2").double()
    for fields in ({}, {"beam": 2}):
        generate(model, PROMPTS, max_new_tokens=3, **fields)
    n_before = len(cuda_graph._decoders)
    assert any(isinstance(x, SearchBuffers) for y in cuda_graph._decoders[model].values() for x in y._captures.values())
    del model
    gc.collect()
    assert len(cuda_graph._decoders) == n_before - 1


@pytest.mark.usefixtures("graphed")
def test_two_streams_of_one_model_do_not_disturb_each_other() -> None:
    model = decoder("gpt2").double()
    told = [eager(model, prompt, max_new_tokens=12).hypotheses[0][0].tokens for prompt in ([5, 6], [9, 4])]
    one, other = (stream_tokens(model, prompt, max_new_tokens=12) for prompt in ([5, 6], [9, 4]))
    found: list[list[int]] = [[], []]
    for stream, tokens in ((one, found[0]), (other, found[1])) * 12:
        tokens += [token for token in [next(stream, None)] if token is not None]
    assert found == told


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("name", ["gpt2", "t5-small"])
def test_a_draft_is_checked_by_the_plain_engine(name: str) -> None:
    """Which reads several tokens at once and takes some back."""
    model, draft = small(name).double(), small(name, n_layers=1).double()
    prompt = PROMPTS[0] if name == "gpt2" else sources_of(model)[:1]
    made = generate(model, prompt, max_new_tokens=9, draft=draft)
    assert texts(made) == texts(eager(model, prompt, max_new_tokens=9))


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    "fails", ["GraphDecoder", "GraphDecoder.token_steps", "GraphDecoder.logit_step", "CapturedStep"]
)
@pytest.mark.parametrize("fields", [{}, {"beam": 3}, {"no_repeat_ngram": 2}], ids=str)
def test_what_cannot_be_captured_is_written_all_the_same(
    monkeypatch: pytest.MonkeyPatch, fails: str, fields: dict[str, Any]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = small("t5-small").double()
    sources = sources_of(model)
    told = eager(model, sources, max_new_tokens=6, **fields)
    monkeypatch.setattr(f"regard.generation.cuda_graph.{fails}", fail)
    monkeypatch.setattr("regard.generation.captured_search.CapturedStep", cuda_graph.CapturedStep)
    used = {"GraphDecoder.token_steps": not fields, "GraphDecoder.logit_step": "no_repeat_ngram" in fields}
    if used.get(fails, True):
        with pytest.warns(UserWarning, match="without a CUDA graph: RuntimeError: operation not permitted"):
            same(generate(model, sources, max_new_tokens=6, **fields), told)
        assert model in cuda_graph._refused
    same(generate(model, sources, max_new_tokens=6, cache="static", **fields), told)


@pytest.mark.usefixtures("graphed")
def test_a_window_goes_the_other_way_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    model = decoder("gpt2", window=3).double()
    same(generate(model, PROMPTS, max_new_tokens=8), eager(model, PROMPTS, max_new_tokens=8))
    assert not recwarn.list
    assert model not in cuda_graph._refused  # a text shorter than the window may be captured yet


@pytest.mark.parametrize("name", ["gpt2", "transformer-base"])
def test_rows_that_are_full_wait_for_the_others(name: str) -> None:
    """The longest prompt has the fewest places left; a static batch keeps it to the end."""
    model = small(name)
    rows = PROMPTS if name == "gpt2" else [[5, 6], [7, 8], [9, 5]]
    target = None if name == "gpt2" else PROMPTS
    fields: dict[str, Any] = {"max_new_tokens": 40, "target": target}
    assert generate(model, rows, cache="static", **fields).tokens == generate(model, rows, **fields).tokens


def test_nothing_is_captured_without_cuda() -> None:
    assert not can_capture(decoder("gpt2"))


# ---- the kernels


def kernels() -> Any:
    from regard.kernels import decoding

    return decoding


def draw(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.fixture(params=["lines", "tiles"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two ways of the kernels of attention, whatever the precision."""
    pytest.importorskip("triton")
    for name in ("uses_tensor_cores", "goes_by_tiles"):
        monkeypatch.setattr(f"regard.kernels.decode_attention.{name}", lambda *_: request.param == "tiles")


def near(ours: Tensor, low: Tensor, exact: Tensor) -> None:
    """At most twice as far from float64 as plain torch in the same precision."""
    ours_off, low_off = ((x.double() - exact).abs().max().item() for x in (ours, low))
    assert ours_off <= 2 * low_off + 1e-6, (ours_off, low_off)


DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]  # its bf16 is cut off, not rounded


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 64), (6, 2, 24)])
@pytest.mark.parametrize("rows", [3, 70])
def test_the_kernel_of_attention(
    device: str, dtype: torch.dtype, heads: int, groups: int, width: int, rows: int
) -> None:
    rows = min(rows, 5) if INTERPRETED else rows
    slots = 300
    q = draw(rows, heads + 2 * groups, width, device=device, dtype=dtype)[:, :heads]  # a view, as in a model
    k, v = (draw(rows, groups, width, device=device, dtype=dtype, seed=s) for s in (1, 2))
    held = [draw(rows, groups, slots, width, device=device, dtype=dtype, seed=s) for s in (3, 4)]
    lengths = torch.tensor([(0, 1, 63, 64, 299, 120, 256)[row % 7] for row in range(rows)], device=device)
    results = {}
    for parts, wide in ((kernels(), dtype), (TorchOps, dtype), (TorchOps, torch.float64)):
        inputs = [x.to(wide) for x in (q, k, v)]
        own = [x.clone().to(wide) for x in held]
        for row, length in enumerate(lengths.tolist()):  # what lies beyond must not be read
            for x in own:
                x[row, :, length + 1 :] = float("nan") if parts is not TorchOps else 0
        results[parts, wide] = parts.attend_one(*inputs, *own, lengths, 0.2)
        for row, length in enumerate(lengths.tolist()):
            assert torch.equal(own[0][row, :, length], inputs[1][row])
            assert torch.equal(own[1][row, :, length], inputs[2][row])
    near(results[kernels(), dtype], results[TorchOps, dtype], results[TorchOps, torch.float64])


def use_short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys, so that a part of a few hundred has several."""
    for name, value in {"PART_KEYS": 50, "attention_tile": (16, 4), "dot_tile": (16, 4, 2)}.items():
        value = value if name.isupper() else lambda *_, value=value: value
        monkeypatch.setattr(f"regard.kernels.decode_attention.{name}", value)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("added", ["nothing", "both"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
def test_a_product_merges_the_parts_of_attention(
    device: str, dtype: torch.dtype, heads: int, groups: int, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_short_parts(monkeypatch)
    rows, width, slots = 2, 32, 200
    q = draw(rows, heads, width, device=device, dtype=dtype)
    k, v = (draw(rows, groups, width, device=device, dtype=dtype, seed=s) for s in (1, 2))
    held = [draw(rows, groups, slots, width, device=device, dtype=dtype, seed=s) for s in (3, 4)]
    weight = draw(50, heads * width, device=device, dtype=dtype, seed=5) / width
    origin = torch.randint(rows, (rows, slots), generator=torch.Generator().manual_seed(6)).to(device)
    bias = draw(heads, slots, device=device, dtype=dtype, seed=7)
    for length in (0, 1, 15, 16, 17, 64, 199):
        lengths, results = torch.full((rows,), length, device=device), []
        for parts, wide in ((kernels(), dtype), (TorchOps, dtype), (TorchOps, torch.float64)):
            inputs, own = [x.to(wide) for x in (q, k, v)], [x.clone().to(wide) for x in held]
            more = () if added == "nothing" else (origin, bias.to(wide))
            attended = parts.attend_one_in_parts(*inputs, *own, lengths, 0.2, *more)
            if parts is not TorchOps:
                assert [len(x) for x in attended] == [4, 4]
                torch.testing.assert_close(
                    merge_parts(*attended), parts.attend_one(*inputs, *own, lengths, 0.2, *more), rtol=2e-2, atol=2e-2
                )
            results.append(parts.linear(attended, weight.to(wide)))
            assert torch.equal(own[0][:, :, length], inputs[1])
        near(*results)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_merges_the_parts_of_a_memory(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_short_parts(monkeypatch)
    q = draw(6, 6, 32, device=device, dtype=dtype)
    k, v = (draw(3, 2, 100, 32, device=device, dtype=dtype, seed=s) for s in (1, 2))
    weight, lengths = draw(50, 192, device=device, dtype=dtype, seed=5) / 32, torch.tensor([100, 1, 33], device=device)
    results = []
    for parts, wide in ((kernels(), dtype), (TorchOps, dtype), (TorchOps, torch.float64)):
        attended = parts.attend_memory_in_parts(*(x.to(wide) for x in (q, k, v)), lengths, 0.2)
        assert parts is TorchOps or len(attended) == 2
        results.append(parts.linear(attended, weight.to(wide)))
    near(*results)


@pytest.mark.parametrize("device", DEVICES)
def test_which_kernel_attends(device: str) -> None:
    kernels()
    from regard.kernels.decode_attention import goes_by_tiles

    def heads(rows: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(rows, n, 8, dtype=dtype, device=device)

    assert not goes_by_tiles(heads(1, 12), 12), "by lines where few heads leave the GPU idle"
    assert goes_by_tiles(heads(64, 12), 12)
    assert goes_by_tiles(heads(1, 12), 4), "heads that share keys read them once"
    assert not goes_by_tiles(heads(64, 12, torch.float32), 12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_the_tiles_of_wide_heads_fit_on_a_multiprocessor(device: str, width: int) -> None:
    kernels()
    from regard.kernels.decode_attention import attention_tile, dot_tile

    for n_programs, queries, memory in product((1, 1000), (16, 256), (99 << 10, 163 << 10, 227 << 10)):
        keys, _, stages = dot_tile(n_programs, queries, width, memory)
        loaded = (stages - 1) * 2 * keys * width * 2  # bytes of keys and values before a tile is multiplied
        assert keys >= 16, "as tensor cores require"
        assert loaded + queries * width * 2 <= 0.75 * memory or keys == 16
        keys, warps = attention_tile(n_programs, width)
        assert keys * width <= 128 * 32 * warps, "numbers in the registers of the threads"


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_start_early_on_hopper_only(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on an MI300, whose compute capability is that of a later GPU than Hopper's."""
    kernels()
    from regard.kernels.decode_attention import overlap

    for hip, capability, starts_early in ((None, (9, 0), True), (None, (8, 9), False), ("6.4", (9, 4), False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, at=capability: at)
        overlap.cache_clear()
        assert overlap(torch.device("cuda"))["EARLY"] is starts_early
    overlap.cache_clear()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("added", ["origin", "bias", "both"])
def test_the_kernel_of_attention_over_other_rows_with_a_bias(device: str, dtype: torch.dtype, added: str) -> None:
    rows, heads, groups, width, slots = 5, 4, 2, 24, 90
    q = draw(rows, heads, width, device=device, dtype=dtype)
    k, v = (draw(rows, groups, width, device=device, dtype=dtype, seed=s) for s in (1, 2))
    held = [draw(rows, groups, slots, width, device=device, dtype=dtype, seed=s) for s in (3, 4)]
    origin = torch.randint(rows, (rows, slots), generator=torch.Generator().manual_seed(5)).to(device)
    bias = draw(heads, slots, device=device, dtype=dtype, seed=6)
    index, by_distance = None if added == "bias" else origin, None if added == "origin" else bias
    for length in (0, 1, 64, 89):  # of all rows: beams of one text are equally long, and none reads what another writes
        lengths, results = torch.full((rows,), length, device=device), []
        for parts, wide in ((kernels(), dtype), (TorchOps, dtype), (TorchOps, torch.float64)):
            inputs, own = [x.to(wide) for x in (q, k, v)], [x.clone().to(wide) for x in held]
            to_add = None if by_distance is None else by_distance.to(wide)
            results.append(parts.attend_one(*inputs, *own, lengths, 0.2, index, to_add))
        near(*results)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "width", "slots"), [(4, 4, 64, 96), (6, 2, 24, 40)])
def test_the_kernel_of_attention_to_a_memory(
    device: str, dtype: torch.dtype, heads: int, groups: int, width: int, slots: int
) -> None:
    q = draw(6, heads, width, device=device, dtype=dtype)
    k, v = (draw(3, groups, slots, width, device=device, dtype=dtype, seed=s) for s in (1, 2))
    lengths = torch.tensor([slots, 1, 33], device=device)
    for x in (k, v):
        x[2, :, 33:] = 0
    exact = TorchOps.attend_memory(*(x.double() for x in (q, k, v)), lengths, 0.2)
    low = TorchOps.attend_memory(q, k, v, lengths, 0.2)
    for x in (k, v):
        x[2, :, 33:] = float("nan")  # what lies beyond must not be read
    near(kernels().attend_memory(q, k, v, lengths, 0.2), low, exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_kernel_of_a_product_normalises_the_residual_too(device: str, dtype: torch.dtype, kind: str) -> None:
    x, weight = (draw(r, 130, device=device, dtype=dtype, seed=r) for r in (3, 33))
    residual, gain, shift = (draw(*n, 33, device=device, dtype=dtype, seed=s) for n, s in (((3,), 6), ((), 7), ((), 8)))
    norm = (kind, gain, shift if kind == "layer" else None, 1e-5)
    wide: Any = (kind, *(None if x is None else x.double() for x in norm[1:3]), 1e-5)
    options = {"residual_norm": norm, "scale": 0.3}
    exact = TorchOps.linear(
        x.double(), weight.double(), residual=residual.double(), **{**options, "residual_norm": wide}
    )
    ours, plain = (parts.linear(x, weight, residual=residual, **options) for parts in (kernels(), TorchOps))
    near(ours, plain, exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("k", "n", "norm", "activation"),
    [
        (768, 40, "layer", "gelu_tanh"),
        (40, 20, "layer", "gelu_tanh"),
        (96, 2050, "rms", "gelu"),
        (1500, 33, "layer", None),
        (1500, 33, "rms", "silu"),
        (3072, 12, None, None),
        (40, 9000, "layer", "relu2"),
        (130, 20, None, "quick_gelu"),
        (130, 20, "layer", "relu"),
    ],
)
def test_the_kernel_of_a_product(
    device: str, dtype: torch.dtype, k: int, n: int, norm: str | None, activation: str | None
) -> None:
    x, weight = (draw(r, k, device=device, dtype=dtype, seed=r) for r in (3, n))
    weight = weight / k**0.5
    bias, residual = draw(n, device=device, dtype=dtype, seed=5), draw(3, n, device=device, dtype=dtype, seed=6)
    gain, shift = (draw(k, device=device, dtype=dtype, seed=s) for s in (7, 8))
    given = None if norm is None else (norm, gain, shift if norm == "layer" else None, 1e-5)
    options = {"activation": activation, "residual": residual}
    wide = None if given is None else (norm, *(None if x is None else x.double() for x in given[1:3]), 1e-5)
    exact = TorchOps.linear(
        x.double(), weight.double(), bias.double(), norm=wide, activation=activation, residual=residual.double()
    )
    ours, plain = (parts.linear(x, weight, bias, norm=given, **options) for parts in (kernels(), TorchOps))
    assert ours.dtype == dtype
    near(ours, plain, exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_kernel_of_a_product_in_several_tiles(
    device: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a large vocabulary, where a program loads a part of each line at once."""
    monkeypatch.setattr(kernels(), "linear_tile", lambda n, k: (4, 4, 16))
    x, weight = (draw(r, 40, device=device, dtype=dtype, seed=r) for r in (3, 9))
    gain, shift = (draw(40, device=device, dtype=dtype, seed=s) for s in (7, 8))
    norm: Any = (kind, gain, shift if kind == "layer" else None, 1e-5)
    wide: Any = (kind, *(None if x is None else x.double() for x in norm[1:3]), 1e-5)
    exact = TorchOps.linear(x.double(), weight.double(), norm=wide)
    near(kernels().linear(x, weight, norm=norm), TorchOps.linear(x, weight, norm=norm), exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("added", [0, 1, 3])
def test_the_kernel_of_residual_and_norm(device: str, dtype: torch.dtype, kind: str, added: int) -> None:
    x, bias = (draw(*shape, device=device, dtype=dtype, seed=1) for shape in ((5, 200), (200,)))
    y = draw(added, 5, 200, device=device, dtype=torch.float32 if added > 1 else dtype, seed=2) if added else None
    gain, shift = (draw(200, device=device, dtype=dtype, seed=s) for s in (3, 4))
    norm = (kind, gain, shift if kind == "layer" else None, 1e-5)
    total, normed = kernels().add_norm(x, y, bias, norm)
    plain = TorchOps.add_norm(x, None if y is None else y.to(dtype), bias, norm)
    exact = x.double() if y is None else x.double() + y.double().sum(0) + bias.double()
    near(total, plain[0], exact)
    wide: Any = (kind, *(None if p is None else p.double() for p in norm[1:3]), 1e-5)
    near(normed, plain[1], TorchOps.add_norm(total.double(), None, None, wide)[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize(("k", "n"), [(128, 96), (1536, 40), (64, 50), (256, 9000)])
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "silu"])
def test_the_kernel_of_a_product_of_many_rows(device: str, rows: int, k: int, n: int, activation: str | None) -> None:
    if INTERPRETED and n > 1000:
        pytest.skip("the interpreter takes minutes for that many")
    dtype = DTYPES[-1]
    x, weight = (draw(r, k, device=device, dtype=dtype, seed=r) for r in (rows, n))
    weight, bias = weight / k**0.5, draw(n, device=device, dtype=dtype, seed=5)
    exact = TorchOps.product(x.double(), weight.double(), bias.double(), activation)
    ours, plain = (parts.product(x, weight, bias, activation) for parts in (kernels(), TorchOps))
    near(ours, plain, exact)
    pieces = kernels().product_in_parts(x, weight)
    torch.testing.assert_close(pieces.double().sum(0), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("places", [False, True])
def test_the_kernel_of_embeddings(device: str, dtype: torch.dtype, places: bool) -> None:
    table, rows = draw(50, 40, device=device, dtype=dtype), draw(12, 40, device=device, dtype=dtype, seed=1)
    tokens, lengths = torch.tensor([3, 49, 0], device=device), torch.tensor([9, 0, 4], device=device)
    ours, plain = (
        parts.embed(tokens, lengths, table, 1.0, rows if places else None, 2) for parts in (kernels(), TorchOps)
    )
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [31, 5000])
@pytest.mark.parametrize("advance", [False, True])
def test_the_kernel_of_the_greedy_choice(device: str, dtype: torch.dtype, vocab: int, advance: bool) -> None:
    logits = draw(4, vocab, device=device, dtype=dtype) * 3
    logits[1, [7, 20, 25]] = logits.max() + 1  # of equals the first
    logits[2] = float("-inf")
    logits[2, 11] = 1.0
    states = []
    for parts in (kernels(), TorchOps):
        state = DecodeState.empty(4, 6, torch.device(device))
        state.begin(torch.tensor([3, 4, 5, 6]), torch.tensor([9, 4, 9, 9]))
        state.steps.copy_(torch.tensor([0, 1, 2, 5]))
        parts.store_greedy_tokens(logits, *state, advance, 7, 2)
        states.append(state)
    for name, ours, plain in zip(DecodeState._fields, *states, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert states[0].tokens[1:3].tolist() == [20, 11]  # 7 is the end token, and step 1 is too soon for it


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [31, 5000])
def test_the_kernel_of_the_best_tokens(device: str, dtype: torch.dtype, vocab: int) -> None:
    logits = draw(4, vocab, device=device, dtype=dtype) * 3
    logits[2] = float("-inf")
    logits[2, 11] = 1.0
    found = []
    for parts in (kernels(), TorchOps):
        scores, tokens = parts.best_tokens(logits, 6)
        best = scores.topk(6)
        found.append((best.values, tokens.gather(1, best.indices)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    ours, plain = (logits.gather(1, tokens)[[0, 1, 3]] for _, tokens in found)  # equals may come in any order
    assert torch.equal(ours, plain)
    assert found[0][1][2, 0] == 11


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["plain", "few", "many"])
@pytest.mark.parametrize("which", ["gpt2", "llama", "grouped", "post-norm", "transformer", "t5", "captioner"])
@pytest.mark.parametrize("copies", [1, 3])
def test_the_step_made_of_kernels_is_the_model(device: str, which: str, form: str, copies: int) -> None:
    name, fields = {**FORMS, **WITH_ENCODER}[which]
    made, whole = steps_of(small(name, **fields).to(device), form, kernels(), copies=copies)
    torch.testing.assert_close(made, whole, rtol=1e-4, atol=1e-4)


# ---- on a GPU


class TestCuda:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("name", "search", "dtype"),
        [
            *(("gpt2", search, torch.float32) for search in SEARCHES),
            *(("transformer-base", search, torch.float32) for search in SEARCHES),
            *((name, search, torch.float32) for name in ("llama-1b", "t5-small", "captioner") for search in FEW),
            *((name, search, torch.float64) for name in ("gpt2", "transformer-base") for search in FEW),
        ],
        ids=str,
    )
    def test_captured_texts_are_those_of_the_cpu(self, name: str, search: str, dtype: torch.dtype) -> None:
        model, fields = small(name).to(dtype), SEARCHES[search]
        inputs = PROMPTS if model.is_decoder_only else sources_of(model)
        lengths = (fields.get("min_new_tokens", 1), 40)
        told = [texts(generate(model, inputs, max_new_tokens=n, **fields)) for n in lengths]
        model.cuda()
        for _ in range(2):  # captured, then used again
            for n, some in zip(lengths, told, strict=True):
                assert texts(generate(model, inputs, max_new_tokens=n, **fields)) == some
        assert model in cuda_graph._decoders
        assert model not in cuda_graph._refused

    @pytest.mark.parametrize("fields", [{}, {"beam": 2}], ids=str)
    def test_it_is_captured(self, fields: dict[str, Any]) -> None:
        model = small("gpt2").cuda()
        generate(model, PROMPTS, max_new_tokens=9, **fields)
        (kept,) = cuda_graph._decoders[model].values()
        (captured,) = kept._captures.values()
        step = captured.steps if isinstance(captured, SearchBuffers) else captured
        assert isinstance(step._run.__self__, torch.cuda.CUDAGraph)
        with record(model):
            assert not can_capture(model)
        handle = model.modules().__next__().register_forward_hook(lambda *_: None)
        assert not can_capture(model)
        handle.remove()
        assert can_capture(model)

    @pytest.mark.parametrize("name", ["gpt2", "transformer-base"])
    def test_weights_trained_between_two_texts_count(self, name: str) -> None:
        model = small(name).cuda()
        inputs = PROMPTS if name == "gpt2" else sources_of(model)
        generate(model, inputs, max_new_tokens=9)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(-1.0)
        assert texts(generate(model, inputs, max_new_tokens=9)) == texts(eager(model, inputs, max_new_tokens=9))

    @pytest.mark.parametrize("rows", [2, 64])
    def test_half_precision_is_as_near_as_eager(self, rows: int) -> None:
        exact = wide_model().cuda()
        tokens = torch.randint(3, 200, (rows, 40), generator=torch.Generator().manual_seed(0)).cuda()
        with torch.no_grad():
            told = exact(tokens).float()
            low = wide_model().cuda().bfloat16()
            eager_logits = low(tokens).float()
            made = teacher_forced(low, tokens)
        off, eager_off = ((x - told).square().mean().sqrt().item() for x in (made, eager_logits))
        assert off <= 2 * eager_off


def teacher_forced(model: Decoder, tokens: Tensor) -> Tensor:
    """Logits (R, T, V) by captured steps."""
    rows, length = tokens.shape
    decoder = GraphDecoder(model, GraphShape(rows, 1, length))
    step = decoder.logit_step()
    decoder.begin(torch.zeros_like(tokens[:, 0]), torch.full_like(tokens[:, 0], length))
    made = []
    for column in tokens.unbind(1):
        decoder.state.tokens.copy_(column)
        out = step()
        assert out is not None
        made.append(out.float().clone())  # the next step writes there
    return torch.stack(made, 1)


def wide_model() -> Decoder:
    return decoder("gpt2", vocab_size=200, d_model=128, n_heads=4, d_ff=256, max_len=64)
