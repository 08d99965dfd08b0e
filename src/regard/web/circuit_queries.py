"""The explorer's queries that run the model again: contributions, why a head attends, patching, history, head effects.

Each applies a function of ``lens`` to the tokens of a look; the captured activations are not kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..generation.text_generation import class_names
from ..lens.activations import ActivationRecord, PassInputs, capture_inputs
from ..lens.capture import attention_name, attention_sites, n_heads_of, stacks
from ..lens.effects import target_tokens, text_losses
from ..lens.head_history import checkpoint_steps, head_history
from ..lens.look import Look, token_logits
from ..lens.patch_runner import LogitDifference, Patch, PatchRunner
from ..lens.patching import Over, PatchTargets, estimate_effects, patch_targets, sweep_effects
from ..models.components import ClassHead
from .look_queries import HeadView, check_index, head_to_explain, label_document, merged_view
from .requests import Limits, RequestRefused
from .sessions import LookSession

_CHOICES = 12  # predictions offered for contributions
_BARS = 8  # predictions shown for one patch
_CHECKPOINTS = 12  # checkpoints loaded for the history
_FLOATS = 1 << 24  # maximum number of logits in a batch of patches


def contributions(session: LookSession, position: int, token: int | None, limits: Limits) -> dict[str, Any]:
    """One logit, by default of the likeliest token after a position or of the likeliest class, as a sum over the parts
    of the model."""
    model, look = layered_model(session), session.look
    position = look._position(position)
    if isinstance(model.class_head, ClassHead):
        position = 0
    chances = probabilities(look, position)
    if token is not None:
        check_index("token", token, len(chances))
    reads_all = isinstance(model.class_head, ClassHead) and model.class_head.pooler.kind != "first"
    if reads_all:
        _check_tokens(look, limits)
    record = _capture(session, last_stack(model), None if reads_all else [position])
    chosen = int(chances.argmax()) if token is None else token
    attribution = record.logit_attribution(chosen, position=position)
    best = [*dict.fromkeys((*chances.topk(min(_CHOICES, len(chances))).indices.tolist(), chosen))]
    return {
        **prediction(look, chances, chosen),
        "logit": attribution.logit,
        "parts": {name: part.tolist() for name, part in attribution.parts.items()},
        "choices": [prediction(look, chances, index) for index in best],
    }


def explain_score(session: LookSession, at: HeadView, row: int, col: int, k: int, limits: Limits) -> dict[str, Any]:
    """The score of a query and a key as a sum over pairs of writers: the k largest terms, and the sum of the rest."""
    layered_model(session)
    view, look = merged_view(session, at), session.look
    check_index("row", row, len(view.rows))
    check_index("col", col, len(view.cols))
    layer, head = at.layer, head_to_explain(session, at, row, col)
    if at.kind == "cross":  # query and key come from different stacks: capture both at all positions
        _check_tokens(look, limits)
        record = _capture(session, "", None)
    else:
        record = _capture(session, "encoder" if at.kind == "encoder" else "decoder", sorted({row, col}))
    split = record.why(kind=at.kind, layer=layer, head=head, row=row, col=col)
    best = split.top(k)
    others = split.total - split.position_bias - sum(value for *_, value in best)
    return {
        "head": head,
        "score": split.score,
        "weight": float(look.weights(layer=layer, head=head, kind=at.kind, rows=[row], cols=[col])),
        "position_bias": split.position_bias,
        "pairs": [
            {"query": _writer(look, query, row), "key": _writer(look, key, col), "value": value}
            for query, key, value in best
        ],
        "n_others": split.pairs.numel() - len(best),
        "others": others,
    }


def _writer(look: Look, name: str, position: int) -> dict[str, Any]:
    """A part of the model; for a head also the token that it attended to most."""
    kind, *numbers = name.split(".")
    if len(numbers) < 2:
        return {"name": kind} | ({"layer": int(numbers[0])} if numbers else {})
    layer, head = map(int, numbers)
    weights = look.weights(layer=layer, head=head, kind=kind, rows=[position])[0]
    index = int(weights.argmax())
    source = label_document(look.cols(kind=kind)[index]) | {"index": index, "weight": float(weights[index])}
    return {"name": kind, "layer": layer, "head": head, "from": source}


# ---- patching


@dataclass(frozen=True)
class PatchQuery:
    """Which activations are patched from a clean look into a corrupted one, and where the prediction is read."""

    over: str  # "residual", "attention", "ff" or "heads"
    kind: str  # of attention; "encoder" also selects the encoder's residual stream and feed-forward
    position: int


class PatchedPair:
    """A clean and a corrupted look, and the predictions that the corruption makes most unlikely and most likely."""

    def __init__(self, clean: LookSession, corrupted: LookSession, query: PatchQuery) -> None:
        self.model: Any = layered_model(clean)
        self._clean, self.look = clean, clean.look
        if corrupted.served is not clean.served:
            raise RequestRefused(422, "both looks must be of the same model")
        self.inputs = pass_inputs(clean.look), pass_inputs(corrupted.look)
        sizes = [[x.shape[1] for x in look.inputs if x.dim() == 2] for look in (clean.look, corrupted.look)]
        if sizes[0] != sizes[1]:
            n, m = (" + ".join(map(str, each)) for each in sizes)
            raise RequestRefused(422, f"the texts have {n} and {m} tokens; patching needs two texts of the same length")
        if query.kind not in clean.look.kinds:
            raise RequestRefused(
                422, f"kind={query.kind[:40]!r} is not one of this look's: {', '.join(clean.look.kinds)}"
            )
        self.position = clean.look._position(query.position)
        self.is_class = isinstance(self.model.class_head, ClassHead)
        self.chances = [probabilities(look, self.position) for look in (clean.look, corrupted.look)]
        moved = self.chances[0] - self.chances[1]
        self.answer, self.wrong = int(moved.argmax()), int(moved.argmin())
        if self.answer == self.wrong:
            raise RequestRefused(422, "both texts get the same prediction there, so there is nothing to restore")
        self.metric = LogitDifference(self.answer, self.wrong, self.position)
        over = "cross_attention" if (query.over, query.kind) == ("attention", "cross") else query.over
        kind = query.kind if over == "heads" or query.kind == "encoder" else None
        self.targets: PatchTargets = patch_targets(self.model, cast(Over, over), None, kind)

    @property
    def batch(self) -> int:
        """The number of patches per pass, chosen so that its logits fit into memory."""
        n_tokens = sum(x.shape[1] for x in self.inputs[0].tensors if x.dim() == 2)
        return max(1, min(64, _FLOATS // (max(1, n_tokens) * self.model.config.output_vocab_size)))

    def effects(self, limits: Limits) -> dict[str, Any]:
        """The share of the logit difference that each patch restores; estimated if there are too many to run each."""
        n_layers = len(attention_sites(self.model)[self.targets.kind])
        n_tokens = sum(self.inputs[0].lengths) + (self.model.is_encoder_decoder and sum(self.inputs[0].source_lengths))
        config = self.model.config
        n_patches = n_layers * (config.n_heads if self.targets.over == "heads" else n_tokens)
        n_parameters = sum(x.numel() for x in self.model.parameters()) + 2 * n_layers * n_tokens * config.d_model
        is_exact = 2 * n_patches * n_tokens * n_parameters <= limits.sweep_operations
        compute = partial(sweep_effects, batch=self.batch) if is_exact else estimate_effects
        with self._clean.model_changes():
            changes, (clean, corrupted) = compute(self.model, self.targets, *self.inputs, self.metric)
        return {
            "effects": (changes.detach() / (clean - corrupted)).tolist(),
            "axes": list(self.targets.axes()),
            "exact": is_exact,
            **self._ends(float(clean), float(corrupted)),
        }

    def _ends(self, clean: float, corrupted: float) -> dict[str, Any]:
        """The texts of both predictions, and the metric without any patch."""
        tokens = {"answer": self.answer, "wrong": self.wrong}
        texts = {name: prediction(self.look, self.chances[0], token)["text"] for name, token in tokens.items()}
        return {**texts, "clean": clean, "corrupted": corrupted}

    def predict_patched(self, layer: int, unit: int) -> dict[str, Any]:
        """Predictions of the clean text, of the corrupted one, and of the corrupted one with a single patch."""
        site = self.targets.site(layer)
        if layer >= len(attention_sites(self.model).get(self.targets.kind, ())):
            raise RequestRefused(422, f"layer={layer} is not one of this model's")
        with self._clean.model_changes():
            record = capture_inputs(self.model, self.inputs[0], sites=[site, self.targets.site(0)])
            check_index("unit", unit, self.targets.shape(record)[0])
            patch = Patch(site, unit) if self.targets.over == "heads" else Patch(site, None, unit)
            (logits,) = PatchRunner(self.model, self.inputs[1]).run_patches([patch], record, self._logits)
        clean, corrupted = self.chances
        chances = class_probabilities(self.model, logits) if self.is_class else logits.softmax(-1)
        runs = {"clean": clean, "corrupted": corrupted, "patched": chances}
        best = torch.stack([*runs.values()]).amax(0).topk(min(_BARS, len(clean))).indices.tolist()
        return {
            "predictions": [
                {"text": prediction(self.look, clean, index)["text"], "token": index}
                | {name: float(chances[index]) for name, chances in runs.items()}
                for index in best
            ]
        }

    def _logits(self, logits: Tensor) -> Tensor:
        return logits if self.is_class else logits[:, self.position]


# ---- history


def checkpoint_history(session: LookSession, kind: str) -> dict[str, Any]:
    """Pattern scores of the heads at up to ``_CHECKPOINTS`` evenly spaced checkpoints of the run.

    A language model reads a repeated sequence of random tokens; other models read the text of the look.
    """
    served, look = session.served, session.look
    merged_view(session, HeadView(kind, 0))  # checks the kind
    if served.run is None:
        raise RequestRefused(422, f"model {served.id!r} has no history: it does not come from a run with checkpoints")
    all_steps = checkpoint_steps(served.run)
    chosen = torch.linspace(0, len(all_steps) - 1, min(_CHECKPOINTS, len(all_steps)))
    steps = [all_steps[round(n)] for n in chosen.tolist()]
    rows = [None] if look.model.is_decoder_only else [[x[0].tolist()] for x in look.inputs]
    device = look.model.device
    return head_history(served.run, *rows, kind=kind, steps=steps, device=device).to_dict()


# ---- effects of interventions


@torch.no_grad()
def text_fit(session: LookSession) -> dict[str, Any]:
    """How well the model predicts the text that it reads: the number of tokens, how many of them were its likeliest
    prediction, and the geometric mean of their probabilities."""
    look = session.look
    tokens = [token for _, token in target_tokens(look)]
    if look.model.head is None or not tokens:
        return {"tokens": 0}
    best = torch.cat([logits.argmax(-1).cpu() for logits in token_logits(look, len(tokens))])
    losses = text_losses(look, tokens)
    right = int((best == torch.tensor(tokens)).sum())
    return {"tokens": len(tokens), "right": right, "probability": math.exp(-sum(losses) / len(losses))}


def head_effects(session: LookSession, limits: Limits) -> dict[str, Any]:
    """The geometric mean of the probabilities of the text's tokens, or the probability of its class, with all heads
    ("before") and with each head switched off alone ("without", as kind → [layer][head])."""
    model, look = layered_model(session), session.look
    inputs = pass_inputs(look)
    is_class = isinstance(model.class_head, ClassHead)
    targets = [token for _, token in target_tokens(look)] if model.head is not None else []
    record = capture_inputs(model, inputs, sites=[])
    ids = torch.tensor(targets, device=model.device) if targets else record.logits.argmax(-1)[0]

    def chance(logits: Tensor) -> Tensor:
        """The mean probability of the targets under logits of a batch of runs, (B,)."""
        if is_class:
            return class_probabilities(model, logits)[:, int(ids)]
        log_probs = logits[:, : len(ids)].log_softmax(-1)
        return log_probs.gather(-1, ids.expand(len(log_probs), -1)[..., None])[..., 0].mean(1).exp()

    sites = attention_sites(model)
    n_heads = {
        f"{attention_name(kind, layer)}.heads": n_heads_of(site.owner)
        for kind, layers in sites.items()
        for layer, site in enumerate(layers)
    }
    patches = [Patch(name, head) for name, n in n_heads.items() for head in range(n)]
    n_tokens = max(inputs.lengths[0], inputs.source_lengths[0])
    if 2 * len(patches) * n_tokens * sum(x.numel() for x in model.parameters()) > 10 * limits.sweep_operations:
        raise RequestRefused(422, f"switching off {len(patches)} heads one by one takes too long for {n_tokens} tokens")
    zeros = {name: torch.zeros(1, n, 1, 1) for name, n in n_heads.items()}  # broadcast over tokens and features
    batch = max(1, min(64, _FLOATS // (n_tokens * model.config.output_vocab_size)))
    with session.model_changes():
        chances = iter(PatchRunner(model, inputs).run_patches(patches, zeros, chance, batch).tolist())
    without = {
        kind: [[next(chances) for _ in range(n_heads_of(site.owner))] for site in layers]
        for kind, layers in sites.items()
    }
    return {"before": float(chance(record.logits)), "without": without}


# ---- running the model again


def layered_model(session: LookSession) -> Any:
    """The model; raises if it has no residual stream or no output head."""
    model: Any = session.served.model
    if not stacks(model):
        raise RequestRefused(422, f"model {session.served.id!r} has no layers that write into a residual stream")
    if model.head is None and model.class_head is None:
        raise RequestRefused(422, f"model {session.served.id!r} predicts nothing: it has no head")
    return model


def last_stack(model: Any) -> str:
    return "encoder" if model.is_encoder_only else "decoder"


def pass_inputs(look: Look) -> PassInputs:
    n_rows = len(look.hidden())
    n_source = look.map(kind="cross", layer=0).shape[3] if "cross" in look.kinds else n_rows
    return PassInputs(look.inputs, {}, [n_rows], [n_source])


def _capture(session: LookSession, stack: str, positions: list[int] | None) -> ActivationRecord:
    """Capture the writes into the residual stream of a stack ("" for both), at some positions or at all."""
    model, not_written = session.served.model, (".q", ".k", ".v", ".router")
    sites = [name for name in model.sites() if name.startswith(stack) and not name.endswith(not_written)]
    with session.model_changes():
        inputs = pass_inputs(session.look)
        return capture_inputs(model, inputs, sites=sites, positions=positions, keep_calls=True)


def _check_tokens(look: Look, limits: Limits) -> None:
    longest = max(max(look.map(kind=kind, layer=0).shape[2:]) for kind in look.kinds)
    if longest > limits.capture_tokens:
        raise RequestRefused(422, f"the text has {longest:,} tokens; the limit here is {limits.capture_tokens:,}")


@torch.no_grad()
def probabilities(look: Look, position: int) -> Tensor:
    """The probabilities of all tokens after a position (V,), or of all classes; of a regression, its value."""
    model: Any = look.model
    if model.class_head is None:
        return look.logits(slice(position, position + 1))[0].softmax(-1)
    logits = model.class_head(look.hidden()[None])[0].float()
    return class_probabilities(model, logits if logits.dim() == 1 else logits[position])


def class_probabilities(model: Any, logits: Tensor) -> Tensor:
    """The probabilities of all classes from their logits (..., C); of a regression, its value."""
    match model.config.problem_type:
        case "regression":
            return logits
        case "multi_label":
            return logits.sigmoid()
    return logits.softmax(-1)


def prediction(look: Look, chances: Tensor, index: int) -> dict[str, Any]:
    is_class = look.model.class_head is not None
    text = class_names(look.model)[index] if is_class else look.token_text(index)
    return {"token": index, "text": text, "probability": float(chances[index])}
