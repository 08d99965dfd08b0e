"""The command line in Korean: every help text, the first minutes' messages, and nothing that a program reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.cells import cell_len

from generation.spoken import language_model, translator
from regard.cli import EXAMPLES, app, main
from regard.config.overrides import fields_to_dict
from regard.foundation.language import localise
from regard.training.console_display import format_rows

ROOT = Path(__file__).resolve().parents[1]
TABLES: dict[str, dict[str, str]] = tomllib.loads((ROOT / "src/regard/foundation/korean.toml").read_text("utf-8"))
HANGUL = re.compile("[가-힣]")


def help_texts(command: Any) -> Iterator[str]:
    """Every sentence in the help of a command and of those below it, as the sources have it."""
    yield from (" ".join(part.split()) for part in cleandoc(command.help or "").split("\n\n") if part)
    for param in command.params:
        texts = (getattr(param, "help", None), getattr(param, "show_default", None))
        yield from (text for text in texts if isinstance(text, str) and " " in text)  # max_len, fp32: values
    for each in getattr(command, "commands", {}).values():
        yield from help_texts(each)


def text_of_the_sources() -> str:
    """Everything in the sources, with strings in one piece that are written in several lines."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src/regard/cli").glob("*.toml")]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in files))


@pytest.fixture(autouse=True)
def language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_LANG", "ko")


def test_every_help_text_has_a_korean_entry_and_no_entry_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_LANG", "en")
    said = set(help_texts(typer.main.get_command(app)))
    of_typer = {text for text in said if "completion for the current shell" in text}
    assert said - of_typer == set(TABLES["help"])
    assert of_typer <= set(TABLES["program"])
    assert {what_for for rows in EXAMPLES.values() for _, what_for in rows} == set(TABLES["examples"])


def test_every_message_is_one_that_the_sources_say() -> None:
    sources, stale = text_of_the_sources(), []
    for name in ("training", "reports", "data", "doctor", "course", "errors", "advice"):
        for key in TABLES[name]:
            said = key.replace("data.bad_lines=skip", "bad_lines='skip'").removeprefix("tokenising ").removesuffix(" …")
            # Sentences are put together of these.
            parts = (part.strip(" ,;:()=?-") for part in re.split(r"\{\w+\}|[;:,] |  | (?:is|has no|has|are) ", said))
            stale += [
                f"{part!r} of {key!r}"
                for part in parts
                if part not in sources and part.replace(" ", "_") not in sources
            ]
    assert not stale, stale


def test_entries_are_korean_and_fill_in_the_same_things() -> None:
    keys = [key for table in TABLES.values() for key in table]
    assert len(keys) == len(set(keys))
    for table in TABLES.values():
        for english, korean in table.items():
            names, theirs = (re.findall(r"\{(\w*)\}", text) for text in (english, korean))
            assert set(theirs) <= set(names), english
            assert set(names) - set(theirs) <= {"s", "n", "suffix", "kind"}, english
            assert HANGUL.search(korean) or english in ("[dim]# {what_for}[/dim]", "{what} …"), english
            assert "`regard" not in english or "`regard" in korean


@pytest.mark.parametrize("words", [[], ["train"], ["data", "describe"], ["bench"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*words, "--help"]) == 0
    said = capsys.readouterr().out
    assert "사용법: regard" in said
    assert "─ 옵션 ─" in said
    assert "이 도움말을 보여 주고 끝냅니다." in said
    for english in ("Usage", "Options", "Arguments", "Commands", "Examples", "default:", "Show "):
        assert english not in said
    monkeypatch.setenv("REGARD_LANG", "en")
    assert main([*words, "--help"]) == 0
    assert not HANGUL.search(capsys.readouterr().out), "and English again"


@pytest.mark.parametrize("width", [80, 93, 100])
def test_no_word_of_a_help_text_is_cut(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
    for words in ([], ["train"], ["cost"]):
        assert main([*words, "--help"]) == 0
        said = capsys.readouterr().out
        assert not re.search(r"…\s*│$", said, flags=re.MULTILINE)
    assert "원문이 따로 있으면 번역문의 토큰 수." in re.sub(r"\s*│\s*\n│\s*", " ", said)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    translator().save(folder / "translator")
    language_model().save(folder / "runs/lm")
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "pairs.tsv").write_text("one\teins\ntwo\n", encoding="utf-8")
    (folder / "text.txt").write_text("hello\n", encoding="utf-8")
    (folder / "nested.json").write_text('[{"text": {"ko": "가"}}]', encoding="utf-8")
    (folder / "object.json").write_text("{}", encoding="utf-8")
    (folder / "no.parquet").write_text("no", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["trian"], 2, "'trian' 명령은 없습니다. 혹시 'train'인가요?"),
        (["look", "--nohelp"], 2, "--nohelp 옵션은 없습니다. 비슷한 옵션: --help"),
        (["train", "lm", "--steps", "9"], 2, "--steps 옵션은 없습니다. 비슷한 옵션: train.steps=…"),
        (["learn", "2.1"], 2, "'2.1' 명령은 없습니다. 혹시 'start 2.1'인가요?"),
        (["generate", "runs/lm", "hi", "--temperature", "-1"], 2, "--temperature -1.0: 1e-30 이상의 양수여야 합니다"),
        (["translate"], 2, "'MODEL' 인자가 빠졌습니다."),
        (["generate", "runs/lm", "hi", "--beam", "0"], 2, "값이 잘못되었습니다: 1 이상이어야 합니다."),
        (["generate", "runs/lm", "hi", "--beam", "x"], 2, "값이 잘못되었습니다: 정수가 아닙니다."),
        (["generate", "runs/lm", "hi", "--top-p", "x"], 2, "값이 잘못되었습니다: 수가 아닙니다."),
        (["train"], 2, "먼저 과제를 적어 주세요: regard train TASK. 과제: translate, lm"),
        (["train", "translat"], 2, "'translat' 과제는 없습니다. 혹시 translate인가요?"),
        (["train", "lm", "model=gtp2"], 2, "model=gtp2: 그런 모델은 없습니다. 혹시 gpt2인가요?"),
        (["train", "lm", "train.stps=3"], 2, "train.stps: 그런 필드는 없습니다. 혹시 train.steps인가요?"),
        (["train", "lm", "train.lr=fast"], 2, "train.lr=fast: 수가 아닙니다."),
        (["train", "--preset", "shakespear"], 2, "혹시 shakespeare인가요?"),
        (["train", "translate", "pairs.tsv"], 2, "section.field=value 꼴이 아닙니다. 혹시 data=pairs.tsv인가요?"),
        (["train", "translate", "data=pair.tsv"], 2, "pair.tsv 파일이 없습니다. 내장 말뭉치: en-ko, shapes, stdlib"),
        (["train", "translate", "data=pairs.tsv"], 1, "2줄 가운데 1줄이 잘못되었습니다. data.bad_lines=skip을 적으면"),
        (["train", "translate", "data=pairs.tsv"], 1, "pairs.tsv:2: 열이 2개여야 하는데 1개입니다"),
        (["train", "translate", "data=text.txt"], 1, "무엇을 읽었는지 보려면: regard data describe text.txt\n"),
        (["train", "lm", "data=a.png"], 1, "a.png은(는) 글이 아니라 PNG 이미지입니다"),
        (["generate", "runs/lms", "hi"], 3, "'runs/lms' 디렉터리가 없습니다"),
        (["generate", "runs/lms", "hi"], 3, ". 혹시 runs/lm인가요?"),
        (["look", "gpt2", "hi"], 3, "gpt2는 프리셋입니다. 학습: regard train TASK model=gpt2"),
        (
            ["translate", "runs/lm", "hi"],
            1,
            "head='lm')은 글을 번역하는 일을 하지 않습니다. lm 과제의 모델입니다: regard generate runs/lm\n",
        ),
        (
            ["translate", "translator", "--file", "text.txt", "--column", "a"],
            2,
            "--column a: text.txt에는 열이 없습니다. 이름에 따라 표(.csv, .tsv, .jsonl, .ndjson, .parquet)가 아니라 "
            "한 줄에 하나씩 든 글로 읽습니다",
        ),
        (
            ["translate", "translator", "--file", "nested.json"],
            1,
            "nested.json:1: 'text'은(는) 글이 아니라 dict입니다. 읽을 부분을 정해 주세요: --column text.ko",
        ),
        (["translate", "translator", "--file", "object.json"], 1, "object.json에 든 것은 JSON dict입니다. 객체의"),
        (["translate", "translator", "--file", "no.parquet"], 1, "no.parquet을(를) Parquet으로 읽을 수 없습니다: "),
        (["train", "--resume", "translator"], 3, "translator에 run.json이 없어 학습 실행이 아닙니다"),
        (["eval", "translator"], 1, "무엇으로 평가할지 data.source=…로 알려 주세요."),
        (["cost", "gpt2", "--device", "h20"], 2, "'h20' 장치는 없습니다. 혹시 h200인가요?"),
        (["ablate", "haeds"], 2, "'haeds' 절제 실험은 없습니다. 혹시 heads인가요?"),
        (
            ["train", "lm", "data=text.txt", "data.tokenizer=x"],
            1,
            "tokenizer.json, SentencePiece의 .model이어야 합니다.",
        ),
        (
            ["train", "lm", "--config", "no.yaml"],
            2,
            "no.yaml을(를) 읽을 수 없습니다: 그런 파일이나 디렉터리가 없습니다",
        ),
        (["train", "lm", "train.lr=-1"], 2, "train.lr=-1.0: 양수여야 합니다."),
        (["look", "runs/lm", "hi", "--kind", "cross"], 2, "--kind 'cross': 이 모델의 어텐션은 'self'입니다."),
    ],
)
def test_errors(
    here: Path,
    words: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(here)
    assert main(words) == code
    assert message in capsys.readouterr().err


def test_training_data_and_doctor(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model.d_model=8", "model.n_layers=1", "model.n_heads=2", "train.steps=1", "train.compile=off"]
    text = "".join(f"the cat saw {n} dogs\n" for n in range(400))
    Path("book.txt").write_text(text, encoding="utf-8")
    assert main(["train", "lm", "data=book.txt", "data.tokenizer=chars", "train.out=run", *words]) == 0
    said = capsys.readouterr()
    model, held_out, follows = said.out.splitlines()
    assert model.startswith("run/model: 가장 좋은 1스텝의 모델. 1스텝, 0:0")
    assert held_out.startswith("검증: valid loss ")
    assert follows.startswith("다음: regard generate run ")
    for text in ("예시    학습용 1개, 검증용 1개\n", "모델    decoder, 출력층 lm", "저장: checkpoints/step-000001"):
        assert text in said.err
    assert main(["data", "describe", "book.txt"]) == 0
    described = capsys.readouterr().out
    assert "book.txt: 글\n" in described
    assert not re.search("[a-z]{2,} [a-z]{2,}", described.partition("\n예시\n")[0])
    Path("pairs.tsv").write_text("one\t하나\ntwo\nthree\t셋\n", encoding="utf-8")
    assert (
        main(["data", "describe", "pairs.tsv", "data.columns=0,1", "data.bad_lines=skip", "--tokenizer", "none"]) == 0
    )
    described = capsys.readouterr().out
    assert "열의 수가 다름: 1\n    pairs.tsv:2: 열이 2개여야 하는데 1개입니다\n" in described
    assert main(["info", "run/model"]) == 0
    assert "확인함: 모든 파일이 manifest.json과 같음\n기본값과 다른 설정\n" in capsys.readouterr().out
    assert main(["look", "run", "the cat"]) == 0
    assert capsys.readouterr().out.startswith("self 어텐션, 1층 가운데 1층, 헤드 평균\n")
    assert main(["doctor"]) == 0
    assert "\n꼭 필요한 것은 모두 있습니다\n" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["doctor"], ["train", "--list"], ["info", "translator"]])
def test_what_programs_read_is_the_same_in_every_language(
    here: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    said = []
    for language in ("ko", "en"):
        monkeypatch.setenv("REGARD_LANG", language)
        assert main([*words, "--json"]) == 0
        said.append(re.sub(r"\d+ GiB free", "", capsys.readouterr().out))
    assert json.loads(said[0]) == json.loads(said[1])


def test_what_is_not_in_the_catalog_and_what_people_wrote_stays() -> None:
    for text in ("no such sentence", "", "  data", "lost: 3", "step 3/9  loss 0.1", "김 선생님 → Ms. Kim"):
        assert localise(text) == ("  데이터" if text == "  data" else text)
    assert localise("wrote examples") == "저장: examples", "a name is no sentence"
    assert localise("3 rows; 1 blank; wrote x.csv") == "3행; 빈 행 1개; 저장: x.csv"
    for text in ("The density of filled rows", "Name must be at least 5 characters long", "Permission denied"):
        assert localise(text, errors=False) == text, "a report shows it as somebody's text"
    assert localise("3 rows; and a sentence") == "3 rows; and a sentence", "no half of a line"
    assert format_rows([{"source": "data", "output": "x" * 9}], 18)[0] == "  입력  data", (
        "a sample is what people wrote"
    )


@pytest.mark.parametrize(
    ("english", "korean"),
    [
        ("f returns a tensor, where a value of type int is expected.", "텐서를 돌려주는데, int 형의 값이 와야"),
        ("there is no exercise 9.3; regard learn lists them", "연습 문제 9.3은 없습니다"),
        ("there is no exercise 9.2; regard learn lists them", "연습 문제 9.2는 없습니다"),
        ("there is no exercise x; regard learn lists them", "연습 문제 x은(는) 없습니다"),
        ("나무.ipynb is not a notebook", "나무.ipynb은(는) 노트북이"),
        ("'3' is not divisible by 10", "10으로 나누어떨어지지"),
        ("'3' is not divisible by 8", "8로 나누어떨어지지"),
        ("이(가) is not a notebook", "이(가)는 노트북이"),
    ],
)
def test_particles_follow_the_last_sound(english: str, korean: str) -> None:
    assert korean in localise(english)


def test_english_reads_no_catalog() -> None:
    code = (
        "import sys; from regard.cli import main; main(['--version']);"
        "from regard.foundation.language import load_catalog; assert not load_catalog.cache_info().currsize"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src"), "LANG": "C"})


def test_every_field_is_explained_in_korean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--fields"]) == 0
    lines = capsys.readouterr().out.split("\n")
    explained = [line for line in lines if line.startswith("      ") or (line and not line.startswith(" "))]
    assert len(explained) > 150
    assert not [line for line in explained if not HANGUL.search(line)]
    texts = {field["about"] for fields in fields_to_dict().values() for field in fields.values()}
    headings = {line for line in TABLES["fields"] if re.match(r"(data|model|train): ", line)}
    assert set(TABLES["fields"]) - headings == texts, "and nothing stale"


WORDS = {  # names and units, and what a table calls by a preset's, field's or mechanism's name
    *("transformer", "base", "encoder", "decoder", "bf16", "fp32", "TF32", "KV", "MiB", "GiB", "KiB", "adamw", "fused"),
    *("TFLOP", "FLOP", "TB", "GB", "torch", "ns", "ms", "log", "CPU", "sdpa", "window", "linear", "tiled", "elu"),
    *(
        "loss",
        "BLEU",
        "PPL",
        "linformer",
        "performer",
        "fourier",
        "strided",
        "bigbird",
        "reference",
        "additive",
        "sigmoid",
        "h200",
    ),
}


@pytest.mark.parametrize(
    "words",
    [
        ["cost", "transformer-base", "--training"],
        ["cost", "transformer-base", "--compare", "transformer-base"],
        ["bench", "attention", "--lengths", "16,32", "--mechanisms", "sdpa,linformer"],
    ],
)
def test_tables_are_korean_and_aligned(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    said = re.sub(r"\S*(/|\+cpu|\+cu)\S*", "", capsys.readouterr().out)  # without files and torch's version
    assert not set(re.findall(r"[A-Za-z][A-Za-z\d]+", said)) - WORDS
    for block in said.split("\n\n"):
        head, *rest = block.strip("\n").split("\n")
        if rest and rest[0].startswith("─"):
            assert cell_len(head) == cell_len(rest[0])


def test_the_list_of_ablations_is_korean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "--list"]) == 0
    lines = [line for line in capsys.readouterr().out.split("\n") if line and not line.startswith(" ")]
    assert all(HANGUL.search(line) for line in lines)
