"""What ``regard bench attention`` compares: every mechanism and backend, ready to run at a given length."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import attend
from regard.attention.biases import T5Bias
from regard.attention.masks import Mask, bigbird, causal, strided, window
from regard.config import ModelConfig
from regard.config.mixers import Mixer, MixingWork, all_mixers, get_mixer, register
from regard.models.parts import mechanism, mixing

from .measure import measure


@dataclass(frozen=True)
class Setup:
    """One cell's question: batch 1, fp32, on the CPU."""

    length: int
    n_heads: int = 8
    d_head: int = 64
    causal: bool = True
    backward: bool = False

    def heads(self) -> list[Tensor]:
        """q, k and v, (1, H, T, D)."""
        shape = (1, self.n_heads, self.length, self.d_head)
        return [torch.randn(shape, requires_grad=self.backward) for _ in range(3)]

    @property
    def mask(self) -> Mask | None:
        return causal() if self.causal else None


Forward = Callable[[], Tensor]


@dataclass(frozen=True)
class Contender:
    """A mechanism on a backend. ``build`` gives its forward pass and what its backward pass fills with gradients."""

    name: str
    title: str
    family: str  # exact, sparse or approximate
    build: Callable[[Setup], tuple[Forward, list[Tensor]]]
    grows: int = 2  # the power of the length its time grows with, to foretell what is not worth starting
    matrices: tuple[float, float] = (0, 0)  # T × T numbers a head holds at once: forward, forward and backward
    rows: tuple[float, float] = (4, 12)  # the same in units of T × D
    most_seconds: float = 10.0  # a run foretold to take longer is skipped
    causal: bool | None = None  # True: always, False: never, None: as asked

    def note(self, setup: Setup) -> str | None:
        """What was measured where it is not what was asked for."""
        if self.causal is None or self.causal == setup.causal:
            return None
        return (
            "is causal by definition" if self.causal else "mixes all positions and cannot be causal; measured without"
        )

    def foretold_bytes(self, setup: Setup) -> int:
        """About how much memory a run will hold at its peak, inputs included."""
        matrices, rows = self.matrices[setup.backward], self.rows[setup.backward] + 3
        return int(4 * setup.n_heads * setup.length * (matrices * setup.length + rows * setup.d_head))

    def foretold_seconds(self, setup: Setup, known_length: int, known_seconds: float) -> float:
        """How long a run will take, from what a shorter one took."""
        return known_seconds * (setup.length / known_length) ** self.grows


def _attention(
    setup: Setup, backend: str, mask: Mask | None, module: nn.Module | None = None, **options: Any
) -> tuple[Forward, list[Tensor]]:
    q, k, v = setup.heads()
    parameters = [] if module is None else list(module.parameters())
    return lambda: attend(q, k, v, backend=backend, mask=mask, **options).output, [q, k, v, *parameters]


def _plain(backend: str) -> Callable[[Setup], tuple[Forward, list[Tensor]]]:
    return lambda setup: _attention(setup, backend, setup.mask)


def _t5(setup: Setup) -> tuple[Forward, list[Tensor]]:
    bias = T5Bias(setup.n_heads, bidirectional=not setup.causal)
    return _attention(setup, "tiled", setup.mask, bias, bias=bias)


def sparse_mask(name: str, is_causal: bool) -> Mask:
    """The sparse patterns compared here, about 256 keys a query."""
    if name == "window":
        return window(256) if is_causal else window(129, ahead=127)
    if name == "strided":
        return strided(128)
    pattern = bigbird(size=64, global_count=64, percent=2.0)
    return pattern & causal() if is_causal else pattern


def _sparse(name: str) -> Callable[[Setup], tuple[Forward, list[Tensor]]]:
    return lambda setup: _attention(setup, "tiled", sparse_mask(name, setup.causal))


def _mixer(name: str, backend: str = "auto") -> Callable[[Setup], tuple[Forward, list[Tensor]]]:
    """A mechanism of the table as a model's layer would build it."""

    def build(setup: Setup) -> tuple[Forward, list[Tensor]]:
        entry, width = get_mixer(name), setup.n_heads * setup.d_head
        config = ModelConfig(
            architecture="encoder", head="none", d_model=width, n_heads=setup.n_heads, mixer=name, max_len=setup.length
        )
        if not entry.weights:
            layer = mixing(config, setup.n_heads, None)
            x = torch.randn(1, setup.length, width, requires_grad=setup.backward)
            return lambda: layer(x), [x, *layer.parameters()]
        made = mechanism(config, setup.n_heads, setup.d_head, cross=False)
        module = made if isinstance(made, nn.Module) else None
        return _attention(setup, backend, setup.mask if entry.causal else None, module, mechanism=made)

    return build


def _from_table(name: str, entry: Mixer) -> Contender:
    """What nothing is known about but its entry: the time it takes grows with the work it says it does."""
    near, far = (entry.flops(MixingWork(8, 64, keys, entry.size or 0)) for keys in (1 << 14, 1 << 20))
    return Contender(
        name,
        entry.summary or name,
        "own",
        _mixer(name),
        grows=2 if far > near else 1,
        matrices=(3.2, 6.5) if entry.weights and entry.family.kind == "shares" else (0, 0),
        causal=None if entry.causal else False,
    )


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("reference", "reference, the formula", "exact", _plain("reference"), matrices=(3.2, 6.5)),
        Contender("sdpa", "sdpa, torch's fused kernel", "exact", _plain("sdpa")),
        Contender("tiled", "tiled", "exact", _plain("tiled")),
        Contender("tiled+t5", "tiled + trained T5 bias", "exact", _t5),
        Contender("additive", "additive (Bahdanau), tiled", "exact", _mixer("additive", "tiled"), most_seconds=3.0),
        Contender("window", "window of 256, tiled", "sparse", _sparse("window"), grows=1),
        Contender("strided", "strided by 128, tiled", "sparse", _sparse("strided"), causal=True),
        Contender("bigbird", "bigbird, tiled", "sparse", _sparse("bigbird")),
        Contender("linear", "linear, elu + 1", "approximate", _mixer("linear", "linear"), grows=1, rows=(14, 26)),
        Contender(
            "performer", "performer, 256 features", "approximate", _mixer("performer", "linear"), grows=1, rows=(36, 75)
        ),
        Contender(
            "linformer", "linformer, rank 256", "approximate", _mixer("linformer", "sdpa"), grows=1, causal=False
        ),
        Contender("fourier", "fourier mixing", "approximate", _mixer("fourier"), grows=1, causal=False),
    )
}


def contenders() -> dict[str, Contender]:
    """Those below, and whatever else stands in the table of mechanisms; plain dot products are there by backend."""
    own = {name: _from_table(name, entry) for name, entry in all_mixers().items() if name not in (*CONTENDERS, "dot")}
    return {**CONTENDERS, **own}


def choose(names: list[str] | None) -> list[Contender]:
    """The contenders by name, all of them unless told; module:Class is one of the reader's own."""
    for name in names or ():
        if ":" in name:
            register(name)
    known = contenders()
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"mechanism {name!r} is none of {', '.join(known)}{hint}")
    return [known[name] for name in dict.fromkeys(names or known)]


def measure_cell(name: str, setup: dict[str, Any], enough_s: float, most_runs: int = 20) -> dict[str, Any]:
    """Time and memory of one contender in one setup; to be called in a process of its own."""
    torch.manual_seed(0)
    asked = Setup(**setup)
    ready(name, replace(asked, length=min(asked.length, 32)))()  # code and threads are loaded before anything counts
    found = measure(ready(name, asked), enough_s=enough_s, most_runs=most_runs)
    return {**asdict(found), "threads": torch.get_num_threads()}


def ready(name: str, setup: Setup) -> Callable[[], object]:
    """One run of a contender, its inputs made: forward, or forward and backward."""
    (contender,) = choose([name])
    forward, leaves = contender.build(setup)
    if not setup.backward:
        return torch.no_grad()(forward)
    d_output = torch.randn(1, setup.n_heads, setup.length, setup.d_head)

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        output = forward()
        output.backward(d_output.view_as(output))

    return both
