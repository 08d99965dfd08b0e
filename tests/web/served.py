"""Small models behind an explorer, and a client that asks it as a browser would."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from starlette.testclient import TestClient
from torch import Tensor

from generation.spoken import captioner, classifier, image_classifier, language_model, translator
from regard.models import Model
from regard.web import explorer
from regard.web.requests import Limits

HOME = "http://127.0.0.1"
TEXT = "the cat sat on the mat."


def small_models() -> dict[str, Model]:
    """One of each family: what they read, write and attend with differs."""
    return {
        "speaker": language_model(),
        "grouped": language_model(kind="chars", n_kv_heads=2, positions="rope"),
        "sloping": language_model(positions="alibi"),
        "translator": translator(),
        "recurrent": translator("bahdanau-gru"),
        "captioner": captioner(),
        "classifier": classifier(),
        "images": image_classifier(),
    }


@contextmanager
def asking(models: dict[str, Model], limits: Limits | None = None, host: str = "127.0.0.1") -> Iterator[TestClient]:
    with TestClient(explorer(models, limits, host), base_url=HOME) as client:
        yield client


def picture(size: tuple[int, int] = (20, 12)) -> str:
    """A gradient as base64 of a PNG."""
    x = np.linspace(0, 255, size[0], dtype=np.uint8)
    y = np.linspace(0, 255, size[1], dtype=np.uint8)
    pixels = np.stack(np.broadcast_arrays(x[None], y[:, None], np.uint8(90)), -1)
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def opened(client: TestClient, model: str, **fields: Any) -> dict[str, Any]:
    """A new look: of a text, or of the picture where the model reads one."""
    reads_image = next(each["image"] for each in client.get("/api/models").json() if each["id"] == model)
    given = {"image": picture()} if reads_image else {"text": TEXT}
    answer = client.post("/api/looks", json={"model": model, **given, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def asked(client: TestClient, look: dict[str, Any], what: str, **query: Any) -> Any:
    answer = client.get(f"/api/looks/{look['id']}/{what}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def numbers(client: TestClient, look: dict[str, Any], what: str, **query: Any) -> Tensor:
    """A binary answer in its shape."""
    answer = client.get(f"/api/looks/{look['id']}/{what}", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    shape = [int(n) for n in answer.headers["x-shape"].split(",")]
    return torch.from_numpy(np.frombuffer(answer.content, "<f4").reshape(shape).copy())


def refusal(answer: Any, status: int) -> str:
    """The one sentence of an error."""
    assert answer.status_code == status, answer.text
    document = answer.json()
    assert list(document) == ["error"]
    sentence = str(document["error"])
    assert sentence
    assert "\n" not in sentence
    assert len(sentence) < 400
    return sentence
