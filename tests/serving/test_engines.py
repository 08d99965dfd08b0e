"""Exported directories behind the same API: int8, ONNX Runtime, CTranslate2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

import regard
from generation.spoken import LINES, language_model, translator
from regard.export.ctranslate2_export import export_ctranslate2
from regard.export.engines import open_engine
from regard.export.onnx_export import export_onnx
from regard.export.quantise import quantise, write_int8
from regard.serving.engine_scheduler import EngineScheduler, open_served
from regard.serving.running_text import TextRequest
from regard.web.requests import Limits

from .served_api import TEXT, ServedApi, serving_api


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator exported for every engine."""
    folder = tmp_path_factory.mktemp("shipped")
    for kind in ("onnx", "ctranslate2"):
        translator().save(folder / f"translator-{kind}")
    export_onnx(translator(), folder / "translator-onnx")
    export_ctranslate2(translator(), folder / "translator-ctranslate2" / "ctranslate2")
    (folder / "translator-int8").mkdir()
    write_int8(quantise(translator()), folder / "translator-int8")
    return folder


@pytest.fixture(scope="module", params=["int8", "onnx", "ctranslate2"])
def engine_api(request: pytest.FixtureRequest, shipped: Path) -> Iterator[tuple[str, ServedApi, Path]]:
    engine: Any = request.param if request.param != "int8" else "torch"
    paths = [shipped / f"translator-{request.param}"]
    with serving_api(open_served(paths, "cpu", engine, Limits())) as served:  # type: ignore[arg-type]
        yield request.param, served, paths[0]


def test_translations_are_the_engines_own(engine_api: tuple[str, ServedApi, Path]) -> None:
    kind, api, path = engine_api
    asked = {"model": path.name, "text": LINES[:3], "max_tokens": 9}
    answer = httpx.post(f"{api.url}/v1/translate", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    found = [one["text"] for one in answer.json()["translations"]]
    if kind == "ctranslate2":
        assert isinstance(api.scheduler(path.name), EngineScheduler)
        assert [one["score"] for one in answer.json()["translations"]] == [None] * 3  # the engine has none
        assert found == open_engine(path, "ctranslate2").translate(LINES[:3], max_new_tokens=9)
    else:
        engine = open_engine(path, "torch" if kind == "int8" else "onnx")
        assert found == engine.translate(LINES[:3], max_new_tokens=9)


def test_every_engine_shows_attention_and_streams(engine_api: tuple[str, ServedApi, Path]) -> None:
    kind, api, path = engine_api
    body: dict[str, Any] = {"model": path.name, "prompt": TEXT, "max_tokens": 5, "temperature": 0}
    whole = api.client.completions.create(**body)
    streamed = "".join(chunk.choices[0].text for chunk in api.client.completions.create(**body, stream=True))
    assert streamed == whole.choices[0].text
    asked = body | {"attention": {"kind": "cross", "layers": [0]}}
    answer = httpx.post(f"{api.url}/v1/completions", json=asked, timeout=60)
    if kind == "onnx":  # whose graphs were exported without q and k: said before anything is written
        for body in (asked, asked | {"stream": True}):
            answer = httpx.post(f"{api.url}/v1/completions", json=body, timeout=60)
            assert (answer.status_code, "use the torch engine" in answer.text) == (400, True), answer.text
    else:
        assert sum(answer.json()["choices"][0]["attention"]["weights"][0][0][0]) == pytest.approx(1, abs=1e-5)


def test_vectors_are_those_of_the_model_or_refused(tmp_path: Path) -> None:
    """The graphs of a model with a head return logits or nothing in place of its states."""
    models = {"translator": translator(), "speaker": language_model(), "headless": language_model(head="none")}
    for name, model in models.items():
        model.save(tmp_path / name)
        export_onnx(model, tmp_path / name)
    with serving_api(open_served([tmp_path / name for name in models], "cpu", "onnx", Limits())) as api:
        for name, model in models.items():
            answer = httpx.post(f"{api.url}/v1/embeddings", json={"model": name, "input": TEXT}, timeout=60)
            if name == "headless":
                vector = answer.json()["data"][0]["embedding"]
                assert vector == pytest.approx(regard.embed(model, TEXT)[0].tolist(), abs=1e-5)
            else:
                assert (answer.status_code, "use the torch engine" in answer.text) == (400, True), answer.text


def test_what_an_engine_does_not_offer_is_refused_by_name(engine_api: tuple[str, ServedApi, Path]) -> None:
    kind, api, path = engine_api
    body = {"model": path.name, "prompt": TEXT, "max_tokens": 5, "temperature": 0.5}
    answer = httpx.post(f"{api.url}/v1/completions", json=body, timeout=60)
    if kind != "ctranslate2":
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]["message"]
    answer = httpx.post(f"{api.url}/v1/completions", json=body | {"temperature": 0, "logprobs": 1}, timeout=60)
    assert "--engine torch" in answer.json()["error"]["message"]
    stream = {"stream": True, "temperature": 0, "stop": "x"}
    assert httpx.post(f"{api.url}/v1/completions", json=body | stream, timeout=60).status_code == 400


def test_a_batch_that_is_taken_from_the_queue_runs(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In between, the scheduler would seem idle, and a server that ends would not wait for its thread."""
    was_idle = list[bool]()
    with serving_api(open_served([shipped / "translator-ctranslate2"], "cpu", "ctranslate2", Limits())) as api:
        scheduler = api.scheduler("translator-ctranslate2")
        take = scheduler._next_batch

        def take_noting() -> list[TextRequest]:
            if batch := take():
                was_idle.append(scheduler.is_idle)
            return batch  # type: ignore[no-any-return]

        monkeypatch.setattr(scheduler, "_next_batch", take_noting)
        asked = {"model": "translator-ctranslate2", "text": TEXT, "max_tokens": 5}
        assert httpx.post(f"{api.url}/v1/translate", json=asked, timeout=60).status_code == 200
    assert was_idle == [False]


def test_an_engine_follows_the_rules_of_its_model(tmp_path: Path) -> None:
    """More end tokens and forbidden ones are part of every config, and none of the client's options."""
    model = translator(forbidden_ids=(40,), more_eos_ids=(41,))
    model.save(tmp_path / "model")
    export_ctranslate2(model, tmp_path / "model" / "ctranslate2")
    asked = {"model": "model", "text": LINES[:3], "max_tokens": 9}
    with serving_api(open_served([tmp_path / "model"], "cpu", "ctranslate2", Limits())) as api:
        answer = httpx.post(f"{api.url}/v1/translate", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        found = [one["text"] for one in answer.json()["translations"]]
        assert found == open_engine(tmp_path / "model", "ctranslate2").translate(LINES[:3], max_new_tokens=9)
        for option in ({"stop": "x"}, {"logit_bias": {"40": 1.0}}):
            answer = httpx.post(f"{api.url}/v1/translate", json=asked | option, timeout=60)
            assert (answer.status_code, next(iter(option)) in answer.json()["error"]["message"]) == (400, True)


def test_log_probs_of_a_prompt_by_every_engine(tmp_path: Path) -> None:
    """Those of the model from an int8 directory; the others do not return them, and say so."""
    model = language_model()
    body: dict[str, Any] = {"model": "model", "prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    said = {
        "onnx": "an ONNX graph returns no logits inside of a prompt: use --engine torch for them",
        "ctranslate2": "the ctranslate2 engine does not support response_format, stop, logprobs and max_tokens=0; "
        "use --engine torch",
    }
    for kind in ("int8", "onnx", "ctranslate2"):
        (path := tmp_path / kind / "model").mkdir(parents=True)
        if kind == "int8":
            write_int8(quantise(language_model()), path)
        else:
            model.save(path)
            export_onnx(model, path) if kind == "onnx" else export_ctranslate2(model, path / "ctranslate2")
        engine: Any = "torch" if kind == "int8" else kind
        with serving_api(open_served([path], "cpu", engine, Limits())) as api:  # type: ignore[arg-type]
            answer = httpx.post(f"{api.url}/v1/completions", json=body, timeout=60)
            if kind == "int8":
                logs = answer.json()["choices"][0]["logprobs"]
                ids = torch.tensor([model.processor.tokenizer.encode(TEXT, special=False)])  # type: ignore[union-attr]
                with torch.no_grad():
                    exact = api.state.models["model"].model(ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
                assert logs["token_logprobs"][1:] == pytest.approx(exact[:, 0].tolist(), abs=1e-3)
            else:
                assert (answer.status_code, answer.json()["error"]["message"]) == (400, said[kind])
