"""Small models behind the API, on a real port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from openai import OpenAI

from generation.spoken import captioner, classifier, image_classifier, language_model, translator
from regard.models import Model
from regard.serving import create_api
from regard.serving.serve_config import OperationsConfig
from regard.text.chat import PLAIN
from regard.web.requests import Limits
from regard.web.server import server_config

TEXT = "the cat sat on the mat."


def small_models() -> dict[str, Model]:
    """One of each kind of task; ``chatty`` has a chat template, ``recurrent`` decodes every text by itself."""
    chatty = language_model(seed=1, max_len=400)
    assert chatty.processor is not None
    chatty.processor = replace(chatty.processor, chat_template=PLAIN)
    return {
        "speaker": language_model(max_len=400),
        "chatty": chatty,
        "grouped": language_model(kind="chars", n_kv_heads=2, positions="rope"),
        "translator": translator(),
        "recurrent": translator("bahdanau-gru"),
        "captioner": captioner(),
        "classifier": classifier(),
        "images": image_classifier(),
        "encoder": made_encoder(),
    }


def made_encoder() -> Model:
    from generation.spoken import LINES, made
    from regard.text.processor import Processor
    from regard.text.tokenizer_training import train_tokenizer

    tokenizer = train_tokenizer(LINES, "bpe", 300, "bos-eos")
    return made("bert-base", Processor(source=tokenizer), head="masked-lm", vocab_size=tokenizer.size)


@contextmanager
def serving_api(models: dict[str, Model], limits: Limits | None = None, **options: Any) -> Iterator[ServedApi]:
    """The API at an address of its own, while the block runs."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    app: Any = create_api(models, limits, **options)
    config = server_config(app, limits or Limits(), OperationsConfig().drain_seconds)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.02)
    try:
        yield ServedApi(f"http://127.0.0.1:{listening.getsockname()[1]}", app.app.state.serving, server, thread)
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()


class ServedApi:
    """A running API: its address, the official client, and what is inside."""

    def __init__(self, url: str, state: Any, server: Any, thread: threading.Thread) -> None:
        self.url, self.state, self.server, self.thread = url, state, server, thread
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def scheduler(self, model: str) -> Any:
        return self.state.models[model].scheduler
