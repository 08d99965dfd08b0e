"""The certificate of a page: it runs in Chromium or Node.js and is compared with the model on the same inputs.

The comparison covers token ids, generated texts (greedy and by beam search), logits, and the attention weights that the
page computes from q and k.
"""

from __future__ import annotations

import base64
import functools
import json
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import RegardError
from ..lens import look
from ..models import Model
from ..text.gguf_vocabulary import PROBES
from .certificate import LARGEST_FLOAT, Bounds, broken_bounds, comparison_row, largest_difference
from .parity_cases import task_name
from .web_runtime import page_command

_TIMEOUT_S = 900
_ROWS, _LOGITS, _BEAMED = 6, 4096, 8  # compared per input: map rows and logits; number of inputs with beam search
_NEW_TOKENS = 16
_MAX_WEIGHT = 1e-4


class _ComparisonHandler(SimpleHTTPRequestHandler):
    """Serves a page and the inputs of its comparison, and receives its answers by POST."""

    cases: bytes
    scripts: Path
    answered: threading.Event
    answers: list[dict[str, Any]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/compare.html":
            return self._send("text/html", b'<!doctype html><script type="module" src="static/page/run.js"></script>')
        if path == "/static/page/run.js":
            script = b'import {compare} from "./compare.mjs"; compare(new URL("../../", import.meta.url).href);'
            return self._send("text/javascript", script)
        if path == "/static/page/compare.mjs":
            return self._send("text/javascript", (self.scripts / "compare.mjs").read_bytes())
        if path == "/compare/cases.json":
            return self._send("application/json", self.cases)
        return super().do_GET()

    def do_POST(self) -> None:
        self.answers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send("application/json", b"{}")
        self.answered.set()

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def run_page(folder: Path, cases: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Run a page on ``cases``; returns the name of the program that ran it, and the answers."""
    with (
        as_file(files("regard").joinpath("web", "static", "page")) as scripts,
        tempfile.TemporaryDirectory() as scratch,
    ):
        state = {"cases": json.dumps(cases).encode(), "scripts": scripts, "answers": [], "answered": threading.Event()}
        handler = functools.partial(type("PageComparison", (_ComparisonHandler,), state), directory=str(folder))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}/"
            name, command = page_command(address, scripts, folder, Path(scratch))
            try:
                answer = _await_answer(command, state)
            finally:
                server.shutdown()
    if "error" in answer:
        raise RegardError(f"the page failed in {name}: {answer['error']}")
    return name, answer


def _await_answer(command: list[str], state: dict[str, Any]) -> dict[str, Any]:
    """Run a program until the page has answered; if it exits first, the error quotes its stderr."""
    with tempfile.TemporaryFile() as errors:  # not a pipe, which would block the program when full
        program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            for _ in range(_TIMEOUT_S):
                if state["answered"].wait(1):
                    return state["answers"][0]
                if program.poll() is not None and not state["answered"].wait(2):
                    errors.seek(0)
                    stderr = errors.read().decode(errors="replace").strip()
                    raise RegardError(f"{Path(command[0]).name} ended without an answer: {stderr[-300:]}")
            raise RegardError(f"the page did not answer within {_TIMEOUT_S} s")
        finally:
            program.kill()
            program.wait()


def certify_page(
    model: Model,
    folder: Path,
    *,
    inputs: Sequence[Any] | None = None,
    n_inputs: int = 200,
    seed: int = 0,
    int8: bool = False,
    bounds: Bounds | None = None,
) -> dict[str, Any]:
    """Compare a page with its float32 model on ``inputs``; None: held-out examples of its run, or random inputs."""
    bounds = bounds or Bounds()
    cases = [_case(model, *pair) for pair in _with_beams(model, inputs or _inputs(model, n_inputs, seed))]
    program, answer = run_page(folder, {"probes": list(PROBES), "inputs": [case for case, _ in cases]})
    same_ids, same_texts = [], []
    logits_gap, weights_gap = 0.0, 0.0
    for (_, expected), result in zip(cases, answer["results"], strict=True):
        same_ids.append(result["source"] == expected["source"])
        same_texts.append(same_ids[-1] and result["target"] == expected["target"])
        if same_texts[-1]:  # logits and weights of different texts cannot be compared
            logits_gap = max(logits_gap, _distance(result["logits"], expected["logits"]))
            for kind, weights in expected["weights"].items():
                weights_gap = max(weights_gap, _distance(result["weights"][kind], weights))
    n_same = sum(same_texts)
    same_ids += _same_probes(model, answer["probes"])
    least_same = bounds.int8_same_text if int8 else bounds.same_text
    id_bounds = Bounds(max_abs=None, same_text=1.0, int8_loss=None)
    text_bounds = Bounds(max_abs=None, same_text=least_same, int8_loss=None)
    weight_bounds = Bounds(max_abs=None if int8 else _MAX_WEIGHT, same_text=None, int8_loss=None)
    share, n_texts = sum(same_ids) / len(same_ids), len(same_texts)
    rows = [
        comparison_row("page tokens", len(same_ids), None, share, id_bounds, "token ids of texts"),
        comparison_row("page", n_texts, logits_gap, n_same / n_texts, text_bounds, "logits, and generated texts"),
        comparison_row("page weights", n_same, weights_gap, None, weight_bounds, "attention weights"),
    ]
    document: dict[str, Any] = {
        "task": task_name(model.config),
        "parameters": model.n_parameters,
        "shapes": {"count": len(cases), "seed": seed, "program": program},
        "bounds": asdict(bounds),
        "comparisons": rows,
        "file": None,
    }
    return {**document, "passes": not broken_bounds(document)}


def _same_probes(model: Model, answers: list[dict[str, Any]]) -> list[bool]:
    """For each probe, a text with rare characters, and each tokenizer: whether the page gives the same ids."""
    processor = model.processor
    sides = {} if processor is None else {"source": processor.source, "target": processor.target}
    tokenizers = {name: tokenizer for name, tokenizer in sides.items() if tokenizer is not None}
    return [
        answer[name] == tokenizer.encode(text)
        for text, answer in zip(PROBES, answers, strict=True)
        for name, tokenizer in tokenizers.items()
    ]


def _inputs(model: Model, n: int, seed: int) -> Sequence[Any]:
    """Held-out inputs of the model's run, or random inputs."""
    from ..web.run_examples import held_out_inputs

    path = None if model.provenance is None else model.provenance.path
    if path is not None and (held_out := held_out_inputs(path, n)):
        return held_out
    generator = torch.Generator().manual_seed(seed)
    if model.config.source == "image":
        size = (model.config.image_size, model.config.image_size, model.config.n_channels)
        return [torch.randint(256, size, generator=generator).byte().numpy() for _ in range(n)]
    assert model.processor is not None and model.processor.source is not None
    rows = torch.randint(model.config.vocab_size, (n, 12), generator=generator).tolist()
    texts = [model.processor.source.decode(row) for row in rows]
    return [text for text in texts if text.strip()] or ["a"]


def _with_beams(model: Model, inputs: Sequence[Any]) -> list[tuple[Any, int]]:
    """Each input with its beam size."""
    return [(item, 4 if model.generates and n < _BEAMED else 1) for n, item in enumerate(inputs)]


def _case(model: Model, item: Any, beam: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One input, a text or an image, for the page, and the answer expected from the model's own."""
    search = {"beam": beam} | ({"max_new_tokens": _NEW_TOKENS} if model.is_decoder_only else {})
    options = search if model.generates else None
    own = look(model, item, generate=options)
    rows = {kind: _spread_rows(len(own.rows(kind=kind))) for kind in own.kinds}
    is_image = model.config.source == "image"
    with torch.no_grad():
        logits = own.logits() if model.head is not None else model(*own.inputs)
    case: dict[str, Any] = {"rows": rows, "logits": _LOGITS, "generate": options}
    case |= {"image": _image(item)} if is_image else {"text": item}
    has_target = len(own.inputs) > 1
    weights = {
        kind: torch.stack([own.map(kind=kind, layer=n).tile(rows[kind])[0] for n in range(own.layers(kind=kind))])
        for kind in own.kinds
    }
    expected = {
        "source": None if is_image else own.inputs[0][0].tolist(),
        "target": own.inputs[1][0].tolist() if has_target else None,
        "logits": logits.flatten()[:_LOGITS],
        "weights": {kind: w.flatten() for kind, w in weights.items()},
    }
    return case, expected


def _spread_rows(n: int) -> list[int]:
    """Evenly spaced indices of n rows, including the first and the last."""
    return sorted({round(i * (n - 1) / (_ROWS - 1)) for i in range(_ROWS)})


def _image(pixels: Any) -> dict[str, Any]:
    array = np.asarray(pixels)
    array = np.repeat(array.reshape(*array.shape[:2], -1), 3 if array.ndim == 2 or array.shape[2] == 1 else 1, axis=2)
    return {
        "width": array.shape[1],
        "height": array.shape[0],
        "data": base64.b64encode(np.ascontiguousarray(array[:, :, :3]).tobytes()).decode(),
    }


def _distance(packed: str, expected: Tensor) -> float:
    """The largest difference from fp32 numbers in base64; the largest float if the shapes differ."""
    values = torch.tensor(np.frombuffer(base64.b64decode(packed), dtype="<f4"))
    return LARGEST_FLOAT if values.shape != expected.shape else largest_difference(values, expected)
