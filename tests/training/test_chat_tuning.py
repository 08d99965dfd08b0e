"""Supervised fine-tuning: chats from files, the loss on answers alone, chat templates, and answers at the end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import cli
from regard.data.packing import IGNORE
from regard.data.sources import open_source
from regard.errors import BadData, UsageError
from regard.recipes import run_config
from regard.text.chat import PLAIN, ChatTemplate
from regard.text.tokenizer_training import train_tokenizer
from regard.training.loss import batch_loss
from regard.training.run_directory import RunDirectory
from regard.training.tasks import open_task

from .runs import NUMBERS, ZAHLEN, assert_same, metrics
from .test_initial_model import hf_directory

TINY = (
    *("model.d_model=32", "model.n_heads=2", "model.d_ff=64", "model.n_layers=2", "data.max_len=48"),
    *(
        "data.tokenizer=words",
        "data.valid_fraction=0.2",
        "train.precision=fp32",
        "train.compile=off",
        "train.samples=0",
    ),
    *("train.batch_tokens=256", "train.log_every=5", "train.device=cpu", "train.eval_every=0"),
)
# As Qwen's: a turn in marks of its own, whose end is not the tokenizer's <eos>.
CHATML = (
    "{%- for message in messages %}{{ '<s>' + message.role + '\n' + message.content + '</s>' + '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def words(*more: str) -> list[str]:
    """Those of a small run, later ones in the place of earlier ones."""
    return list({word.partition("=")[0]: word for word in (*TINY, *more)}.values())


def questions(n: int = 60) -> list[tuple[str, str]]:
    """Which German word is meant; thirteen different answers."""
    return [(f"what is {NUMBERS[k % 13]} number {k} ?", f"it is {ZAHLEN[k % 13]} .") for k in range(n)]


def write_chats(file: Path, n: int = 60) -> Path:
    lines = [json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in questions(n)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def tune(out: Path, data: Path, *more: str) -> list[dict[str, Any]]:
    assert cli.main(["train", "sft", "--quiet", f"data={data}", f"train.out={out}", *words(*more)]) == 0
    return metrics(out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    tune(folder / "run", write_chats(folder / "chats.jsonl", 156), "train.steps=100", "train.eval_every=50")
    return folder / "run"


# ------------------------------------------------------------------------------------- what files hold

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "one and one?"},
    {"role": "assistant", "content": "two"},
]
RECORDS = [
    ({"prompt": "a ?", "completion": "b"}, [("user", "a ?"), ("assistant", "b")]),
    ({"prompt": "a ?", "answer": "b"}, [("user", "a ?"), ("assistant", "b")]),
    ({"instruction": "do", "input": "", "output": "done"}, [("user", "do"), ("assistant", "done")]),
    ({"instruction": "do", "input": "this", "output": "done"}, [("user", "do\n\nthis"), ("assistant", "done")]),
    ({"instruction": "do", "output": "done"}, [("user", "do"), ("assistant", "done")]),
    ({"messages": MESSAGES}, [(x["role"], x["content"]) for x in MESSAGES]),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
     [("user", "q"), ("assistant", "a")]),
]  # fmt: skip


@pytest.mark.parametrize(("record", "messages"), RECORDS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_chats_are_read_as_people_write_them(record: Any, messages: Any, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"chats{suffix}"
    file.write_text(json.dumps([record]) if suffix == ".json" else json.dumps(record), encoding="utf-8")
    config = run_config("sft", [f"data={file}", "data.valid_fraction=0"])
    assert list(open_source(config.data).train[0].messages) == messages


@pytest.mark.parametrize(("suffix", "text"), [(".tsv", "a ?\tyes\n"), (".csv", "question,answer\na ?,yes\n")])
def test_tables_of_two_columns_are_chats_whatever_stands_in_them(suffix: str, text: str, tmp_path: Path) -> None:
    """A few different answers look like classes; the task says that they are not."""
    file = tmp_path / f"chats{suffix}"
    rows = text if suffix == ".csv" else text * 8
    file.write_text(rows, encoding="utf-8")
    source = open_source(run_config("sft", [f"data={file}", "data.valid_fraction=0"]).data)
    assert source.train[0].messages == (("user", "a ?"), ("assistant", "yes"))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": MESSAGES[:2]}, "no answer of the assistant"),
        ({"messages": MESSAGES[2:3]}, "nothing before the answer"),
        ({"messages": [{"role": "user"}]}, "not a text"),
        ({"messages": [{"role": "user", "content": " "}, *MESSAGES[2:3]]}, "empty"),
    ],
)
def test_bad_chats_are_named_by_their_lines(record: Any, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": MESSAGES}) + "\n" + json.dumps(record) + "\n", encoding="utf-8")
    with pytest.raises(BadData, match=rf"chats.jsonl:2: {reason}"):
        open_source(run_config("sft", [f"data={file}"]).data)


def test_data_describe_shows_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "describe", str(write_chats(tmp_path / "chats.jsonl"))]) == 0
    shown = capsys.readouterr().out
    assert "chats.jsonl: chats" in shown
    assert "what is zero number 0 ? → it is null ." in shown


# ------------------------------------------------------------------------------------- templates and masks


def test_only_answers_have_a_loss(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": MESSAGES}) + "\n", encoding="utf-8")
    typed = words("data.valid_fraction=0", "data.tokenizer=bytes", "data.max_len=99")
    config = run_config("sft", [f"data={file}", *typed])
    task = open_task(config, open_source(config.data))
    batch, tokenizer = task.batch(0), task.tokenizer
    tokens, targets = batch.inputs[0][0], batch.targets[0]
    wanted = targets[targets != IGNORE].tolist()
    assert wanted == [*tokenizer.encode("hi"), tokenizer.eos_id, *tokenizer.encode("two"), tokenizer.eos_id]
    places = (targets != IGNORE).nonzero()[:, 0].tolist()
    assert tokens[[place + 1 for place in places[:-1]]].tolist() == wanted[:-1], (
        "the next token, where it is an answer's"
    )
    assert batch.n_targets == 2 + 1 + 3 + 1
    model = regard.build(task.model_config)
    model.eval()
    changed = tokens.clone()
    changed[places[-1] + 1 :] = 9  # what is read after the last answer changes nothing
    with torch.no_grad():
        one = batch_loss(model, batch)
        other = batch_loss(model, type(batch)((changed[None],), batch.targets))
    assert torch.allclose(one, other, atol=1e-4)


def test_a_prompt_is_encoded_as_it_stood_in_training() -> None:
    tokenizer = train_tokenizer(["hello"], "bytes", None, "none")
    chat, messages = ChatTemplate(PLAIN, tokenizer), [(x["role"], x["content"]) for x in MESSAGES]
    for n in (2, 4):
        asked, whole = chat.encode_prompt(messages[:n]), chat.encode(messages[: n + 1])
        assert whole.ids[: len(asked)] == asked
        assert whole.is_answer[len(asked) :] == [True] * (len(whole.ids) - len(asked))
    typed = chat.encode([("user", "\ue001<eos>"), ("assistant", "x")])
    assert typed.ids.count(tokenizer.eos_id) == 2, "the marks of special tokens cannot be typed"


def test_a_template_runs_in_a_sandbox() -> None:
    tokenizer = train_tokenizer(["hello"], "bytes", None, "none")
    for evil in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no system') }}"):
        with pytest.raises(BadData, match="chat template rejects"):
            ChatTemplate(evil, tokenizer).encode_prompt([("user", "hello")])


def test_the_templates_of_transformers_give_its_tokens(tmp_path: Path) -> None:
    """The tokenizer's own template, token for token as ``apply_chat_template`` has it."""
    from transformers import AutoTokenizer

    directory = hf_directory("llama", tmp_path / "theirs")
    fields = {**json.loads((directory / "tokenizer_config.json").read_bytes()), "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    chat = regard.load(directory).processor.chat
    theirs = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    pairs = [(x["role"], x["content"]) for x in messages]
    for n, ask in ((1, True), (2, False)):
        text = theirs.apply_chat_template(messages[:n], tokenize=False, add_generation_prompt=ask)
        assert chat.render(pairs[:n], ask=ask) == text
    asked = theirs.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert chat.encode_prompt(pairs[:1]) == list(asked)


def test_the_template_of_a_file_is_kept_for_those_who_open_the_model(run: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}", encoding="utf-8")
    data = write_chats(tmp_path / "chats.jsonl")
    tune(tmp_path / "mine", data, "train.steps=1", f"data.chat_template={template}", f"train.init={run}")
    assert regard.load(tmp_path / "mine").processor.chat_template == template.read_text(encoding="utf-8")
    assert (tmp_path / "mine/model/chat_template.jinja").exists()
    assert regard.load(run).processor.chat_template == PLAIN
    template.unlink()
    assert regard.evaluate(tmp_path / "mine").metrics["loss"] > 0, "a run needs the file no longer"
    assert regard.resume(tmp_path / "mine", steps=2, style="quiet").steps == 2
    with pytest.raises(UsageError, match=r"chat_template=.*mine\.jinja"):
        regard.evaluate(tmp_path / "mine", {"chat_template": str(template)})
    config = run_config("sft", [f"data={data}", *words("data.chat_template=nowhere")])
    with pytest.raises(UsageError, match="chat_template=nowhere"):
        open_task(config, open_source(config.data))


# ------------------------------------------------------------------------------------- a run


def test_a_model_learns_to_answer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((run / "evaluation.json").read_bytes())
    assert result["metrics"]["exact"] > 0.8, result["metrics"]
    assert result["metrics"]["chrf"] > 80
    assert result["metrics"]["perplexity"] == pytest.approx(math.exp(result["metrics"]["valid_loss"]))
    assert result["next_command"].startswith(f"regard generate {run} 'what is")
    assert cli.main(["generate", str(run), "what is three number 29 ?", "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out.strip() == "it is drei ."
    assert cli.main(["generate", str(run), "what is three number 29 ?", "--raw", "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out.strip() != "it is drei ."


def test_python_takes_messages(run: Path) -> None:
    model = regard.load(run)
    messages = [{"role": "user", "content": "what is five number 31 ?"}]
    one = regard.generate(model, messages, max_new_tokens=9)
    several = regard.generate(model, [messages, messages], max_new_tokens=9)
    assert [x.strip() for x in (*one, *several)] == ["it is fünf ."] * 3
    assert "".join(regard.stream(model, messages, max_new_tokens=9)).strip() == "it is fünf ."
    with pytest.raises(ValueError, match="role and a content"):
        regard.generate(model, [{"role": "user"}])


def test_eval_reports_answers(run: Path, tmp_path: Path) -> None:
    report = regard.evaluate(run, limit=8)
    assert {"loss", "perplexity", "chrf", "exact"} <= set(report.metrics)
    assert report.rows[0].target.startswith("it is")
    base = regard.evaluate(hf_directory("gpt2", tmp_path / "x"), {"source": str(run.parent / "chats.jsonl")}, limit=4)
    assert (base.task, base.splits[0].n) == ("sft", 4), "a language model before it learned to answer"
    against = regard.evaluate(run, against=f"{run}@50", limit=8)
    assert {x.metric for x in against.splits[0].comparisons} == {"exact match", "chrF", "loss"}


def test_a_language_model_becomes_one_that_answers_and_goes_on(tmp_path: Path) -> None:
    """train.init brings weights and tokenizer; a stopped run goes on bit for bit."""
    init, data = hf_directory("gpt2", tmp_path / "theirs"), write_chats(tmp_path / "chats.jsonl")
    asked = words("data.max_len=16", "data.too_long=truncate", "train.steps=4", f"train.init={init}", f"data={data}")
    asked = [word for word in asked if not word.startswith(("model.", "data.tokenizer"))]
    assert cli.main(["train", "sft", "--quiet", *asked, f"train.out={tmp_path / 'whole'}"]) == 0
    assert cli.main(["train", "sft", "--quiet", *asked, f"train.out={tmp_path / 'parts'}", "train.stop_at=2"]) == 0
    assert cli.main(["train", "--quiet", "--resume", str(tmp_path / "parts")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "parts")
    run = RunDirectory.open(tmp_path / "whole")
    assert json.loads((run.root / "started.json").read_bytes())["new"] == {}
    assert run.processor.chat_template == PLAIN


def test_chats_that_are_all_too_long_say_so(tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl")
    config = run_config("sft", [f"data={data}", *words("data.max_len=4")])
    with pytest.raises(ValueError, match=r"every chat has more than data.max_len=4 tokens.*too_long=truncate"):
        open_task(config, open_source(config.data)).batch(0)


def test_system_needs_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(hf_directory("gpt2", tmp_path / "x")), "one", "--system", "be brief"]) == 2
    assert "this model has none" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no chat template"):
        regard.generate(regard.load(tmp_path / "x"), [{"role": "user", "content": "one"}])


def test_texts_are_no_chats(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one two three\n" * 9, encoding="utf-8")
    config = run_config("sft", [f"data={tmp_path / 'book.txt'}"])
    with pytest.raises((ValueError, UsageError), match="learns from chats"):
        open_task(config, open_source(config.data))
