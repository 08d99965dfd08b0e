"""The logit lens of every token, and the tuned lens: the prediction that can be read after each layer.

The logit lens applies the final norm and head to the state after each layer (nostalgebraist 2020). Early layers do not
use the basis of the last one, so it misleads there. The tuned lens first translates the state, x + A_l x + b_l, with
maps trained to minimise the KL divergence from the model's own prediction (Belrose et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from ..config import DataConfig
from ..data.corpora import CORPORA, examples, open_corpus
from ..data.examples import ReadReport
from ..data.table_files import read_lines
from ..errors import BadData, BadModelFile
from ..foundation.files import atomic_file
from ..foundation.progress import track
from ..generation.prompts import max_text_length
from ..generation.text_codec import ModelTokenizers
from ..models import Model
from .activations import ActivationRecord, capture
from .capture import stacks
from .notebook import heatmap_html, table_html

_POSITIONS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class LayerLogits:
    """Predictions at every position of one prompt after each step through a model; tensors are (steps, T)."""

    steps: list[str]  # "embedding", "attention.0", "ff.0" … or "layer.0" …
    tokens: list[int]  # the token that is followed at each position
    log_probability: Tensor  # of that token, in nats
    rank: Tensor  # the number of likelier tokens: 0 if it is the prediction
    best: Tensor  # the likeliest token
    divergence: Tensor  # KL(model ‖ step), in nats

    def _repr_html_(self) -> str:
        cols = [f"token {n} ({token})" for n, token in enumerate(self.tokens)]
        return heatmap_html(
            self.log_probability.exp(), self.steps, cols, f"{self!r}: probability of the token followed"
        )

    def __repr__(self) -> str:
        return f"LayerLogits({len(self.steps)} steps, {len(self.tokens)} tokens)"


@torch.no_grad()
def layer_logits(
    record: ActivationRecord,
    *,
    prompt: int = 0,
    tokens: Sequence[int] | int | None = None,
    sublayers: bool = False,
    lens: TunedLens | None = None,
) -> LayerLogits:
    """The logit lens of all positions, or the tuned one.

    tokens     the token to follow at each position, or one for all; None: the next token of the text, and at the last
               position the model's own prediction
    sublayers  read the state after each attention and feed-forward network instead of after each layer
    lens       a ``TunedLens`` of this model; None: the logit lens
    """
    model: Any = record.model
    name = "encoder" if model.is_encoder_only else "decoder"
    if model.head is None or not stacks(model):
        why = f"head={model.config.head!r}: it does not predict tokens" if model.head is None else "no stack of layers"
        raise ValueError(f"this model has {why}")
    if lens is not None and sublayers:
        raise ValueError("a tuned lens is trained on the states after whole layers: use sublayers=False")
    length = record.lengths[prompt]
    sites = _lens_sites(model, name, sublayers)
    final = _predict(model, None, record.final_states[prompt, :length])
    followed = _tokens_to_follow(record, prompt, tokens, final)
    ids = torch.tensor(followed, device=final.device)[:, None]
    rows = []
    for index, site in enumerate(sites.values()):
        states = record[site][prompt, :length]
        states = states if lens is None or index == 0 else lens(index - 1, states)
        log_p = _predict(model, stacks(model)[name].norm, states)
        target = log_p.gather(1, ids)
        divergences = kl_div(log_p, final, reduction="none", log_target=True).sum(-1)
        rows.append((target[:, 0], (log_p > target).sum(-1), log_p.argmax(-1), divergences))
    log_probability, rank, best, divergence = (torch.stack(column).cpu() for column in zip(*rows, strict=True))
    return LayerLogits(list(sites), followed, log_probability, rank, best, divergence)


def _lens_sites(model: Any, name: str, sublayers: bool) -> dict[str, str]:
    """The hook sites that a lens reads, by the name of the step before them."""
    sites = {"embedding": name}
    for layer in range(stacks(model)[name].n_layers):
        block = f"{name}.blocks.{layer}"
        if sublayers:
            between = {"attention": "after_attention", "cross_attention": "after_cross_attention"}
            sites |= {
                f"{part}.{layer}": f"{block}.{at}" for part, at in between.items() if f"{block}.{at}" in model.sites()
            }
        sites[f"ff.{layer}" if sublayers else f"layer.{layer}"] = f"{block}.output"
    return sites


def _predict(model: Any, norm: Any, states: Tensor) -> Tensor:
    """Log-probabilities (T, V) of the next token from states (T, M)."""
    parts = (part if norm is None else norm(part) for part in states.split(_POSITIONS_AT_ONCE))
    return torch.cat([model.head(part[None], model.output_table)[0].float().log_softmax(-1) for part in parts])


def _tokens_to_follow(
    record: ActivationRecord, prompt: int, tokens: Sequence[int] | int | None, final: Tensor
) -> list[int]:
    length = len(final)
    if tokens is None:
        text = record.inputs.tensors[-1][prompt, :length].tolist()
        return text if record.model.is_encoder_only else [*text[1:], int(final[-1].argmax())]
    followed = [tokens] * length if isinstance(tokens, int) else list(tokens)
    if len(followed) != length:
        raise ValueError(f"tokens has {len(followed)} entries for {length} positions")
    return followed


class TunedLens(nn.Module):
    """An affine map of the state after each layer but the last, x + A_l x + b_l, initially the identity."""

    def __init__(self, n_layers: int, d_model: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(n_layers - 1))
        for parameter in self.maps.parameters():
            nn.init.zeros_(parameter)

    def forward(self, layer: int, states: Tensor) -> Tensor:
        """The states after a layer (…, M), translated to the basis of the last layer."""
        if layer >= len(self.maps):
            return states
        linear = cast(nn.Linear, self.maps[layer])
        x = states.to(linear.weight.dtype)  # fp32, even if the model is in half precision
        return (x + linear(x)).to(states.dtype)

    def save(self, file: str | Path) -> Path:
        """Write a safetensors file."""
        from safetensors.torch import save

        with atomic_file(Path(file)) as out:
            out.write(save({name: x.detach().contiguous() for name, x in self.state_dict().items()}))
        return Path(file)

    @classmethod
    def load(cls, file: str | Path, model: Model) -> TunedLens:
        """Read a lens from a file; its sizes must be those of the model."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        lens = cls.for_model(model)
        try:
            lens.load_state_dict(load_file(file, device=str(model.device)))
        except (OSError, SafetensorError, RuntimeError) as error:
            fault = str(error).splitlines()[-1].strip()
            raise BadModelFile(f"{file} is not a tuned lens of this model: {fault}") from None
        return lens

    @classmethod
    def for_model(cls, model: Any) -> TunedLens:
        if model.head is None or model.is_encoder_decoder or not stacks(model):
            raise ValueError("a tuned lens is for a model with one stack that predicts tokens")
        (stack,) = stacks(model).values()
        if stack.n_layers < 2:
            raise ValueError("a tuned lens needs at least two layers: it translates the states after all but the last")
        return cls(stack.n_layers, model.config.d_model).to(model.device)


@dataclass(frozen=True, eq=False)
class TunedLensReport:
    """A trained lens, and KL(model ‖ lens) after each layer but the last, in nats, on held-out texts."""

    lens: TunedLens
    before: list[float]  # the KL of the logit lens
    after: list[float]  # the KL of the tuned lens

    def to_dict(self) -> dict[str, Any]:
        return {"logit_lens": self.before, "tuned_lens": self.after}

    def to_text(self) -> str:
        lines = ["layer  logit lens  tuned lens   KL from the model's prediction, nats"]
        pairs = zip(self.before, self.after, strict=True)
        return "\n".join(
            [*lines, *(f"{n:5d}  {old:10.3f}  {new:10.3f}" for n, (old, new) in enumerate(pairs, start=1))]
        )

    def _repr_html_(self) -> str:
        rows = [(n, *both) for n, both in enumerate(zip(self.before, self.after, strict=True), start=1)]
        return table_html(("layer", "logit lens", "tuned lens"), rows, "KL from the model's prediction, nats")

    def __repr__(self) -> str:
        return f"TunedLensReport({len(self.after)} layers, KL {sum(self.before):.2f} → {sum(self.after):.2f} nats)"


def train_tuned_lens(
    model: Model,
    texts: Sequence[Any],
    *,
    steps: int = 200,
    batch: int = 8,
    lr: float = 2e-3,
    max_len: int = 128,
    seed: int = 0,
) -> TunedLensReport:
    """Train a tuned lens on texts, or rows of token ids; one in ten is held out to measure it.

    Each text is cut to ``max_len`` tokens, or to the model's maximum length. The model itself does not change.
    """
    max_len = min(max_len, max_text_length(model.config))
    encode = ModelTokenizers(model).encode_inputs
    rows = [(encode([text])[0] if isinstance(text, str) else list(text))[:max_len] for text in texts]
    rows = [row for row in rows if len(row) > 1]
    if len(rows) < 2:
        raise BadData(
            "a tuned lens needs at least two texts of two or more tokens, one to train on and one to measure it on"
        )
    n_held_out = max(1, len(rows) // 10)
    held_out, training = rows[:n_held_out][:64], rows[n_held_out:]
    lens = TunedLens.for_model(model)
    before = _divergences(model, lens, held_out, batch)
    optimiser = torch.optim.Adam(lens.parameters(), lr=lr)
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.05, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in track(range(steps), "steps", steps, lambda step: 1):
        drawn = [training[n] for n in torch.randint(len(training), (batch,), generator=generator).tolist()]
        for layer, loss in _layer_losses(model, lens, drawn):
            parameters = list(lens.maps[layer].parameters())
            # autograd.grad, unlike backward(), leaves the gradients of the model's parameters untouched.
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = gradient
        optimiser.step()
        decay.step()
    return TunedLensReport(lens, before, _divergences(model, lens, held_out, batch))


def _layer_losses(model: Any, lens: TunedLens, rows: list[list[int]]) -> Iterator[tuple[int, Tensor]]:
    """(layer, KL(model ‖ lens)) after each layer but the last, averaged over all tokens of a batch."""
    ((name, stack),) = stacks(model).items()
    record = capture(model, rows, sites=[f"{name}.blocks.*.output"])
    real = (torch.arange(max(record.lengths)) < torch.tensor(record.lengths)[:, None]).to(model.device)
    with torch.no_grad():
        final = _predict(model, None, record.final_states[real])
    for layer in range(stack.n_layers - 1):
        log_p = _predict(model, stack.norm, lens(layer, record[f"{name}.blocks.{layer}.output"][real]))
        yield layer, kl_div(log_p, final, reduction="batchmean", log_target=True)


@torch.no_grad()
def _divergences(model: Model, lens: TunedLens, rows: list[list[int]], batch: int) -> list[float]:
    totals, count = [0.0] * len(lens.maps), 0
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        n = sum(map(len, part))
        for layer, loss in _layer_losses(model, lens, part):
            totals[layer] += float(loss) * n
        count += n
    return [total / count for total in totals]


def read_texts(source: str, n: int) -> list[str]:
    """The first n texts of an embedded corpus, given by name, or the first n lines of a file that are not blank."""
    if source in CORPORA and not Path(source).exists():
        drawn = examples(open_corpus(source), "train")
        texts = [getattr(x, "source", x) for _, x in zip(range(n), drawn, strict=False)]
        return [text for text in texts if isinstance(text, str)]
    report = ReadReport()
    lines = (line for _, line in read_lines(Path(source), report, DataConfig()) if line and line.strip())
    texts = list(islice(lines, n))
    if report.n_bad:
        raise BadData(f"{report.n_bad:,} of {report.n_read:,} lines cannot be read; the first: {report.first[0]}")
    return texts
