"""What an exported page has of a model, with the passes run by torch: the explorer's back end in the page, alone."""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.export.page_graphs import describe_attention, describe_vocabulary
from regard.foundation.jsonio import to_jsonable
from regard.generation.text_generation import class_names
from regard.lens import look
from regard.lens.activations import capture_inputs
from regard.lens.capture import stacks
from regard.lens.capture_inputs import tokenizers
from regard.lens.residual import Place, text_embeddings
from regard.web.circuit_queries import pass_inputs
from regard.web.requests import Limits, LookRequest
from regard.web.served_models import ServedModel, change_model, open_look
from regard.web.sessions import LookSession, SessionStore

# A PageModel whose passes are functions of Python: `torch_pass`, `torch_layers`.
STAND_IN_CLASS = """
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const floats = ({ dims, data }) => ({ dims, data: new Float32Array(bytes(data).buffer) });
  const rows = (x) => ({ rows: x.dims[0], vocab: x.dims.at(-1), data: floats(x).data });
  class StandIn {
    constructor(page) { this.page = page; this.files = { async keepForOffline() {} }; }
    async trace(request) {
      const { repeat, ...rest } = request, again = repeat ? { repeat: repeat.key } : {};
      const found = await torch_pass(this.page.model.id, { ...rest, ...again });
      const activations = Object.fromEntries(Object.entries(found.activations).map(([name, x]) => [name, floats(x)]));
      return { ...found, activations, logits: rows(found.logits) };
    }
    async layer_logits({ key }, position) { return rows(await torch_layers(this.page.model.id, key, position)); }
  }
"""
STAND_IN = f"""{STAND_IN_CLASS}
  const {{ PageSource }} = await import("/static/page/page_source.js");
  const inPage = (page) => new PageSource(async () => new StandIn(page));
"""


def model_module(page: dict[str, Any]) -> str:
    """What page/model.js exports, with passes of torch."""
    opening = f"static async open() {{ return new StandIn({json.dumps(page)}); }}"
    return f"{STAND_IN_CLASS}\nexport class PageModel {{ {opening} }}"


def pack(x: Tensor) -> dict[str, Any]:
    content = np.ascontiguousarray(x.detach().float().numpy(), dtype="<f4").tobytes()
    return {"dims": list(x.shape), "data": base64.b64encode(content).decode()}


class TorchPasses:
    """The passes of one model, as a page would ask for them."""

    def __init__(self, served: ServedModel) -> None:
        self.served, self.model = served, served.model
        self._limits = Limits()
        self._sessions = SessionStore(self._limits)
        self._kept: list[LookSession] = []

    def page(self) -> dict[str, Any]:
        """page.json without its files."""
        model, config, (source, target) = self.model, self.model.config, tokenizers(self.model)
        names = (
            "architecture", "source", "head", "problem_type", "norm_place", "pad_id", "bos_id", "eos_id", "max_len",
            "max_target_len", "image_size", "patch_size",
        )  # fmt: skip
        embeddings: Any = model.embeddings
        fields = {name: getattr(config, name) for name in names}
        fields |= {name: getattr(embeddings, name, 0) for name in ("n_class_tokens", "n_registers")}
        fields["embedding_norm"] = getattr(embeddings, "norm", None) is not None
        return {
            "model": to_jsonable(self.served.to_dict()),
            "config": fields,
            "attention": describe_attention(model),
            "vocabulary": {
                "source": describe_vocabulary(source, config),
                "target": describe_vocabulary(target, config),
            },
            "classes": list(class_names(model)) if config.head == "classify" else None,
            "spells_examples": self.served._spells_examples,
        }

    def trace(self, request: dict[str, Any]) -> dict[str, Any]:
        repeat = request.pop("repeat", None)
        body = LookRequest(model=self.served.id, **request)
        if repeat is None:
            session = open_look(self.served, body, self._sessions, self._limits)
        else:
            session = self._again(self._kept[repeat], body)
        self._kept.append(session)
        seen, model = session.look, self.model
        with session.model_changes():
            record = capture_inputs(model, pass_inputs(seen))
            activations = {name: pack(x[0]) for name, x in record.items()}
        for stack, x in [(name, record[name]) for name in stacks(model)]:
            for part in ("token", "segment", "position"):
                places = [text_embeddings(record, Place(stack, 0, n)) for n in range(x.shape[1])]
                if all(place is not None and part in place[1] for place in places):
                    activations[f"{stack}.{part}"] = pack(torch.stack([place[1][part] for place in places if place]))
        return {
            "key": len(self._kept) - 1,
            "source": None if seen.image else {"ids": seen.inputs[0][0].tolist()},
            "target": self._target(session),
            "text": seen.text,
            "target_text": seen.target_text,
            "image": None if seen.image is None else "data:image/png;base64,",
            "activations": activations,
            "logits": pack(record.logits[0].reshape(-1, record.logits.shape[-1])),
            "generated": self._generated(session),
        }

    def _again(self, session: LookSession, body: LookRequest) -> LookSession:
        """The same tokens under other changes."""
        before, changes = session.look, partial(change_model, self.served, body.variant)
        what = [x[0].tolist() if x.dim() == 2 else x for x in before.inputs]
        with changes():
            return LookSession(look(self.model, *what), self.served, changes)

    def _target(self, session: LookSession) -> dict[str, Any] | None:
        if not self.model.is_encoder_decoder:
            return None
        last = session.look.rows(kind="cross")[-1]
        return {"ids": session.look.inputs[1][0].tolist(), "has_end": last.token_id is not None}

    @staticmethod
    def _generated(session: LookSession) -> dict[str, Any] | None:
        found = session.look.generated
        if found is None:
            return None
        names = ("beam", "parent", "token", "score")
        steps = [[dict(zip(names, each, strict=True)) for each in step.of(0)] for step in found.steps or ()]
        texts = [{"tokens": list(text.tokens), "score": text.score} for text in found.hypotheses[0]]
        return {"steps": steps or None, "hypotheses": texts}

    @torch.no_grad()
    def layers(self, key: int, position: int) -> dict[str, Any]:
        """Logits after each layer, as if it were the last."""
        session, model = self._kept[key], self.model
        name = "encoder" if model.is_encoder_only else "decoder"
        with session.model_changes():
            record = capture_inputs(model, pass_inputs(session.look))
        n_layers = stacks(model)[name].n_layers
        norm = stacks(model)[name].norm or (lambda x: x)
        states = [record[name], *(record[f"{name}.blocks.{layer}.output"] for layer in range(n_layers))]
        if model.class_head is not None:
            return pack(torch.cat([model.class_head(norm(x)) for x in states]))
        return pack(torch.cat([model.head(norm(x[:, position : position + 1]), model.output_table)[0] for x in states]))
