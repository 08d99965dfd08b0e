"""The page that trains: its gradients are torch's, it learns in time, and settings have the effect it speaks of."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.cli import main
from regard.web.watch_page import serve_watch_page, watch_files

SIZES = {"d_model": 16, "d_ff": 24, "vocab_size": 11, "max_len": 9}
BATCH, LENGTH, STEPS = 3, 7, 4
TARGET_LOSS, SECONDS = 0.2, 60  # the mean of ten batches; a guess among 26 letters costs 3.26
TRAIN = """async ([config, weights, ids, targets, batch, steps, lr]) => {
  const { Transformer } = await import("./transformer.js"), { Adam, Tape } = await import("./engine.js");
  const model = new Transformer(config), names = Object.keys(model.parameters), losses = [];
  if (names.sort().join() !== Object.keys(weights).sort().join()) throw new Error(`the page has ${names}`);
  for (const [name, { data }] of Object.entries(model.parameters)) data.set(weights[name]);
  const attention = model.forward(new Tape(), ids, batch).weights.map(({ data }) => [...data]);
  const adam = new Adam(Object.values(model.parameters), { lr });
  let gradients = null;
  const all = (of) => Object.fromEntries(Object.entries(model.parameters).map(([name, p]) => [name, [...p[of]]]));
  for (let n = 0; n < steps; n++) {
    losses.push(model.loss(ids, targets, batch));
    gradients ??= all("grad");
    adam.step();
  }
  return { attention, losses, gradients, weights: all("data") };
}"""

COUNT_TIMERS = """import "./worker.js";
const pending = new Set(), wait = setTimeout, stop = clearTimeout;
self.setTimeout = (work) => { const id = wait(() => { pending.delete(id); work(); }); pending.add(id); return id; };
self.clearTimeout = (id) => { pending.delete(id); stop(id); };
addEventListener("message", () => postMessage({ pending: pending.size }));"""
START_TWICE = """async () => {
  const { DEFAULTS: settings } = await import("./training.js"), seen = [];
  const worker = new Worker("./count_timers.js", { type: "module" });
  const orders = [{ do: "start", settings }, { do: "play" }, { do: "start", settings }, { do: "play" }];
  const all = new Promise((done) => worker.addEventListener("message", ({ data }) => {
    if (data.pending !== undefined && seen.push(data.pending) === orders.length) done();
  }));
  for (const order of orders) worker.postMessage(order);
  await all;
  worker.terminate();
  return seen;
}"""


@pytest.fixture(scope="module")
def home() -> str:
    """The page as `regard learn watch` serves it."""
    said: list[str] = []
    threading.Thread(target=serve_watch_page, kwargs={"say": said.append}, daemon=True).start()
    while not said:
        time.sleep(0.01)
    return said[0].split()[1]


@pytest.fixture
def watching(browser: Any, home: str) -> Iterator[Any]:
    """A page of its own: anything it complains of, and any request to another host, fails the test."""
    page = browser.new_page(viewport={"width": 1440, "height": 900}, locale="en-US")
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: request.url.startswith(home) or complaints.append(request.url))
    yield page
    page.close()
    assert complaints == []


def test_a_run_that_is_started_anew_leaves_no_second_loop(watching: Any, home: str) -> None:
    watching.route("**/count_timers.js", lambda route: route.fulfill(body=COUNT_TIMERS, content_type="text/javascript"))
    watching.goto(home)
    assert max(watching.evaluate(START_TWICE)) == 1


def test_settings_keep_the_keyboard(watching: Any, home: str) -> None:
    watching.goto(home)
    watching.focus('[data-name="n_heads"] [aria-checked="true"]')
    before = watching.evaluate("() => document.activeElement.dataset.value")
    watching.keyboard.press("ArrowRight")
    after = watching.evaluate("() => document.activeElement.dataset.value ?? null")
    assert after not in (before, None)
    assert watching.get_attribute('[data-name="n_heads"] [aria-checked="true"]', "data-value") == after


def near(found: list[float], expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found).view_as(expected), expected.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changed",
    [
        {"n_layers": 2, "n_heads": 2, "positions": "learned"},
        {"n_layers": 1, "n_heads": 4, "positions": "sinusoidal", "scaled": False},
        {"n_layers": 1, "n_heads": 1, "positions": "none", "causal": False},
    ],
    ids=["two layers", "without scale", "without mask"],
)
def test_losses_gradients_and_steps_are_torchs(watching: Any, home: str, changed: dict[str, Any]) -> None:
    config = {**SIZES, "causal": True, "scaled": True, **changed}
    fields = {name: value for name, value in config.items() if name != "scaled"}
    torch.manual_seed(1)
    scale = None if config["scaled"] else 1.0
    model = regard.build("gpt2", **fields, attention_scale=scale, activation="relu", init_std=0.3, pad_id=0)
    parameters = dict(model.named_parameters())
    ids, targets = torch.randint(1, 11, (BATCH, LENGTH)), torch.randint(0, 11, (BATCH, LENGTH))
    targets[:, :3] = -1
    weights = {name: p.flatten().tolist() for name, p in parameters.items()}
    watching.goto(home)
    sent = [config, weights, ids.flatten().tolist(), targets.flatten().tolist(), BATCH, STEPS, 0.01]
    found = watching.evaluate(TRAIN, sent)

    adam = torch.optim.Adam(parameters.values(), lr=0.01, betas=(0.9, 0.98), eps=1e-8)
    for n in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-1)
        loss.backward()
        assert found["losses"][n] == pytest.approx(loss.item(), abs=1e-4)
        if n == 0:
            for name, p in parameters.items():
                assert p.grad is not None
                near(found["gradients"][name], p.grad)
            look = regard.look(model, ids[0].tolist())
            near(found["attention"][0][: LENGTH * LENGTH], look.weights(layer=0, head=0))
        adam.step()
        adam.zero_grad()
    for name, p in parameters.items():
        moved, expected = found["weights"][name], p
        if name.endswith(
            "w_qkv.bias"
        ):  # a bias of all keys shifts a whole row of scores: its gradient is rounding alone
            keys = slice(SIZES["d_model"], 2 * SIZES["d_model"])
            del moved[keys]
            expected = torch.cat([p[: keys.start], p[keys.stop :]])
        near(moved, expected)


def figure(page: Any, name: str) -> float:
    text = page.inner_text(f'[data-figure="{name}"] dd')
    return float(text.rstrip("%").replace("–", "nan"))


def play_until_learned(page: Any) -> float:
    """Seconds until the loss is below the value stated."""
    begun = time.monotonic()
    page.click('[data-do="play"]')
    learned = f"() => Number(document.querySelector('[data-figure=loss] dd')?.textContent) < {TARGET_LOSS}"
    page.wait_for_function(learned, timeout=1000 * SECONDS)
    page.click('[data-do="play"]')
    page.wait_for_function("() => document.querySelector('[data-do=play]')?.textContent.match(/Play|시작/)")
    return time.monotonic() - begun


def test_it_learns_within_a_minute_and_without_the_mask_it_cannot_write(watching: Any, home: str) -> None:
    watching.goto(f"{home}#lang=en&theme=light")
    watching.wait_for_function("() => document.querySelector('.saw')?.innerText.includes('nothing yet')")
    assert play_until_learned(watching) < SECONDS
    assert figure(watching, "accuracy") > 90
    assert "regard→drager" in watching.inner_text(".written-letters").replace(" ", "")
    assert re.search(r"learned\..* Layer 1, head [12] has \d", watching.inner_text(".saw"))
    watching.click('[data-do="play"]')
    watching.wait_for_function("() => document.querySelector('[data-do=play]').disabled", timeout=1000 * SECONDS)
    assert figure(watching, "nth") == 2000, "there is nothing left to play"
    with_mask = watching.inner_text(".maps")
    watching.uncheck('[name="causal"]')
    assert "causal=0" in watching.url
    watching.wait_for_function("() => document.querySelector('[data-figure=nth] dd')?.textContent === '0'")
    play_until_learned(watching)
    assert figure(watching, "accuracy") < 50
    assert "it has learned to look ahead" in watching.inner_text(".saw")
    assert "The previous run was at" in watching.inner_text(".saw")
    assert watching.inner_text(".maps") != with_mask


def test_steps_seeds_words_keys_and_both_languages(watching: Any, home: str) -> None:
    watching.goto(f"{home}#lang=ko&theme=dark&n_layers=2&n_heads=4&word=attend")
    watching.wait_for_selector("figure >> nth=7")
    assert watching.evaluate("() => document.documentElement.dataset.theme") == "dark"
    assert "attend→" in watching.inner_text(".written-letters").replace(" ", "")
    watching.click('[data-do="step"]')
    watching.wait_for_function("() => document.querySelector('[data-figure=nth] dd')?.textContent === '1'")
    loss = figure(watching, "loss")
    assert loss > 2
    watching.evaluate("() => document.activeElement.blur()")
    watching.keyboard.press("r")
    watching.wait_for_function("() => document.querySelector('[data-figure=nth] dd')?.textContent === '0'")
    watching.keyboard.press("s")
    watching.wait_for_function("() => document.querySelector('[data-figure=nth] dd')?.textContent === '1'")
    assert figure(watching, "loss") == loss  # the same seed, the same numbers
    watching.fill('[name="seed"]', "7")
    watching.press('[name="seed"]', "Tab")
    watching.wait_for_function("() => document.querySelector('[data-figure=nth] dd')?.textContent === '0'")
    assert "seed=7" in watching.url
    watching.click('[data-do="step"]')
    watching.wait_for_function("() => document.querySelector('[data-figure=nth] dd')?.textContent === '1'")
    assert figure(watching, "loss") != loss
    watching.fill('[name="word"]', "four")
    watching.press('[name="word"]', "Tab")
    assert watching.get_attribute('[name="word"]', "aria-invalid") == "true"
    assert watching.eval_on_selector('[name="word"]', "(input) => input.validationMessage") == "영문 소문자 6자"
    assert "배우는 모습" in watching.title()
    watching.click('[data-do="language"]')
    assert "watch it learn" in watching.title()
    watching.click('[data-name="task"] [data-value="repeat"]')
    assert "induction" in watching.inner_text(".lines")
    watching.click('[data-name="n_layers"] [data-value="1"]')
    assert "with one layer" in watching.inner_text(".lines")


def test_the_folder_has_all_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "watch", "--out", str(tmp_path / "page")]) == 0
    assert "index.html" in capsys.readouterr().out
    there = {file.name: file.read_bytes() for file in (tmp_path / "page").iterdir()}
    assert there == watch_files()
    assert {"index.html", "watch.js", "worker.js", "engine.js", "style.css", "icon.svg"} <= set(there)
    for name, content in there.items():
        linked = re.findall(r"""(?:from |import |URL\(|href=|src=)"([^"]+\.(?:js|css|svg))\"""", content.decode())
        assert {link.removeprefix("./") for link in linked} <= set(there), name
