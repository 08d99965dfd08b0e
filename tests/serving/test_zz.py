import torch, pytest
from generation.spoken import LINES, language_model, translator
from regard.generation.generate import generate, inference
from regard.generation.prompt_reading import PromptReader, PromptReading
from regard.generation.prompts import read_inputs
from regard.generation.text_codec import ModelTokenizers, merge_config
@pytest.mark.parametrize("make", [lambda: language_model(max_len=400), lambda: language_model(kind="chars", n_kv_heads=2, positions="rope"), translator])
def test_cap(make):
    model = make()
    rows = ModelTokenizers(model).encode_inputs(LINES)
    config = merge_config(model, None, {"max_new_tokens": 5})
    def readings():
        return [PromptReading(model, read_inputs(model, [r], config), config) for r in rows]
    with inference(model):
        reader = PromptReader(model)
        a = readings(); assert not reader.read(a)
        assert reader._captured is None; del reader._captured
        reader.captures = True
        for _ in range(2):
            b = readings(); assert not reader.read(b)
            for x, y in zip(a, b):
                torch.testing.assert_close(x.logits, y.logits, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(x.keys(), y.keys(), rtol=1e-5, atol=1e-5)
                if y._memory is not None: torch.testing.assert_close(x.memory(), y.memory(), rtol=1e-5, atol=1e-5)

from regard.generation.search_slots import SearchSlots
from regard.serving.scheduler import Scheduler
from serving.test_batching import MODELS, Asked, rows_of
@pytest.mark.parametrize("name", ["decoder", "rope", "translator"])
@pytest.mark.parametrize("fields", [{}, {"length_penalty": 0.6, "early_stopping": True}, {"logit_bias": {9: -2.0}}, {"beam": 4, "n_best": 2, "groups": 2, "diversity_penalty": 0.5}])
def test_searches(name, fields, monkeypatch):
    monkeypatch.setattr("regard.serving.text_batches.can_capture_slots", lambda model: True)
    model = MODELS[name]()
    fields = {"beam": 3, **fields}
    scheduler, rows = Scheduler(model, max_rows=4 * fields["beam"]), rows_of(model)
    limits = [3, 9, 20, 5, 12, 7, 1]
    asked = [Asked(scheduler, row, max_new_tokens=n, **fields) for row, n in zip(rows*2, limits)]
    for own, row, n in zip(asked, rows*2, limits):
        want = generate(model, [row], max_new_tokens=n, **fields).hypotheses[0]
        own.wait()
        got = own.events[-1].hypotheses
        assert [x.tokens for x in got] == [x.tokens for x in want]
        assert [x.finish for x in got] == [x.finish for x in want]
        assert [x.score for x in got] == pytest.approx([x.score for x in want], rel=1e-5)
    assert any(isinstance(slots, SearchSlots) for slots in scheduler.batches.slots.values())
    scheduler.close()
