"""Continuous batching: what a request gets alone it gets in any company, and the queue keeps its promises."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from generation.spoken import LINES, language_model, translator
from regard.generation.captured_reading import CapturedReading
from regard.generation.decode_step import DecodeStep
from regard.generation.generate import generate, inference
from regard.generation.prompt_reading import PROMPT_PART, PrefixCache, PromptReader, PromptReading
from regard.generation.prompts import pad_prompts, read_inputs
from regard.generation.search_slots import SearchSlots
from regard.generation.slot_engine import BlockDraws, CpuSlots, GraphSlots, Slot
from regard.generation.text_codec import ModelTokenizers, merge_config
from regard.layers.quantised_linear import Int8Linear
from regard.models import Model
from regard.serving.request_queue import QueueFull
from regard.serving.running_text import FailureEvent, SearchEvent, TextEvent, TextRequest, TokenEvent
from regard.serving.scheduler import Scheduler, SchedulerClosed


class Asked:
    """A request and what has come of it."""

    def __init__(self, scheduler: Scheduler, row: list[int], **fields: Any) -> None:
        priority, n_top = fields.pop("priority", 0), fields.pop("n_top", None)
        self._listen = fields.pop("listen", lambda: None)  # called before each event
        config = merge_config(scheduler.model, None, fields)
        inputs = read_inputs(scheduler.model, [row], config)
        self.events: list[TextEvent] = []
        self.over, self._n_left = threading.Event(), 1 if config.beam > 1 else config.n_best
        self.request = TextRequest(
            scheduler.new_reading(inputs, config), config, self._hear, priority=priority, n_top=n_top
        )
        scheduler.submit(self.request)

    def _hear(self, event: TextEvent) -> None:
        self._listen()
        self.events.append(event)
        self._n_left -= not isinstance(event, TokenEvent) or event.finish is not None
        if isinstance(event, FailureEvent) or self._n_left == 0:
            self.over.set()

    def wait(self) -> Asked:
        assert self.over.wait(60)
        failures = [event.error for event in self.events if isinstance(event, FailureEvent)]
        if failures:
            raise failures[0]
        return self

    def tokens(self, copy: int = 0) -> list[int]:
        if isinstance(self.wait().events[-1], SearchEvent):
            return self.events[-1].hypotheses[0].tokens  # type: ignore[union-attr]
        chosen = [event for event in self.events if isinstance(event, TokenEvent) and event.copy == copy]
        return [token for event in chosen for token in event.tokens]


@pytest.fixture
def schedule() -> Iterator[Callable[..., Scheduler]]:
    opened: list[Scheduler] = []

    def start(model: Model, **options: Any) -> Scheduler:
        opened.append(Scheduler(model, **options))
        return opened[-1]

    yield start
    for scheduler in opened:
        scheduler.close()


def rows_of(model: Model) -> list[list[int]]:
    return ModelTokenizers(model).encode_inputs(LINES)


def int8(model: Model) -> Model:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Linear:
                setattr(module, name, Int8Linear.of(child))
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "decoder": lambda: language_model(max_len=400),
    "rope": lambda: language_model(kind="chars", n_kv_heads=2, positions="rope"),
    "translator": translator,
    "int8": lambda: int8(translator()),
    "one by one": lambda: language_model(positions="alibi"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_text_does_not_depend_on_its_neighbours(name: str, schedule: Callable[..., Scheduler]) -> None:
    """Bit for bit: tokens and log P of every text, alone and among others that come, go, draw and search."""
    model = MODELS[name]()
    rows, limit = rows_of(model), 12
    alone = schedule(model)
    wanted = [Asked(alone, row, max_new_tokens=limit, n_top=1).wait() for row in rows]
    searched = [Asked(alone, row, max_new_tokens=limit, beam=3).tokens() for row in rows]
    crowd = schedule(model, max_rows=12)
    hostile = [Asked(crowd, row, max_new_tokens=40, temperature=3.0, n_best=2, seed=1) for row in rows[:2]]
    found = [Asked(crowd, row, max_new_tokens=limit, n_top=1) for row in rows]
    beams = [Asked(crowd, row, max_new_tokens=limit, beam=3) for row in rows]
    hostile += [Asked(crowd, row[:1], max_new_tokens=3, beam=2) for row in rows]
    for one, other in zip(wanted, found, strict=True):
        assert other.wait().events == one.events
    assert [asked.tokens() for asked in beams] == searched
    for asked in hostile:
        asked.wait()


@pytest.mark.parametrize("name", ["decoder", "translator", "one by one"])
def test_texts_are_those_of_generate(name: str, schedule: Callable[..., Scheduler]) -> None:
    model = MODELS[name]()
    scheduler, rows = schedule(model), rows_of(model)
    ways: list[dict[str, Any]] = [
        {"max_new_tokens": 9},
        {"max_new_tokens": 9, "beam": 4, "length_penalty": 0.6},
        {"max_new_tokens": 12, "beam": 4, "early_stopping": True, "logit_bias": {9: -2.0}},
        {"max_new_tokens": 9, "beam": 4, "repetition_penalty": 1.3},
        {"max_new_tokens": 9, "temperature": 0.9, "top_p": 0.8, "seed": 7},
        {"max_new_tokens": 9, "repetition_penalty": 1.3, "min_new_tokens": 4},
    ]
    asked = [[Asked(scheduler, row, **way) for row in rows] for way in ways]
    for way, own in zip(ways, asked, strict=True):
        wanted = [texts[0].tokens for texts in generate(model, rows, **way).hypotheses]
        assert [one.tokens() for one in own] == wanted, way


@pytest.mark.parametrize("name", ["decoder", "rope", "translator"])
@pytest.mark.parametrize("beam", [1, 3])
def test_captured_slots_write_what_generate_writes(name: str, beam: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a GPU, here without a capture: texts of different lengths that join and leave."""
    monkeypatch.setattr("regard.serving.text_batches.open_slots", GraphSlots)
    model = MODELS[name]()
    scheduler, rows = Scheduler(model, max_rows=4 * beam), rows_of(model)
    limits = [3, 9, 20, 5, 12, 7]
    asked = [Asked(scheduler, row, max_new_tokens=n, beam=beam) for row, n in zip(rows, limits, strict=True)]
    for own, row, n in zip(asked, rows, limits, strict=True):
        assert own.tokens() == generate(model, [row], max_new_tokens=n, beam=beam).hypotheses[0][0].tokens
    assert isinstance(scheduler.batches.slots[beam], GraphSlots)
    scheduler.close()


SEARCHES: list[dict[str, Any]] = [
    {"beam": 3},
    {"beam": 3, "length_penalty": 0.6, "early_stopping": True},
    {"beam": 3, "logit_bias": {9: -2.0}},
    {"beam": 4, "n_best": 2, "groups": 2, "diversity_penalty": 0.5},
]


@pytest.mark.parametrize("name", ["decoder", "rope", "translator"])
@pytest.mark.parametrize("fields", SEARCHES, ids=["plain", "early", "biased", "groups"])
def test_captured_searches_find_what_generate_finds(
    name: str, fields: dict[str, Any], schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The searches of a GPU, here without a capture: more of them than slots, each with its own length."""
    monkeypatch.setattr("regard.serving.text_batches.can_capture_slots", lambda model: True)
    model = MODELS[name]()
    scheduler, rows = schedule(model, max_rows=4 * fields["beam"]), 2 * rows_of(model)
    limits = [3, 9, 20, 5, 12, 7, 1, 8]
    pairs = list(zip(rows, limits, strict=False))
    asked = [Asked(scheduler, row, max_new_tokens=n, **fields) for row, n in pairs]
    for own, (row, n) in zip(asked, pairs, strict=True):
        wanted = generate(model, [row], max_new_tokens=n, **fields).hypotheses[0]
        event = own.wait().events[-1]
        assert isinstance(event, SearchEvent)
        assert [text.tokens for text in event.hypotheses] == [text.tokens for text in wanted]
        assert [text.finish for text in event.hypotheses] == [text.finish for text in wanted]
        assert [text.score for text in event.hypotheses] == pytest.approx([text.score for text in wanted], rel=1e-5)
    assert [type(slots) for slots in scheduler.batches.slots.values()] == [SearchSlots]


def test_searches_of_more_configs_than_are_captured(
    schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each config has captures of its own; where there are too many, the batch of a width searches step by step."""
    monkeypatch.setattr("regard.serving.text_batches.can_capture_slots", lambda model: True)
    model = translator()
    scheduler, row = schedule(model, max_rows=24), rows_of(model)[0]
    ways = [{"beam": 3, "length_penalty": 0.1 * n} for n in range(4)]
    for _ in range(2):
        asked = [Asked(scheduler, row, max_new_tokens=9, **way) for way in ways]
        for way, own in zip(ways, asked, strict=True):
            assert own.tokens() == generate(model, [row], max_new_tokens=9, **way).hypotheses[0][0].tokens
        assert sum(isinstance(slots, SearchSlots) for slots in scheduler.batches.slots.values()) == 2


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of a GPU, here without a capture."""
    monkeypatch.setattr("regard.serving.text_batches.can_capture_slots", lambda model: True)
    monkeypatch.setattr("regard.serving.text_batches.open_slots", GraphSlots)


@pytest.mark.usefixtures("captures")
def test_a_config_that_recurs_replaces_one_that_is_not_in_use(
    schedule: Callable[..., Scheduler],
) -> None:
    """And the keys of the batch that goes are freed before the next one is captured."""
    model = translator()
    scheduler, row = schedule(model, max_rows=6), rows_of(model)[0]
    slots = scheduler.batches.slots

    def captured_after(penalty: float) -> list[float]:
        Asked(scheduler, row, max_new_tokens=3, beam=2, length_penalty=penalty).wait()
        return [each.rules.config.length_penalty for each in slots.values() if isinstance(each, SearchSlots)]

    assert captured_after(0.1) == [0.1]
    (first,) = slots.values()
    assert isinstance(first, SearchSlots)
    keys = weakref.ref(first._decoder.keys.data)
    del first
    assert captured_after(0.2) == [0.1, 0.2]
    assert captured_after(0.3) == [0.1, 0.2]
    assert captured_after(0.3) == [0.2, 0.3]
    assert keys() is None


@pytest.mark.usefixtures("captures")
def test_captures_of_widths_that_are_not_in_use_are_few(schedule: Callable[..., Scheduler]) -> None:
    model = language_model(max_len=64)
    scheduler, row = schedule(model, max_rows=8), rows_of(model)[0]
    for beam in (2, 3, 4, 5):
        Asked(scheduler, row, max_new_tokens=3, beam=beam, repetition_penalty=1.3).wait()
    Asked(scheduler, row, max_new_tokens=3).wait()
    assert list(scheduler.batches.slots) == [4, 5, 1]


@pytest.mark.usefixtures("captures")
def test_searches_that_cannot_be_captured_are_decoded_step_by_step(
    schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias without an end token makes the filters read from the device; other captures may fail for any reason."""
    model = language_model(max_len=64, eos_id=None)
    scheduler, row = schedule(model, max_rows=8), rows_of(model)[0]
    ways: list[dict[str, Any]] = [{"beam": 3, "logit_bias": {9: -2.0}}, {"beam": 3}]

    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(SearchSlots, "_capture", fail)
    for way, n_warnings in zip(ways, (0, 1), strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                wanted = generate(model, [row], max_new_tokens=5, **way).hypotheses[0][0].tokens
                assert Asked(scheduler, row, max_new_tokens=5, **way).tokens() == wanted
        assert sum("step by step: operation not permitted" in str(each.message) for each in caught) == n_warnings


@pytest.mark.usefixtures("captures")
def test_searches_that_cannot_begin_fail_alone(
    schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    model = language_model(max_len=400)
    scheduler, row, gate = schedule(model, max_rows=8), rows_of(model)[0], threading.Event()
    scheduler.run(gate.wait)
    other = Asked(scheduler, row, max_new_tokens=60)
    monkeypatch.setattr(SearchSlots, "begin", fail)
    search = Asked(scheduler, row, max_new_tokens=5, beam=3)
    gate.set()
    with pytest.raises(MemoryError, match="no room"):
        search.wait()
    assert other.tokens() == generate(model, [row], max_new_tokens=60).hypotheses[0][0].tokens


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(
    "fields", [{"max_new_tokens": 1}, {"max_new_tokens": 5, "beam": 3}], ids=["one token", "beams"]
)
def test_slots_that_are_free_hold_no_request(fields: dict[str, Any], schedule: Callable[..., Scheduler]) -> None:
    """Except for those of the last block, until the next one."""
    model = language_model(max_len=64)
    scheduler, row = schedule(model, max_rows=8), rows_of(model)[0]
    requests = [weakref.ref(Asked(scheduler, row, **fields).wait().request) for _ in range(6)]
    while not scheduler.is_idle:
        time.sleep(0.001)
    gc.collect()
    assert sum(request() is not None for request in requests) <= 1


def test_captured_searches_count_the_steps_that_others_count(
    schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counts = language_model(max_len=64), []
    for captures in (False, True):
        monkeypatch.setattr("regard.serving.text_batches.can_capture_slots", lambda model, captures=captures: captures)
        scheduler = schedule(model)
        for row, n in zip(rows_of(model), (1, 3, 9, 20), strict=False):
            Asked(scheduler, row, max_new_tokens=n, beam=3).wait()
        counts.append(scheduler.statistics.written_tokens)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("captures", [False, True], ids=["step by step", "captured"])
def test_a_search_that_finds_no_text_fails(
    captures: bool, schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client would wait forever."""
    monkeypatch.setattr("regard.serving.text_batches.can_capture_slots", lambda model: captures)
    model = language_model(max_len=64)
    n_tokens = model.config.vocab_size
    for kind, name in ((CpuSlots, "decode"), (DecodeStep, "logits")):
        monkeypatch.setattr(kind, name, lambda *_: torch.full((3, n_tokens), torch.nan))
    scheduler = schedule(model, max_rows=3)
    with pytest.raises(ValueError, match="no text; the model's logits are not finite"):
        Asked(scheduler, rows_of(model)[0], max_new_tokens=5, beam=3).wait()


@pytest.mark.parametrize("slots", [CpuSlots, GraphSlots])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9, "seed": 1}, {"repetition_penalty": 1.3}, {"n_top": 1}])
def test_nan_logits_fail_their_text_alone(
    slots: Any, fields: dict[str, Any], schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks as well as step by step: one position is NaN, which only the longer text reaches."""
    monkeypatch.setattr("regard.serving.text_batches.open_slots", slots)
    model, gate = language_model(max_len=64), threading.Event()
    with torch.no_grad():
        model.embeddings.position.weight[20] = torch.nan  # type: ignore[union-attr, index]
    scheduler = schedule(model)
    wanted = Asked(scheduler, [5, 6], max_new_tokens=10, **fields).tokens()
    scheduler.run(gate.wait)
    short, long = (Asked(scheduler, row, max_new_tokens=10, **fields) for row in ([5, 6], [5] * 19))
    gate.set()
    with pytest.raises(ValueError, match="logits are NaN"):
        long.wait()
    assert short.tokens() == wanted
    again = [Asked(scheduler, [5, 6], max_new_tokens=10, **fields) for _ in range(2)]  # where there was NaN
    assert [each.tokens() for each in again] == [wanted, wanted]


def test_a_request_that_is_too_wide_is_told_how_many_run(schedule: Callable[..., Scheduler]) -> None:
    model = language_model()
    scheduler, row = schedule(model, max_rows=8), rows_of(model)[0]
    for fields in ({"beam": 9}, {"n_best": 9, "temperature": 1.0}):
        with pytest.raises(ValueError, match="needs 9 texts or beams at once; this server runs 8"):
            Asked(scheduler, row, **fields)


def test_a_block_divides_by_the_temperature_as_a_single_step_does() -> None:
    """On a GPU, by a float32 number: torch multiplies by the inverse of that number."""
    slots = GraphSlots(language_model(max_len=64), 1, 2)
    for temperature in (0.3, 0.7, 0.9, 1.1, 1.3, 1.7):
        slots._set_draws({Slot(1, slots): BlockDraws(temperature, [0.5])})
        assert slots._inverse.tolist() == [0.0, 1 / torch.tensor(temperature)]


@pytest.mark.parametrize("name", ["decoder", "rope", "translator"])
def test_the_captured_pass_reads_what_the_plain_one_reads(name: str) -> None:
    """Logits and keys of prompts and sources, twice: nothing is left of the texts of the pass before."""
    model = MODELS[name]()
    config = merge_config(model, None, {"max_new_tokens": 5})

    def read(reader: PromptReader, rows: list[list[int]]) -> list[PromptReading]:
        readings = [PromptReading(model, read_inputs(model, [row], config), config) for row in rows]
        assert not reader.read(readings)
        return readings

    with inference(model):
        plain, captured = PromptReader(model), PromptReader(model)
        captured.captures = True
        for rows in (rows_of(model), rows_of(model)[::-1][:2]):
            for one, other in zip(read(plain, rows), read(captured, rows), strict=True):
                torch.testing.assert_close(other.logits, one.logits, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(other.keys(), one.keys(), rtol=1e-5, atol=1e-5)
                if not model.is_decoder_only:
                    torch.testing.assert_close(other.memory(), one.memory(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"positions": "alibi"}, {"window": 16}, {"mixer": "mamba2"}])
def test_log_p_of_a_prompt_whatever_else_is_read(fields: dict[str, Any], schedule: Callable[..., Scheduler]) -> None:
    """That of the model's own pass, few logits at a time; in rows, with the same bits after a prompt that it shares."""
    model = language_model(**{"max_len": 400, **fields})
    rows, most = [[5, 6, 7] * 100, [5, 6, 7] * 100 + [8], [9] * 20], 0
    config = merge_config(model, None, {"max_new_tokens": 2})
    scheduler = schedule(model)

    def count(_: Any, inputs: tuple[torch.Tensor], __: Any) -> None:
        nonlocal most
        most = max(most, inputs[0].shape[:-1].numel())

    def readings() -> list[PromptReading]:
        return [scheduler.new_reading(read_inputs(model, [row], config), config, n_top=2) for row in rows]

    model.head.register_forward_hook(count)  # type: ignore[union-attr]
    with inference(model):
        reader, together, alone = PromptReader(model), readings(), readings()
        while unread := [each for each in together if not each.is_read]:
            assert not reader.read(unread)
        for reading in alone:
            while not reading.is_read:
                assert not reader.read([reading])
        assert most <= 64
        for row, one, other in zip(rows, together, alone, strict=True):
            exact = model(torch.tensor([row])).log_softmax(-1)[0, :-1]
            own, best = exact.gather(1, torch.tensor(row[1:])[:, None])[:, 0], exact.topk(2)
            assert one.log_probs == other.log_probs
            assert one.log_probs[0].value is None
            assert [each.value for each in one.log_probs[1:]] == pytest.approx(own.tolist(), abs=1e-4)
            tops = [value for each in one.log_probs[1:] for _, value in each.top]
            assert tops == pytest.approx(best.values.flatten().tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["decoder", "translator"])
def test_a_reading_is_made_without_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a request thread would wait for them, until the device has computed all that it was given."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a tensor was made")

    model = MODELS[name]()
    config = merge_config(model, None, {"max_new_tokens": 30, "truncate": True})
    inputs = read_inputs(model, [[5, 6] * 250], config)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", fail)
        reading = PromptReading(model, inputs, config)
    wanted = pad_prompts(
        inputs.rows, model.config, config, model.device, "target" if name == "translator" else "prompt"
    )
    assert (reading.row, reading.limit) == (wanted.rows[0], int(wanted.limit))
    assert torch.equal(reading.prompts.tokens, wanted.tokens)
    assert torch.equal(reading.prompts.limit, wanted.limit)
    assert (len(reading.row) == 400 - 30) == (name == "decoder")


def test_texts_drawn_in_blocks_are_those_of_generate(
    schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By temperature alone, greedy ones among them, and whether or not they were decoded step by step in between."""
    monkeypatch.setattr("regard.serving.text_batches.open_slots", GraphSlots)
    model = language_model(max_len=400)
    scheduler, rows = schedule(model, max_rows=8), rows_of(model)
    ways: list[dict[str, Any]] = [
        {"max_new_tokens": 50, "temperature": 0.9, "seed": 3},
        {"max_new_tokens": 33},
        {"max_new_tokens": 21, "sample": True, "seed": 5, "n_best": 2},
        {"max_new_tokens": 7, "temperature": 1.2, "top_k": 5, "seed": 4},
    ]
    for row in rows[:3]:
        asked = [Asked(scheduler, row, **way) for way in ways]
        for way, own in zip(ways, asked, strict=True):
            texts = [text.tokens for text in generate(model, [row], **way).hypotheses[0]]
            assert own.tokens() in texts, way
    sizes = [len(event.tokens) for event in asked[0].events if isinstance(event, TokenEvent)]
    assert max(sizes) > 1


def test_texts_in_blocks_and_texts_that_choose_take_turns(
    schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy texts are decoded in blocks until one with filters joins, and again when it has left."""
    monkeypatch.setattr("regard.serving.text_batches.open_slots", GraphSlots)
    model = language_model(max_len=400)
    scheduler, rows = schedule(model, max_rows=8), rows_of(model)
    ways: list[dict[str, Any]] = [
        {"max_new_tokens": 60, "logit_bias": {}},
        {"max_new_tokens": 20, "temperature": 0.9, "seed": 3},
        {"max_new_tokens": 9, "repetition_penalty": 1.3},
        {"max_new_tokens": 45},
    ]
    for row in rows[:2]:
        asked = [Asked(scheduler, row, **way) for way in ways]
        for way, own in zip(ways, asked, strict=True):
            assert own.tokens() == generate(model, [row], **way).hypotheses[0][0].tokens, way
    sizes = [len(event.tokens) for event in asked[0].events if isinstance(event, TokenEvent)]
    assert max(sizes) > 1


@pytest.mark.usefixtures("captures")
def test_blocks_leave_out_the_tokens_that_a_model_forbids(schedule: Callable[..., Scheduler]) -> None:
    """As published Marian models do. Texts with a bias of their own are decoded step by step."""
    model = language_model(max_len=400)
    row = rows_of(model)[0]
    usual = generate(model, [row], max_new_tokens=30).hypotheses[0][0].tokens
    model.config = model.config.with_(forbidden_ids=tuple(sorted(set(usual))[:3]))
    scheduler = schedule(model, max_rows=8)
    ways: list[dict[str, Any]] = [
        {"max_new_tokens": 40},
        {"max_new_tokens": 40, "temperature": 1.1, "seed": 3},
        {"max_new_tokens": 30, "logit_bias": {usual[-1]: -3.0}},
    ]
    for some in ways[:1], ways[:2], ways[2:]:
        asked = [Asked(scheduler, row, **way) for way in some]
        for way, own in zip(some, asked, strict=True):
            config = merge_config(model, None, way)
            assert own.tokens() == generate(model, [row], config).hypotheses[0][0].tokens, way
            assert not {*model.config.forbidden_ids} & {*own.tokens()}
        sizes = [len(event.tokens) for event in asked[0].events if isinstance(event, TokenEvent)]
        assert (max(sizes) > 1) == (some != ways[2:])


def test_a_seed_draws_the_same_text_in_any_company(schedule: Callable[..., Scheduler]) -> None:
    model = language_model()
    scheduler, row = schedule(model), rows_of(model)[0]
    fields: dict[str, Any] = {"max_new_tokens": 10, "temperature": 1.5, "seed": 11, "n_best": 3}
    first = Asked(scheduler, row, **fields).wait()
    others = [Asked(scheduler, row, max_new_tokens=15, temperature=2.0) for _ in range(4)]
    again = Asked(scheduler, row, **fields).wait()
    assert [first.tokens(n) for n in range(3)] == [again.tokens(n) for n in range(3)]
    assert len({tuple(first.tokens(n)) for n in range(3)}) == 3
    for other in others:
        other.wait()


def test_a_long_prompt_is_read_in_parts_and_its_beginning_only_once(schedule: Callable[..., Scheduler]) -> None:
    model = language_model(max_len=400)
    scheduler = schedule(model)
    prompt = (rows_of(model)[0] * 100)[: 2 * PROMPT_PART + 40]
    wanted = generate(model, [prompt], max_new_tokens=8).hypotheses[0][0].tokens
    first, second = (Asked(scheduler, prompt, max_new_tokens=8, n_top=1).wait() for _ in range(2))
    assert first.tokens() == wanted
    assert second.events == first.events  # the same bits
    assert scheduler.statistics.prefix_tokens == 2 * PROMPT_PART


def test_prompts_that_wait_are_read_in_one_pass(schedule: Callable[..., Scheduler]) -> None:
    """Bit for bit what each gives alone, parts of long ones among them; and a long one does not hold up the others."""
    model = language_model(max_len=800)
    short = rows_of(model)
    rows = [(short[0] * 200)[: 4 * PROMPT_PART + 9], *short, (short[1] * 200)[: PROMPT_PART + 1]]
    alone = [Asked(schedule(model), row, max_new_tokens=3, n_top=1).wait().events for row in rows]
    scheduler, gate, passes = schedule(model), threading.Event(), list[int]()
    assert scheduler._reader is not None
    start = scheduler._reader.start

    def count(readings: Sequence[PromptReading]) -> Any:
        if readings:
            passes.append(len(readings))
        return start(readings)

    scheduler._reader.start = count  # type: ignore[method-assign]
    scheduler.run(gate.wait)
    asked = [Asked(scheduler, row, max_new_tokens=3, n_top=1) for row in rows]
    gate.set()
    assert [one.wait().events for one in asked] == alone
    assert passes[0] > len(short) / 2
    assert len(passes) <= 6
    first = [one.request.started for one in asked]
    assert max(first[1:-1]) <= min(first[0], first[-1])  # type: ignore[type-var]


def test_the_prompts_of_a_round_keep_to_the_budget(schedule: Callable[..., Scheduler]) -> None:
    """On a GPU, one prompt more would need a second pass."""
    scheduler, gate, passes = schedule(language_model(max_len=800)), threading.Event(), list[int]()
    assert scheduler._reader is not None
    start = scheduler._reader.start

    def count(readings: Sequence[PromptReading]) -> Any:
        passes.append(sum(reading.n_next_tokens for reading in readings))
        return start(readings)

    scheduler._reader.start = count  # type: ignore[method-assign]
    scheduler.run(gate.wait)
    asked = [Asked(scheduler, [5] * n, max_new_tokens=1) for n in (100, 100, 100, 300, 120)]
    gate.set()
    for one in asked:
        one.wait()
    assert max(passes) <= scheduler._prompt_tokens
    assert sum(passes) == 720


@pytest.mark.usefixtures("captures")
def test_a_gpu_decodes_while_texts_start(schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is started between a pass over prompts and the texts that follow it, which the host starts meanwhile."""
    model, calls, second = language_model(max_len=400), list[str](), list[Asked]()
    scheduler = schedule(model)
    assert scheduler._reader is not None
    for kind, name in ((GraphSlots, "start_block"), (GraphSlots, "join"), (CapturedReading, "start")):
        plain = getattr(kind, name)
        noted = lambda *x, plain=plain, kind=kind, name=name: (calls.append(f"{kind.__name__}.{name}"), plain(*x))[1]  # noqa: E731
        monkeypatch.setattr(kind, name, noted)
    scheduler._reader.captures = True

    def ask_again() -> None:
        """Called by the scheduler's thread, so that the first text is still running."""
        if not second and len(calls) > 3:
            second.append(Asked(scheduler, [6, 7], max_new_tokens=60))

    running = Asked(scheduler, [5, 6], max_new_tokens=60, listen=ask_again)
    assert running.tokens() == generate(model, [[5, 6]], max_new_tokens=60).tokens[0]
    assert second[0].tokens() == generate(model, [[6, 7]], max_new_tokens=60).tokens[0]
    last = len(calls) - calls[::-1].index("CapturedReading.start")
    assert calls[last : last + 2] == ["GraphSlots.start_block", "GraphSlots.join"]


def test_nan_after_one_prompt_of_a_captured_pass_fails_it_alone() -> None:
    model = language_model(max_len=64)
    with torch.no_grad():
        model.embeddings.position.weight[20] = torch.nan  # type: ignore[union-attr, index]
    config = merge_config(model, None, {"max_new_tokens": 5})
    with inference(model):
        reader = PromptReader(model)
        reader.captures = True
        short, long = (PromptReading(model, read_inputs(model, [row], config), config) for row in ([5, 6], [5] * 30))
        errors = reader.read([short, long])
    assert list(errors) == [long]
    assert "NaN" in str(errors[long])
    assert short.is_read


class NoWaiting(TorchDispatchMode):
    """Refuses what a GPU does at once only when it has done everything before: here, copies of single numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.copy_.default or args[0].dim()
        return func(*args, **(kwargs or {}))


def test_searches_begin_without_waiting_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would wait for a list that it copies to the device, and with it for the block that runs."""
    model, tensor = translator(), torch.tensor
    config = merge_config(model, None, {"beam": 3, "max_new_tokens": 5})

    def without_device(*args: Any, **fields: Any) -> torch.Tensor:
        assert "device" not in fields
        return tensor(*args, **fields)

    with inference(model):
        slots = SearchSlots(model, config, 2)
        reading = PromptReading(model, read_inputs(model, [rows_of(model)[0]], config), config)
        assert not PromptReader(model).read([reading])
        assert reading.logits is not None
        monkeypatch.setattr(torch, "tensor", without_device)
        with NoWaiting():
            slot = slots.join(reading)
            slots.begin([slot], [reading], reading.logits)
            slots.leave(slot)


def test_slots_in_half_precision_have_the_weights_of_the_head() -> None:
    """They are padded where the vocabulary is no multiple of 128; prompts are not read by the step itself here."""
    model = language_model(max_len=64).to(torch.bfloat16)
    config = merge_config(model, None, {"max_new_tokens": 5})
    with inference(model):
        slots, reading = GraphSlots(model, 1, 64), PromptReading(model, read_inputs(model, [[5, 6]], config), config)
        assert not PromptReader(model).read([reading])
        slots.join(reading)
        logits = slots.decode(torch.tensor([7]))
        torch.testing.assert_close(logits, model(torch.tensor([[5, 6, 7]]))[:, -1].float(), rtol=0.05, atol=0.05)
        assert slots._decoder.step.wide_head is not None


def test_one_transfer_a_step_however_many_texts(
    schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy texts and of those drawn with one config, the tokens of a step are read from the device together."""
    model, reads = language_model(max_len=400), list[str]()
    for name in ("tolist", "item", "__int__", "__float__", "__bool__"):
        plain = getattr(torch.Tensor, name)
        count = lambda x, plain=plain, name=name: (reads.append(name), plain(x))[1]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, count)
    scheduler, gate = schedule(model), threading.Event()
    scheduler.run(gate.wait)
    fields = {"max_new_tokens": 30, "logit_bias": {model.config.eos_id: -1e4}}
    drawn = [Asked(scheduler, [5, 6], temperature=1.0, seed=n, **fields) for n in range(4)]
    greedy = [Asked(scheduler, [5, 6], **fields) for _ in range(8)]
    reads.clear()
    gate.set()
    for asked in (*drawn, *greedy):
        asked.wait()
    steps = scheduler.statistics.steps
    # Three for the tokens (of all, the drawn, the biased), others for checks of ids on a CPU: not 12 and more.
    assert len(reads) <= 6 * steps + 20, (len(reads), steps)


def test_running_texts_go_on_while_a_long_prompt_is_read(schedule: Callable[..., Scheduler]) -> None:
    model = language_model(max_len=2000)
    scheduler = schedule(model)
    scheduler._prompt_tokens = PROMPT_PART
    order: list[str] = []
    fields = {"max_new_tokens": 60, "min_new_tokens": 60}
    running = Asked(scheduler, rows_of(model)[0], listen=lambda: order.append("running"), **fields)
    prompt = (rows_of(model)[1] * 200)[: 8 * PROMPT_PART]
    long = Asked(scheduler, prompt, listen=lambda: order.append("long"), max_new_tokens=1)
    long.wait()
    running.wait()
    assert order[: order.index("long")].count("running") >= 7  # one step at least between two parts


def test_priority_goes_first_and_waiting_counts(schedule: Callable[..., Scheduler]) -> None:
    model = language_model()
    scheduler, row = schedule(model, max_rows=1), rows_of(model)[0]
    gate = threading.Event()
    held = scheduler.run(gate.wait)
    order: list[str] = []
    asked = []
    for name, priority in (("first", 0), ("second", 0), ("urgent", 1)):
        listen = lambda name=name: order.append(name)  # noqa: E731
        asked.append(Asked(scheduler, row, max_new_tokens=2, priority=priority, listen=listen))
    gate.set()
    assert held.result(10)
    for one in asked:
        one.wait()
    assert list(dict.fromkeys(order)) == ["urgent", "first", "second"]


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(schedule: Callable[..., Scheduler]) -> None:
    model = language_model()
    scheduler, row = schedule(model, max_waiting=2), rows_of(model)[0]
    gate = threading.Event()
    scheduler.run(gate.wait)
    waiting = [Asked(scheduler, row, max_new_tokens=2) for _ in range(2)]
    with pytest.raises(QueueFull) as refused:
        Asked(scheduler, row)
    assert refused.value.retry_seconds >= 1
    gate.set()
    for asked in waiting:
        asked.wait()
    assert scheduler.statistics.refused == 1


def test_what_is_cancelled_leaves_within_a_step(schedule: Callable[..., Scheduler]) -> None:
    model = language_model(max_len=4000)
    scheduler, row = schedule(model, max_rows=2), rows_of(model)[0]
    endless = [Asked(scheduler, row, max_new_tokens=3900, min_new_tokens=3900) for _ in range(4)]
    while scheduler.statistics.written_tokens < 6:
        time.sleep(0.001)
    for asked in endless:
        asked.request.cancel()
    scheduler.wake()
    before = scheduler.statistics.steps
    while not scheduler.is_idle:
        time.sleep(0.001)
    assert scheduler.statistics.steps - before <= 2
    assert scheduler.statistics.cancelled == 4
    assert Asked(scheduler, row, max_new_tokens=3).tokens()  # the slots are free again


def test_who_is_idle_has_freed_and_counted_everything(
    schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language_model()
    scheduler, row, was_idle = schedule(model), rows_of(model)[0], list[bool]()
    leave = scheduler.batches.leave
    monkeypatch.setattr(
        scheduler.batches, "leave", lambda request: (was_idle.append(scheduler.is_idle), leave(request))
    )
    Asked(scheduler, row, max_new_tokens=3).wait()
    while not scheduler.is_idle:
        time.sleep(0.001)
    assert was_idle == [False]
    assert scheduler.statistics.finished == 1
    assert not scheduler.run(lambda: scheduler.is_idle).result(60)  # nor while it does other work


def test_one_request_that_fails_leaves_the_others_alone(schedule: Callable[..., Scheduler]) -> None:
    model = language_model()
    scheduler, rows = schedule(model), rows_of(model)
    wanted = Asked(scheduler, rows[1], max_new_tokens=8).tokens()

    class Broken:
        is_finished = False

        def forbid(self, logits: torch.Tensor) -> torch.Tensor:
            raise ValueError("a grammar that is wrong")

        def accept(self, token: int) -> None: ...

    config = merge_config(model, None, {"max_new_tokens": 8})
    heard: list[TextEvent] = []
    reading = scheduler.new_reading(read_inputs(model, [rows[0]], config), config)
    scheduler.submit(TextRequest(reading, config, heard.append, new_constraint=Broken))
    assert Asked(scheduler, rows[1], max_new_tokens=8).tokens() == wanted
    assert isinstance(heard[0], FailureEvent)


def wait_for_close(scheduler: Scheduler) -> None:
    """Work that lasts until somebody closes the scheduler."""
    while not scheduler._closing:
        time.sleep(0.001)


def test_a_closed_scheduler_takes_nothing_and_ends_what_waits() -> None:
    model = language_model()
    scheduler, row = Scheduler(model), rows_of(model)[0]
    scheduler.run(lambda: wait_for_close(scheduler))
    waiting = Asked(scheduler, row)
    scheduler.close(60)
    with pytest.raises(SchedulerClosed):
        waiting.wait()
    with pytest.raises(SchedulerClosed):
        Asked(scheduler, row)


def test_other_work_that_waits_is_refused_when_the_scheduler_closes() -> None:
    scheduler = Scheduler(language_model())
    scheduler.run(lambda: wait_for_close(scheduler))
    waiting = scheduler.run(lambda: 1)
    scheduler.close(60)
    with pytest.raises(SchedulerClosed):
        waiting.result(10)
    assert scheduler.is_idle


@pytest.mark.parametrize(("name", "beam"), [("decode", 1), ("decode", 3), ("select_all", 3), ("_write", 1)])
def test_a_fault_ends_what_runs_and_not_the_thread(
    name: str, beam: int, schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was foreseen (a batch that cannot be decoded) or not; who comes after is served."""
    model = language_model()
    scheduler, row = schedule(model), rows_of(model)[0]
    wanted = Asked(scheduler, row, max_new_tokens=8, beam=beam).tokens()
    slots = scheduler.batches.slots[beam]

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(slots, name, fail)
        gate = threading.Event()
        scheduler.run(gate.wait)
        failing = [Asked(scheduler, row, max_new_tokens=8, beam=beam) for _ in range(3)]
        gate.set()  # they run together: the batch after the one that failed is a new one
        for asked in failing:
            with pytest.raises(MemoryError, match="no room"):
                asked.wait()
    assert scheduler.statistics.failed == 3
    assert Asked(scheduler, row, max_new_tokens=8, beam=beam).tokens() == wanted
    while not scheduler.is_idle:
        time.sleep(0.001)
    assert scheduler.batches.n_rows == 0


def test_a_panic_in_rust_ends_what_runs_and_not_the_thread(
    schedule: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic, for example of a tokenizer, is no ``Exception``."""

    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic("index out of bounds")

    model = language_model()
    scheduler, row = schedule(model), rows_of(model)[0]
    wanted = Asked(scheduler, row, max_new_tokens=4).tokens()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.batches, "step", panic)
        with pytest.raises(RuntimeError, match="index out of bounds"):
            Asked(scheduler, row, max_new_tokens=4).wait()
    assert Asked(scheduler, row, max_new_tokens=4).tokens() == wanted


def test_what_clients_may_make_up_is_not_kept(schedule: Callable[..., Scheduler]) -> None:
    """Searches of ever new configs, among them some that are cancelled."""
    model = language_model()
    scheduler, row = schedule(model), rows_of(model)[0]
    for number in range(6):
        asked = Asked(scheduler, row, max_new_tokens=30, beam=2, length_penalty=number / 7)
        asked.request.cancel() if number % 2 else asked.wait()
    while not scheduler.is_idle:
        time.sleep(0.001)
    assert not scheduler.batches._searches


def test_prompts_of_one_body_take_turns_with_other_clients(schedule: Callable[..., Scheduler]) -> None:
    model = language_model()
    scheduler, row, gate = schedule(model, max_rows=1), rows_of(model)[0], threading.Event()
    scheduler.run(gate.wait)
    scheduler._mean_seconds, order = 10.0, list[str]()
    config = merge_config(model, None, {"max_new_tokens": 2})

    def request(name: str) -> TextRequest:
        reading = scheduler.new_reading(read_inputs(model, [row], config), config)
        return TextRequest(reading, config, lambda _: order.append(name))

    scheduler.submit(*(request(f"many {number}") for number in range(4)))
    last = Asked(scheduler, row, max_new_tokens=2, priority=-100)
    scheduler.submit(request("one"))
    gate.set()
    last.wait()
    assert list(dict.fromkeys(order)) == ["many 0", "one", "many 1", "many 2", "many 3"]


def test_a_long_prompt_is_kept_at_the_cost_of_its_length() -> None:
    """Each part once, whichever prompts begin with it; the least recently used go first."""
    keys = torch.randn(2, 2, 1, 6 * PROMPT_PART, 4)
    cache = PrefixCache(max_bytes=keys.nbytes)
    first, other = list(range(6 * PROMPT_PART)), [7] * (3 * PROMPT_PART)
    cache.keep(first, keys)
    cache.keep(first, keys)
    assert sum(len(tokens) for _, tokens in cache._parts) == len(first)
    found = cache.find([*first, 1])
    assert found is not None
    assert torch.equal(found, keys)
    part = cache.find([*first[: 2 * PROMPT_PART], 1])
    assert part is not None
    assert torch.equal(part, keys[:, :, :, : 2 * PROMPT_PART])
    assert cache.find([*first[PROMPT_PART:], 1]) is None  # the same tokens at another place
    cache.keep(other, keys[:, :, :, : 3 * PROMPT_PART])
    assert cache.find([*other, 1]) is not None
    assert cache._n_bytes <= keys.nbytes


def test_of_a_prompt_longer_than_the_cache_the_beginning_is_kept() -> None:
    """Without it the rest could not be found."""
    keys = torch.randn(2, 2, 1, 6 * PROMPT_PART, 4)
    cache, row = PrefixCache(max_bytes=keys.nbytes // 2), list(range(6 * PROMPT_PART))
    cache.keep(row, keys)
    found = cache.find([*row, 1])
    assert found is not None
    assert torch.equal(found, keys[:, :, :, : 3 * PROMPT_PART])
    cache.keep([7] * PROMPT_PART, keys[:, :, :, :PROMPT_PART])
    found = cache.find([*row, 1])
    assert found is not None
    assert torch.equal(found, keys[:, :, :, : 2 * PROMPT_PART])
