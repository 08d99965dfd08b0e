"""What an intervention does: the model's answers before and after, on the same input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..generation import classify
from ..generation.generate import inference
from ..generation.text_generation import class_names
from ..models import Model
from .capture import stacks
from .interventions import patch
from .look import Look, Next, look

Intervention = AbstractContextManager[Any]
_POSITIONS_AT_ONCE = 64  # positions whose logits are held


@dataclass(frozen=True)
class Outcome:
    """What a model makes of an input."""

    next: list[Next]  # the likeliest tokens behind one position, or classes, best first
    # -log p of the text's (or target's) own tokens on average, in nats; None where there are none to say
    loss: float | None
    each: list[float]  # the same of every token by itself
    written: str | None  # the text a model with an encoder writes by itself, where no target was given


@dataclass(frozen=True)
class Effect:
    """The same input without and with an intervention."""

    before: Outcome
    after: Outcome
    tokens: list[str]  # the tokens that ``each`` is about
    divergence: float  # KL(before ‖ after) of what comes next, in nats: 0 where nothing changed

    @property
    def loss_change(self) -> float | None:
        """How much worse it became."""
        if self.before.loss is None or self.after.loss is None:
            return None
        return self.after.loss - self.before.loss

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        found = {name: asdict(one) for name, one in (("before", self.before), ("after", self.after))}
        for name, one in (("before", self.before), ("after", self.after)):
            found[name]["next"] = [x._asdict() for x in one.next]
        return {**found, "tokens": self.tokens, "divergence": self.divergence, "loss_change": self.loss_change}


def effect(
    model: Model,
    what: Any,
    interventions: Intervention | Sequence[Intervention],
    target: Any = None,
    *,
    position: int = -1,
    k: int = 10,
) -> Effect:
    """``effect(model, "…", [switch_off(model, [("self", 0, 1)])])``: what the model says next, its loss on the text
    and, where it writes by itself, its text, before and after. Both losses are of the same tokens: of the target, or
    without one of what was written before.

    interventions  those of ``lens.interventions``, not yet begun: each is for one effect
    position       behind which token the next one is asked for
    """
    several = [interventions] if isinstance(interventions, AbstractContextManager) else list(interventions)
    first = look(model, what, target)
    wanted = _wanted(first)  # of both: a text that was cut short has no end, however it is looked at
    chances, before = _outcome(first, wanted, position, k, target is None)
    with ExitStack() as stack:
        for one in several:
            stack.enter_context(one)
        second = look(model, *_again(first))
        written = look(model, _again(first)[0]).target_text if before.written is not None else None
        changed, after = _outcome(second, wanted, position, k, False)
    divergence = float((chances * (chances.clamp(min=1e-30).log() - changed.clamp(min=1e-30).log())).sum())
    after = Outcome(after.next, after.loss, after.each, written)
    return Effect(before, after, [text for text, _ in wanted], max(divergence, 0.0))


def _again(seen: Look) -> tuple[Any, ...]:
    """What to look at to see the same input again, a written target given."""
    source, *target = seen.inputs
    what = source[0].tolist() if seen.model.config.source == "text" else source
    return (what, *(x[0].tolist() for x in target))


def _outcome(seen: Look, wanted: list[tuple[str, int]], position: int, k: int, wrote: bool) -> tuple[Tensor, Outcome]:
    model = seen.model
    each = _losses(seen, [token for _, token in wanted])
    loss = sum(each) / len(each) if each else None
    written = seen.target_text if wrote and model.is_encoder_decoder else None
    if model.config.head == "classify":
        (found,) = classify(model, seen.inputs[0])
        names = sorted(found.all)
        best = [Next(n, name, found.all[name]) for n, name in enumerate(found.all)][:k]
        return torch.tensor([found.all[name] for name in names]), Outcome(best, loss, each, written)
    chances = torch.zeros(model.config.output_vocab_size)
    every = seen.next(position, len(chances))
    for token, _, chance in every:
        chances[token] = chance
    return chances, Outcome(every[:k], loss, each, written)


def _wanted(seen: Look) -> list[tuple[str, int]]:
    """The tokens that a model is to say one after the other; none for those that read only."""
    if seen.model.is_decoder_only:
        labels = seen.rows(kind="self")[1:]
    elif seen.model.is_encoder_decoder:
        labels = seen.rows(kind="cross")
    else:
        return []
    return [(label.text, label.token_id) for label in labels if label.token_id is not None]


@torch.no_grad()
def _losses(seen: Look, wanted: list[int]) -> list[float]:
    """-log p of each token, logits of some positions at a time."""
    head: Any = getattr(seen.model, "head", None)
    if head is None or not wanted:
        return []
    states, found = seen.hidden()[: len(wanted)], []
    goal = torch.tensor(wanted, device=states.device)
    for some, tokens in zip(states.split(_POSITIONS_AT_ONCE), goal.split(_POSITIONS_AT_ONCE), strict=True):
        logits = head(some[None], seen.model.output_table)[0].float()
        found += torch.nn.functional.cross_entropy(logits, tokens, reduction="none").tolist()
    return found


@dataclass(frozen=True)
class LayerPrediction:
    """What is said after one layer."""

    layer: int  # -1 for what goes into the first one
    best: list[Next]  # the likeliest tokens, or classes, best first
    entropy: float  # of all of them, in nats: how undecided it is


def logit_lens(look: Look, position: int = -1, k: int = 5) -> list[LayerPrediction]:
    """What each layer says at one position: the next token, a masked one, or (of the whole input) the class.

    The model runs again, as it is now: inside a ``with`` block of an intervention, with that.
    """
    model = look.model
    found = stacks(model)
    head: Any = getattr(model, "head", None)
    classifier: Any = model.class_head
    if not found or (head is None and classifier is None):
        why = "it has no stack of layers" if not found else f"it has head={model.config.head!r}"
        raise ValueError(f"this model says nothing layer by layer: {why}")
    name = "decoder" if "decoder" in found else "encoder"
    stack, at = found[name], look._position(position)
    logits: dict[int, Tensor] = {}

    def listen(layer: int) -> Callable[[Tensor], Tensor]:
        def heard(x: Tensor) -> Tensor:
            states = x if classifier is not None else x[:, at : at + 1]
            states = states if stack.norm is None else stack.norm(states)
            said = classifier(states) if classifier is not None else head(states, model.output_table)[:, 0]
            logits[layer] = said[0].float().cpu()
            return x

        return heard

    places: dict[str | tuple[str, int, int], Any] = {
        name: listen(-1),
        **{f"{name}.blocks.{layer}": listen(layer) for layer in range(stack.n_layers)},
    }
    with torch.no_grad(), inference(model), patch(model, places):
        run: Any = model.hidden
        run(*look.inputs)
    say = (lambda index: class_names(model)[index]) if classifier is not None else look.token_text
    return [_layer_prediction(layer, logits[layer], k, say) for layer in range(-1, stack.n_layers)]


def _layer_prediction(layer: int, logits: Tensor, k: int, say: Callable[[int], str]) -> LayerPrediction:
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    chances = logits.softmax(-1)
    best = chances.topk(min(k, len(chances)))
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    entropy = float(-torch.xlogy(chances, chances).sum())
    return LayerPrediction(layer, [Next(index, say(index), chance) for index, chance in found], entropy)
