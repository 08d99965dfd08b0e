"""What holds for every layer: it builds on meta, traces whole, comes back from a file, and keeps to its room."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import regard.layers as layers
from regard.config import RopeScalingConfig
from regard.layers import (
    FEEDFORWARD_KINDS,
    Embeddings,
    FeedForward,
    LayerNorm,
    LayerScale,
    Learned,
    PatchEmbedding,
    RegionEmbedding,
    RMSNorm,
    Rope,
    Sinusoidal,
    TanhGate,
    TokenEmbedding,
    VisionEmbeddings,
)

Args = tuple[torch.Tensor, ...]
X = torch.randn(2, 5, 16)
HEADS = torch.randn(2, 3, 5, 8)
POSITIONS = torch.tensor([[-1, -1, 0, 1, 2], [20, 21, 22, 23, 24]])
IDS = torch.randint(0, 9, (2, 5))
PIXELS = torch.randn(2, 3, 8, 12)
DIVISORS = (1.0, 2.0, 3.0, 4.0)


def rope(kind: str, **words: object) -> Callable[[], nn.Module]:
    return lambda: Rope(8, scaling=RopeScalingConfig(kind=kind, **words), max_len=16)  # type: ignore[arg-type]


def text() -> nn.Module:
    return Embeddings(
        TokenEmbedding(9, 16, 4.0),
        segment=TokenEmbedding(2, 16),
        position=Learned(25, 16, offset=2),
        norm=LayerNorm(16),
        projection=nn.Linear(16, 20),
        dropout=0.1,
    )


def vision() -> nn.Module:
    patches = PatchEmbedding((8, 12), 4, 3, 16)
    return VisionEmbeddings(patches, position=Learned(7, 16), n_registers=2, dropout=0.1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Args]] = {
    "sinusoidal": (lambda: Sinusoidal(16), (POSITIONS,)),
    "sinusoidal-halves": (lambda: Sinusoidal(16, 32, layout="halves"), (POSITIONS,)),
    "learned": (lambda: Learned(25, 16, offset=2), (POSITIONS,)),
    "rope": (lambda: Rope(8), (HEADS, POSITIONS)),
    "rope-partial": (lambda: Rope(8, fraction=0.5), (HEADS, POSITIONS)),
    "rope-linear": (rope("linear", factor=2.0), (HEADS, POSITIONS)),
    "rope-dynamic": (rope("dynamic", factor=2.0), (HEADS, POSITIONS)),
    "rope-yarn": (rope("yarn", factor=2.0), (HEADS, POSITIONS)),
    "rope-llama3": (rope("llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0), (HEADS, POSITIONS)),
    "rope-longrope": (
        rope("longrope", factor=2.0, short_factor=DIVISORS, long_factor=DIVISORS[::-1]),
        (HEADS, POSITIONS),
    ),
    "layer-norm": (lambda: LayerNorm(16), (X,)),
    "layer-norm-no-bias": (lambda: LayerNorm(16, bias=False), (X,)),
    "tanh-gate": (lambda: TanhGate(), (X,)),
    "layer-scale": (lambda: LayerScale(16, 0.5), (X,)),
    "rms-norm": (lambda: RMSNorm(16), (X,)),
    "rms-norm-offset": (lambda: RMSNorm(16, offset=1.0), (X,)),
    **{f"ffn-{kind}": (lambda kind=kind: FeedForward(16, 24, kind), (X,)) for kind in FEEDFORWARD_KINDS},
    "token": (lambda: TokenEmbedding(9, 16, 4.0), (IDS,)),
    "embeddings": (text, (IDS, POSITIONS, IDS % 2)),
    "embeddings-defaults": (text, (IDS,)),
    "patches": (lambda: PatchEmbedding((8, 12), 4, 3, 16), (PIXELS,)),
    "vision": (vision, (PIXELS,)),
    "vision-other-size": (vision, (torch.randn(1, 3, 16, 16),)),
    "regions": (lambda: RegionEmbedding(16, d_model=8, d_box=4), (X, torch.rand(2, 5, 4))),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> tuple[Callable[[], nn.Module], Args]:
    return LAYERS[request.param]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_every_module_is_exercised_here() -> None:
    exported = [getattr(layers, name) for name in layers.__all__]
    modules = {thing for thing in exported if isinstance(thing, type) and issubclass(thing, nn.Module)}
    assert modules == {type(build()) for build, _ in LAYERS.values()}


def test_builds_and_runs_on_meta(layer: tuple[Callable[[], nn.Module], Args]) -> None:
    build, args = layer
    with torch.device("meta"):
        module = build()
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    real = build()
    assert [(name, p.shape) for name, p in module.named_parameters()] == [
        (name, p.shape) for name, p in real.named_parameters()
    ]
    out = module(*(arg.to("meta") for arg in args))
    assert out.is_meta
    assert out.shape == real(*args).shape


def test_meta_then_assigned_weights_equals_the_original(layer: tuple[Callable[[], nn.Module], Args]) -> None:
    build, args = layer
    real = build().eval()
    with torch.device("meta"):
        module = build().eval()
    module.load_state_dict(copy.deepcopy(real.state_dict()), assign=True)
    assert torch.equal(module(*args), real(*args))


def test_compiles_whole_forward_and_backward(layer: tuple[Callable[[], nn.Module], Args], fresh_compiler: None) -> None:
    build, args = layer
    module = build().eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected, out = module(*args), compiled(*args)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if parameters:
        theirs = torch.autograd.grad(expected.square().sum(), parameters)
        ours = torch.autograd.grad(out.square().sum(), parameters)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["sinusoidal", "learned", "rope-dynamic", "rope-longrope", "embeddings"])
def test_one_graph_serves_every_length(name: str, fresh_compiler: None) -> None:
    build, _ = LAYERS[name]
    module = build().eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    compilations = set()
    for length in (4, 7, 12, 24):
        positions = torch.arange(length)
        args: Args = (positions,)
        if name.startswith("rope"):
            args = (torch.randn(2, 3, length, 8), positions)
        elif name == "embeddings":
            args = (torch.randint(0, 9, (2, length)), positions)
        torch.testing.assert_close(compiled(*args), module(*args), atol=1e-5, rtol=1e-5)
        compilations.add(counter.frame_count)
    assert len(compilations) == 1  # the first length compiled it, the others found it


def test_exports(layer: tuple[Callable[[], nn.Module], Args]) -> None:
    build, args = layer
    module = build().eval()
    exported = torch.export.export(module, args, strict=False).module()
    torch.testing.assert_close(exported(*args), module(*args), atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu(layer: tuple[Callable[[], nn.Module], Args], fresh_compiler: None) -> None:
    build, args = layer
    module = build().eval()
    expected = module(*args)
    on_gpu, moved = copy.deepcopy(module).cuda(), [arg.cuda() for arg in args]
    torch.testing.assert_close(on_gpu(*moved).cpu(), expected, atol=1e-5, rtol=1e-5)
    compiled = torch.compile(on_gpu, fullgraph=True)
    torch.testing.assert_close(compiled(*moved).cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bad_ids_on_cuda_are_an_error_and_not_a_lost_device() -> None:
    with pytest.raises(ValueError, match="token ids go up to 9, but vocab_size=9"):
        TokenEmbedding(9, 4).cuda()(torch.tensor([[9]], device="cuda"))
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_the_room_imports_torch_alone() -> None:
    for source in Path(layers.__file__).parent.glob("*.py"):
        for line in source.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]) and words[1].startswith("regard"):
                pytest.fail(f"{source.name} imports {words[1]}")
