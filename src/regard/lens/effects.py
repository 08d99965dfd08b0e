"""The effect of an intervention on a model's predictions, and the logit lens: predictions after each layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..foundation.checks import check_positive
from ..generation import classify
from ..generation.generate import inference
from ..generation.text_generation import class_names
from ..models import Model
from .capture import Head, stacks
from .interventions import patch
from .look import Look, Next, look, token_logits

Intervention = AbstractContextManager[Any]


@dataclass(frozen=True)
class Outcome:
    """A model's predictions for one input."""

    next: list[Next]  # the likeliest tokens after one position, or classes, best first
    loss: float | None  # mean -log p of the text's (or target's) tokens, in nats; None where there are none to predict
    each: list[float]  # -log p of each of these tokens
    written: str | None  # the text that an encoder-decoder generates, where no target was given


@dataclass(frozen=True)
class Effect:
    """The same input without and with an intervention."""

    before: Outcome
    after: Outcome
    tokens: list[str]  # those of ``each``
    divergence: float  # KL(before ‖ after) of the predictions, in nats

    @property
    def loss_change(self) -> float | None:
        if self.before.loss is None or self.after.loss is None:
            return None
        return self.after.loss - self.before.loss

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        outcomes = {
            name: asdict(outcome) | {"next": [token._asdict() for token in outcome.next]}
            for name, outcome in (("before", self.before), ("after", self.after))
        }
        return {**outcomes, "tokens": self.tokens, "divergence": self.divergence, "loss_change": self.loss_change}


def effect(
    model: Model,
    what: Any,
    interventions: Intervention | Sequence[Intervention],
    target: Any = None,
    *,
    position: int = -1,
    k: int = 10,
) -> Effect:
    """Predictions before and after: ``effect(model, "…", [switch_off(model, [("self", 0, 1)])])``.

    Both losses are of the same tokens: those of the target, or without one of the text generated before.

    interventions  context managers of ``lens.interventions``, not yet entered: each is for one effect
    position       of the token after which the next one is predicted
    """
    several = [interventions] if isinstance(interventions, AbstractContextManager) else list(interventions)
    first = look(model, what, target)
    targets = _target_tokens(first)  # of both looks: the same tokens, also where generation stopped without an end
    source, *generated = first.inputs  # the same pass again, with a generated target as a given one
    reads_text = first.model.config.source == "text"
    inputs = (source[0].tolist() if reads_text else source, *(x[0].tolist() for x in generated))
    probabilities, before = _outcome(first, targets, position, k, target is None)
    with ExitStack() as stack:
        for intervention in several:
            stack.enter_context(intervention)
        second = look(model, *inputs)
        written = look(model, inputs[0]).target_text if before.written is not None else None
        changed, after = _outcome(second, targets, position, k, False)
    log_ratio = probabilities.clamp(min=1e-30).log() - changed.clamp(min=1e-30).log()
    divergence = max(float((probabilities * log_ratio).sum()), 0.0)
    return Effect(before, replace(after, written=written), [text for text, _ in targets], divergence)


def _outcome(
    seen: Look, targets: list[tuple[str, int]], position: int, k: int, is_generated: bool
) -> tuple[Tensor, Outcome]:
    """The probabilities of all tokens (or classes), and the outcome."""
    model = seen.model
    losses = _token_losses(seen, [token for _, token in targets])
    loss = sum(losses) / len(losses) if losses else None
    written = seen.target_text if is_generated and model.is_encoder_decoder else None
    if model.config.head == "classify":
        (classes,) = classify(model, seen.inputs[0])
        best = [Next(n, name, probability) for n, (name, probability) in enumerate(classes.all.items())][:k]
        by_name = torch.tensor([classes.all[name] for name in sorted(classes.all)])
        return by_name, Outcome(best, loss, losses, written)
    probabilities = torch.zeros(model.config.output_vocab_size)
    every = seen.next(position, len(probabilities))
    for token, _, probability in every:
        probabilities[token] = probability
    return probabilities, Outcome(every[:k], loss, losses, written)


def _target_tokens(seen: Look) -> list[tuple[str, int]]:
    """Text and id of the tokens that a model predicts one after the other; none for an encoder."""
    labels = seen.rows(kind="self")[1:] if seen.model.is_decoder_only else []
    labels = seen.rows(kind="cross") if seen.model.is_encoder_decoder else labels
    return [(label.text, label.token_id) for label in labels if label.token_id is not None]


def _token_losses(seen: Look, targets: list[int]) -> list[float]:
    """-log p of each token."""
    if getattr(seen.model, "head", None) is None or not targets:
        return []
    losses: list[float] = []
    for logits in token_logits(seen, len(targets)):
        ids = torch.tensor(targets[len(losses) : len(losses) + len(logits)], device=logits.device)
        losses += torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none").tolist()
    return losses


@dataclass(frozen=True)
class LayerPrediction:
    """The model's prediction if one layer were the last."""

    layer: int  # -1 for the input of the first layer
    best: list[Next]  # the likeliest tokens, or classes, best first
    entropy: float  # of all tokens or classes, in nats


def logit_lens(look: Look, position: int = -1, k: int = 5) -> list[LayerPrediction]:
    """Final norm and head applied after each layer (nostalgebraist 2020), at one position: the next token, a masked
    one, the tag of a word, or (of the whole input) the class.

    The model runs again as it is now: inside a ``with`` block of an intervention, with that.
    """
    check_positive(k=k)
    model, by_name = look.model, stacks(look.model)
    head: Any = getattr(model, "head", None)
    classifier: Any = model.class_head
    if not by_name or (head is None and classifier is None):
        why = "it has no stack of layers" if not by_name else f"it has head={model.config.head!r}"
        raise ValueError(f"this model says nothing layer by layer: {why}")
    name = "decoder" if "decoder" in by_name else "encoder"
    stack, index = by_name[name], look._position(position)
    text_of = (lambda n: class_names(model)[n]) if classifier is not None else look.token_text
    predictions: list[LayerPrediction] = []

    def predict(x: Tensor) -> Tensor:
        """Called on the stack's input and on each layer's output, in this order."""
        states = x if model.config.head == "classify" else x[:, index : index + 1]
        states = states if stack.norm is None else stack.norm(states)
        logits = head(states, model.output_table) if classifier is None else classifier(states)
        probabilities = logits.flatten(0, -2)[0].float().cpu().softmax(-1)
        best = probabilities.topk(min(k, len(probabilities)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        entropy = float(-torch.xlogy(probabilities, probabilities).sum())
        tokens = [Next(n, text_of(n), probability) for n, probability in pairs]
        predictions.append(LayerPrediction(len(predictions) - 1, tokens, entropy))
        return x

    sites: dict[str | Head, Any] = dict.fromkeys(
        [name, *(f"{name}.blocks.{layer}" for layer in range(stack.n_layers))], predict
    )
    with torch.no_grad(), inference(model), patch(model, sites):
        run: Any = model.hidden
        run(*look.inputs)
    return predictions
