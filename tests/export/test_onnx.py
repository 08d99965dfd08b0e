"""ONNX graphs compute what the models compute: at every shape, with any past, at padding, under every search."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram

from models.small import inputs_of, small, source_of
from regard.attention.cache import GrowingCache
from regard.attention.taps import record
from regard.config import ModelConfig
from regard.errors import BadModelFile, RegardError
from regard.export.onnx_export import FOLDER, export_onnx, open_onnx
from regard.export.onnx_graphs import Graph
from regard.export.onnx_runtime import GraphCache, OnnxModel, OnnxSession
from regard.export.onnx_trace import write_graph
from regard.generation import BeamSearch, decode_loop, generate, stream_tokens
from regard.generation.cached_engine import DecodingEngine
from regard.generation.generation_config import GenerateConfig
from regard.generation.prompts import pad_prompts
from regard.models import Decoder, EncoderDecoder, Model, Recurrent, build
from regard.presets import PRESETS

from .conftest import MadeOnce

BOUND = 1e-4
N_SHAPES = 50

# One of each kind; the rest is marked slow, because tracing alone takes seconds. One layer shows all there is to trace,
# except where layers differ, are shared or have to be told apart by their numbers.
QUICK: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5-small", {"n_layers": 1, "n_decoder_layers": 1}),
    "llama": ("llama-1b", {"n_layers": 1}),
}
SLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit-tiny", {"n_layers": 1}),
    "transformer": ("transformer-tiny", {"target_vocab_size": 17, "n_decoder_layers": 1, "n_decoder_heads": 2}),
    "mistral": ("mistral-7b", {"n_layers": 1, "qk_norm": True, "rope_scaling": {"kind": "dynamic", "factor": 2.0}}),
    "bert": ("bert-base", {"n_layers": 1}),
    "bert-masked": ("bert-base-masked", {"n_layers": 1, "positions_skip_padding": True, "position_offset": 2}),
    "modernbert": (
        "bert-base-masked",
        {
            **{"positions": "rope", "norm_place": "pre", "first_norm": False, "norm_bias": False, "n_segments": 0},
            **{"head_transform_bias": False, "activation": "geglu", "head_activation": "gelu", "head_bias": True},
            **{"window": 3, "window_layers": (1,), "window_rope_base": 100.0},
        },
    ),
    "span": ("bert-base", {"n_layers": 1, "head": "span", "pooler": "none"}),
    "replaced": ("bert-base", {"n_layers": 1, "head": "replaced", "pooler": "none"}),
    "captioner": ("captioner", {"n_layers": 1}),
    "regions": ("captioner-regions", {"n_layers": 1}),
    "luong": ("luong-lstm", {}),
    "bahdanau": ("bahdanau-gru", {"n_layers": 1}),
    "plain": ("lstm-plain", {"n_layers": 1}),
    "dot": ("luong-lstm", {"n_layers": 1, "alignment": "dot", "input_feeding": False}),
    "alibi": ("gpt2", {"n_layers": 1, "positions": "alibi"}),
    "xl": ("gpt2", {"n_layers": 1, "positions": "xl"}),
    "t5 encoder": ("sentiment", {"n_layers": 1, "positions": "t5", "pooling": "attention"}),
    "xl encoder": ("sentiment", {"n_layers": 1, "positions": "xl", "pooling": "first"}),
    "shared layers": ("transformer-tiny", {"share_layers": True, "norm_place": "pre"}),
    "windows": ("swin-tiny", {}),
    "additive": ("transformer-tiny", {"n_layers": 1, "mixer": "additive"}),
    "linear": ("transformer-tiny", {"n_layers": 1, "mixer": "linear"}),
    "sinks": ("mistral-7b", {"attention_sinks": True, "window_layers": (1,)}),
    "differential": ("transformer-tiny", {"n_layers": 1, "mixer": "differential"}),
    "sigmoid": ("transformer-tiny", {"n_layers": 1, "mixer": "sigmoid"}),
    "bigbird": ("gpt2", {"sparsity": "bigbird", "sparsity_size": 2}),
    "end blocks": ("bert-base", {"n_layers": 1, "sparsity": "end-blocks", "sparsity_size": 1, "sparsity_repeats": 1}),
    "global tokens": ("bert-base", {"n_layers": 1, "window": 3, "global_tokens": 2, "global_projections": True}),
    "performer": ("gpt2", {"n_layers": 1, "mixer": "performer", "mixer_size": 16}),
    "linformer": ("sentiment", {"n_layers": 1, "mixer": "linformer", "mixer_size": 8}),
    "fourier": ("sentiment", {"n_layers": 1, "mixer": "fourier"}),
}
ALL = QUICK | SLOW
WRITES = [name for name, (preset, _) in ALL.items() if PRESETS[preset]["architecture"] != "encoder"]


def cases(names: list[str] | dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


_made_once: list[MadeOnce] = []


@pytest.fixture(scope="module", autouse=True)
def _exports(made_once: MadeOnce) -> Iterator[None]:
    _made_once.append(made_once)
    yield
    exported.cache_clear()


@functools.cache
def exported(name: str) -> tuple[Model, OnnxModel, Path]:
    """A model and what came of it."""
    preset, fields = ALL[name]
    model = small(preset, **fields)
    folder = _made_once[-1](name, lambda path: export_once(name, model, path))
    return model, open_onnx(folder, threads=1), folder


def export_once(name: str, model: Model, folder: Path) -> None:
    """Every graph is traced once, except one with a complex transform."""
    run_decompositions, n_times = ExportedProgram.run_decompositions, 0

    def count(*args: Any, **options: Any) -> ExportedProgram:
        nonlocal n_times
        n_times += 1
        return run_decompositions(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExportedProgram, "run_decompositions", count)
        export_onnx(model, folder, maps=name not in ("end blocks", "global tokens"))
    assert n_times == (name == "fourier")


def both(name: str) -> tuple[Model, OnnxModel]:
    return exported(name)[:2]


def ragged(draw: random.Random, batch: int, length: int) -> Tensor:
    """What is real, (B, length): padding anywhere, and rows of nothing else."""
    share = draw.choice([0.0, 0.3, 0.6])
    keep = torch.tensor([[draw.random() >= share for _ in range(length)] for _ in range(batch)])
    keep[draw.randrange(batch)] &= draw.random() < 0.6  # a row that is all padding
    return keep


def source(draw: random.Random, config: ModelConfig, batch: int) -> tuple[Tensor, Tensor | None]:
    length = draw.randint(1, 12)
    given = source_of(config, batch, length, seed=draw.randrange(10**6))
    return given, None if config.source == "image" else ragged(draw, batch, length)


def worst(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    return float((ours - theirs).abs().max())


# -------------------------------------------------------------------------------- logits


@torch.no_grad()
@pytest.mark.parametrize("name", cases(ALL))
def test_every_shape_past_and_padding_gives_what_torch_gives(name: str) -> None:
    model, graph = both(name)
    draw = random.Random(7)
    found = [difference(model, graph, draw) for _ in range(N_SHAPES)]
    assert len(found) == N_SHAPES
    assert max(found) <= BOUND


def difference(model: Model, graph: OnnxModel, draw: random.Random) -> float:
    """Of one random batch: of an encoder its output; of a decoder two calls, the second with the first one's cache."""
    batch, config = draw.randint(1, 4), model.config
    if config.architecture == "encoder":
        given, keep = source(draw, config, batch)
        return worst(graph(given, padding_mask=keep), model(given, padding_mask=keep))
    past, new = draw.choice([0, 0, *range(1, 9)]), draw.randint(1, 7)
    tokens = torch.randint(3, config.output_vocab_size, (batch, past + new), generator=seeded(draw))
    keep = ragged(draw, batch, past + new)
    spans = [span for span in (slice(0, past), slice(past, None)) if tokens[:, span].numel()]
    read = source(draw, config, batch) if not isinstance(model, Decoder) else None
    theirs, ours = (pass_through(one, tokens, keep, spans, read) for one in (model, graph))
    return max(worst(a, b) for a, b in zip(ours, theirs, strict=True))


def pass_through(
    model: Model, tokens: Tensor, keep: Tensor, spans: list[slice], read: tuple[Tensor, Tensor | None] | None
) -> list[Tensor]:
    positions = torch.where(keep, keep.long().cumsum(-1) - 1, -1)
    cache = model.new_cache()
    if isinstance(model, Decoder):
        return [model(tokens[:, at], positions=positions[:, at], cache=cache) for at in spans]
    assert isinstance(model, EncoderDecoder | Recurrent)
    assert read is not None
    memory = model.encode(read[0], padding_mask=read[1])
    states = [model.decode(tokens[:, at], memory, positions=positions[:, at], cache=cache) for at in spans]
    assert model.head is not None
    return [model.head(x, model.output_table) for x in states]


def seeded(draw: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.randrange(10**6))


@torch.no_grad()
@pytest.mark.parametrize("name", cases(["t5", "llama", "transformer", "captioner", "luong"]))
def test_a_whole_call_is_the_models_own(name: str) -> None:
    model, graph = both(name)
    inputs = inputs_of(model.config)
    assert worst(graph(*inputs), model(*inputs)) <= BOUND


@torch.no_grad()
def test_padding_without_a_cache_takes_up_places() -> None:
    model, graph = both("llama")
    tokens = source_of(model.config)
    keep = torch.ones_like(tokens, dtype=torch.bool)
    keep[1, 5:] = keep[2, :3] = False
    torch.testing.assert_close(
        graph(tokens, padding_mask=keep)[keep], model(tokens, padding_mask=keep)[keep], atol=BOUND, rtol=0
    )


@pytest.mark.slow
@torch.no_grad()
def test_segments_and_the_pooled_vector() -> None:
    model, graph = both("bert")
    tokens = source_of(model.config)
    segments = (torch.arange(9) > 4).long().expand(3, -1)
    states = model(tokens, segments=segments)
    found = graph.run(tokens, segments=segments)
    assert worst(found["states"], states) <= BOUND
    assert worst(found["pooled"], model.pooled(states)) <= BOUND


# -------------------------------------------------------------------------------- texts


def prompts(model: Model, draw: random.Random) -> Any:
    """Of different lengths, one alone or several."""
    config, n = model.config, draw.randint(1, 4)
    if config.source == "image":
        return source_of(config, n, seed=draw.randrange(10**6))
    if config.source == "regions":
        return [source_of(config, 1, draw.randint(1, 8), draw.randrange(10**6))[0] for _ in range(n)]
    return [[draw.randrange(3, config.vocab_size) for _ in range(draw.randint(1, 8))] for _ in range(n)]


@pytest.mark.parametrize("name", cases(WRITES))
def test_greedy_and_beam_texts_are_identical(name: str) -> None:
    model, graph = both(name)
    draw = random.Random(3)
    diverse = {"beam": 4, "groups": 2, "diversity_penalty": 0.5}
    for how in ({}, {}, {}, {"beam": 4, "n_best": 3}, {"beam": 3, "length_penalty": 0.0}, {"beam": 8}, diverse):
        given, options = prompts(model, draw), {"max_new_tokens": 8, **how}
        theirs, ours = generate(model, given, **options), generate(graph, given, **options)
        for mine, told in zip(ours.hypotheses, theirs.hypotheses, strict=True):
            assert [text.tokens for text in mine] == [text.tokens for text in told]
            assert [text.score for text in mine] == pytest.approx([text.score for text in told], abs=1e-4)


def test_the_searches_themselves_run_over_it() -> None:
    model, graph = both("llama")
    rows, config = [[5, 6, 7], [8]], GenerateConfig(beam=3, max_new_tokens=6)
    given = pad_prompts(rows, model.config, config, torch.device("cpu"))
    with torch.no_grad():
        ours, theirs = (
            [text[0].tokens for text in BeamSearch(DecodingEngine(m), config, 2).run(given)] for m in (graph, model)
        )
        assert ours == theirs
        greedy = GenerateConfig(max_new_tokens=6)
        steps = [list(decode_loop(DecodingEngine(m), given, greedy, 2)) for m in (graph, model)]
    assert [s.tokens.tolist() for s in steps[0]] == [s.tokens.tolist() for s in steps[1]]


def test_a_text_streams_and_samples_as_from_the_model() -> None:
    model, graph = both("t5")
    assert list(stream_tokens(graph, [5, 9, 4], max_new_tokens=6)) == list(
        stream_tokens(model, [5, 9, 4], max_new_tokens=6)
    )
    drawn = {"temperature": 0.9, "top_p": 0.8, "seed": 5, "n_best": 3, "max_new_tokens": 6}
    assert generate(graph, [[5, 9, 4]], **drawn).tokens == generate(model, [[5, 9, 4]], **drawn).tokens


@torch.no_grad()
def test_tokens_can_be_taken_back() -> None:
    model, graph = both("llama")
    tokens, caches = source_of(model.config), (model.new_cache(), graph.new_cache())
    for one, cache in zip((model, graph), caches, strict=True):
        one(tokens[:, :6], cache=cache)
        cache.truncate(4)
    assert worst(graph(tokens[:, 6:], cache=caches[1]), model(tokens[:, 6:], cache=caches[0])) <= BOUND


def test_a_cache_that_cannot_be_preallocated_says_so() -> None:
    with pytest.raises(ValueError, match="an ONNX model's cache grows"):
        generate(both("llama")[1], [[5, 6]], cache="static", max_new_tokens=3)


# -------------------------------------------------------------------------------- attention


NO_MAPS = ("shared layers", "plain", "fourier", "end blocks", "global tokens")


@torch.no_grad()
@pytest.mark.parametrize("name", cases([name for name in ALL if name not in NO_MAPS]))
def test_the_maps_are_those_of_the_model(name: str) -> None:
    """At every row that is no padding of a text that is written; of a source at every row."""
    model, graph = both(name)
    inputs, (keep, target_padding_mask) = inputs_of(model.config), (None, None)
    real = torch.ones(inputs[-1].shape[:2], dtype=torch.bool)
    real[0, 5:] = real[1, :2] = False
    if len(inputs) == 2:
        target_padding_mask = real
    if model.config.source != "image" and (len(inputs) == 2 or isinstance(model, Decoder)):
        keep = real if len(inputs) == 1 else torch.ones(inputs[0].shape[:2], dtype=torch.bool)
    if len(inputs) == 2 and keep is not None:
        keep[1, 4:] = keep[2] = False
    names = ("padding_mask",) if len(inputs) == 1 else ("source_padding_mask", "target_padding_mask")
    with record(model) as seen:
        model(*inputs, **dict(zip(names, (keep, target_padding_mask), strict=False)))
    found = graph.maps(*inputs, padding_mask=keep, target_padding_mask=target_padding_mask)
    assert set(found) == set(seen.attentions)
    for place, weights in found.items():
        rows = real[:, None, :, None] if place.startswith("decoder") else torch.tensor(True)
        assert worst(weights.dense() * rows, seen.map(place).dense() * rows) <= 1e-5


@pytest.mark.slow
def test_without_maps_there_are_none_and_they_cost_nothing(tmp_path: Path) -> None:
    model = build(
        "gpt2", vocab_size=11, d_model=8, n_layers=1, n_heads=2, d_ff=8, max_len=8, pad_id=0, bos_id=1, eos_id=2
    )
    place = export_onnx(model.double(), tmp_path / "out")
    graph = open_onnx(tmp_path / "out")
    assert place == tmp_path / "out" / FOLDER
    assert sorted(path.name for path in place.iterdir()) == ["decoder.onnx", "onnx.json"]
    assert not [name for name in graph.sessions["decoder"].outputs if name.startswith("q")]
    with pytest.raises(ValueError, match="maps=True"):
        graph.maps(torch.tensor([[3, 4]]))
    with torch.no_grad():  # float64 weights are written as float32, and the model keeps its own
        assert worst(graph(torch.tensor([[3, 4]])), model(torch.tensor([[3, 4]])).float()) <= BOUND
    assert next(model.parameters()).dtype == torch.float64


# -------------------------------------------------------------------------------- the files


@pytest.mark.slow
def test_a_recurrent_layer_is_one_operation() -> None:
    for name, operation in (("luong", "LSTM"), ("bahdanau", "GRU")):
        both(name)
        nodes = [node.op_type for node in onnx.load(exported(name)[2] / FOLDER / "encoder.onnx").graph.node]
        assert nodes.count(operation) == ALL[name][1].get("n_layers", 2)


def test_an_operation_without_a_translation_is_decomposed(tmp_path: Path) -> None:
    class Swapped(Graph):
        def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"out": torch.movedim(given["x"], (0, 1), (1, 0))}

    x = torch.randn(2, 3)
    assert write_graph(Swapped(None, {"x": (x, {0: "rows"})}), tmp_path / "swapped.onnx") == ["out"]
    found = OnnxSession(tmp_path / "swapped.onnx", 1, None).run({"x": x.repeat(2, 1)})
    assert torch.equal(found["out"], x.repeat(2, 1).T)


@pytest.mark.parametrize(
    ("n_groups", "mask", "options"),
    [
        (4, None, {}),
        (4, None, {"is_causal": True, "scale": 0.3}),
        (4, torch.ones(7, 7).tril(2).bool(), {}),
        (2, torch.ones(7, 7).tril(1).bool(), {"scale": 0.3}),
        (2, torch.linspace(-1, 1, 4 * 7 * 7).view(1, 4, 7, 7), {}),
        (1, None, {"is_causal": True}),
    ],
)
def test_sdpa_is_translated(n_groups: int, mask: Tensor | None, options: dict[str, Any], tmp_path: Path) -> None:
    """And in such a way that ONNX Runtime never copies the keys to transpose them."""

    class Attention(Graph):
        def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
            parts = (given[name] for name in "qkv")
            more = {**options, "enable_gqa": n_groups < 4}
            return {"out": torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask, **more)}

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, n_groups, 7, 8), torch.randn(2, n_groups, 7, 6)
    graph = Attention(None, {name: (x, {0: "batch"}) for name, x in zip("qkv", (q, k, v), strict=True)})
    write_graph(graph, tmp_path / "attention.onnx")
    inputs = {name: x.repeat(2, 1, 1, 1) for name, x in zip("qkv", (q, k, v), strict=True)}
    found = OnnxSession(tmp_path / "attention.onnx", 1, None).run(inputs)["out"]
    assert worst(found, graph.compute(inputs)["out"]) <= 1e-5
    options_of_runtime = onnxruntime.SessionOptions()
    options_of_runtime.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options_of_runtime.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "attention.onnx", options_of_runtime, ["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert "Transpose" not in operators


@torch.no_grad()
def test_int8_rounds_the_token_table_once_for_embedding_and_output(tmp_path: Path) -> None:
    n_tokens = 20_000  # the exporter folds the transposes of smaller tables
    model = build("transformer-tiny", vocab_size=n_tokens, n_layers=1, max_len=16).eval()
    export_onnx(model, tmp_path / "int8", int8=True)
    tables = {}
    for name in ("encoder", "decoder"):
        graph = onnx.load(tmp_path / "int8" / FOLDER / f"{name}.onnx").graph
        tables[name] = {tensor.name: tensor.data_type for tensor in graph.initializer if n_tokens in tensor.dims}
    int8, float32 = onnx.TensorProto.INT8, onnx.TensorProto.FLOAT
    assert tables["encoder"] == {"model.token.weight_int8": int8, "model.token.weight_scale": float32}
    assert tables["decoder"] == tables["encoder"], "one table, and no float copy of it"
    inputs, rounded = inputs_of(model.config), open_onnx(tmp_path / "int8")
    gap = worst(rounded(*inputs), model(*inputs))
    assert 0 < gap < 0.1 * model(*inputs).abs().max(), "near, and not the same"


@torch.no_grad()
def test_a_reordered_cache_holds_those_rows_and_leaves_the_graphs_outputs_alone() -> None:
    cache, plain = GraphCache(), GrowingCache()
    k, v, positions = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4), torch.arange(15).view(3, 5)
    cache.reorder(torch.tensor([0]))  # an empty one has no rows
    for rows in ([0, 0, 1, 1, 2, 2], [1, 0, 3, 5, 4, 2], [5, 0]):
        cache.store(k, v, positions)
        plain._k, plain._v, plain._pos = k, v, positions
        kept = k.clone()
        for _ in range(2):  # also from its own buffer
            cache.reorder(torch.tensor(rows) % len(cache.keys()[0]))
            plain.reorder(torch.tensor(rows) % len(plain.keys()[0]))
            for found, wanted in zip(cache.contents() or (), plain.keys_and_values(), strict=False):
                assert torch.equal(found, wanted)
            assert torch.equal(cache.keys()[1], plain.keys()[1])
        assert torch.equal(k, kept)


def test_the_description_says_what_a_program_has_to_know() -> None:
    both("t5")
    place = exported("t5")[2] / FOLDER
    told = json.loads((place / "onnx.json").read_text())
    assert told["tokens"] == {"pad": 0, "bos": 1, "eos": 2}
    assert told["graphs"]["decoder"]["inputs"]["past_k_0"]["shape"] == ["batch", 4, "past", 6]
    for name in ("encoder", "decoder"):
        graph = onnx.load(place / f"{name}.onnx").graph
        assert [x.name for x in graph.output] == told["graphs"][name]["outputs"]
        assert {x.name for x in graph.input} <= set(told["graphs"][name]["inputs"])


def test_no_file_names_the_machine_it_was_made_on() -> None:
    both("t5")
    here = str(Path(__file__).resolve().parents[2]).encode()
    for path in (exported("t5")[2] / FOLDER).iterdir():
        content = path.read_bytes()
        assert not [word for word in (here, b"site-packages", b".py") if word in content]


def damaged(tmp_path: Path, name: str, content: bytes | None) -> Path:
    both("llama")
    place = shutil.copytree(exported("llama")[2] / FOLDER, tmp_path / "copy")
    (place / name).unlink()
    if content is not None:
        (place / name).write_bytes(content)
    return place


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("onnx.json", None, "has no onnx.json"),
        ("onnx.json", b"[]", "an object belongs"),
        ("onnx.json", b'{"regard_onnx": 2}', "is not a description of ONNX graphs"),
        ("onnx.json", b'{"regard_onnx": 1, "maps": false, "config": {"d_modell": 3}}', "does not describe a model"),
        ("decoder.onnx", None, "has no decoder.onnx"),
        ("decoder.onnx", b"not a graph", "cannot be opened by ONNX Runtime"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    with pytest.raises(BadModelFile, match=complaint):
        open_onnx(damaged(tmp_path, name, content))


def test_more_layers_than_the_files_hold_are_refused_before_they_are_made(tmp_path: Path) -> None:
    both("llama")
    place = shutil.copytree(exported("llama")[2] / FOLDER, tmp_path / "copy")
    document = json.loads((place / "onnx.json").read_text())
    document["config"]["n_layers"] = 1000
    (place / "onnx.json").write_text(json.dumps(document))
    with pytest.raises(BadModelFile, match="too few for the weights of 1,000 layers"):
        open_onnx(place)


def test_a_bias_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    both("t5")
    place = shutil.copytree(exported("t5")[2] / FOLDER, tmp_path / "copy")
    (place / "maps.safetensors").unlink()
    with pytest.raises(BadModelFile, match=r"encoder\.position_bias\.w"):
        open_onnx(place)


@torch.no_grad()
def test_wrong_input_is_told_in_one_sentence() -> None:
    _, graph = both("t5")
    with pytest.raises(RegardError, match="Invalid rank for input: source Got: 3 Expected: 2"):
        graph(torch.zeros(1, 3, 6), torch.ones(1, 1))
    with pytest.raises(RegardError, match=r"cannot run encoder\.onnx"):
        graph(torch.tensor([[99]]), torch.tensor([[1]]))
    with pytest.raises(ValueError, match="documents"):
        both("llama")[1](torch.tensor([[3]]), documents=torch.tensor([[0]]))


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="meta"):
        export_onnx(build("gpt2", device="meta"), tmp_path)
    with pytest.raises(TypeError, match="Linear"):
        export_onnx(torch.nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
