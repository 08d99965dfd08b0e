"""`regard generate`, `translate`, `classify`, `caption`: what comes out, and what bad input ends in."""

from __future__ import annotations

import io
import json
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import regard
from generation.spoken import captioner, classifier, image_classifier, language_model, made, picture, translator
from regard import cli
from regard.models import Model

Said = pytest.CaptureFixture[str]
LINES = ["the cat sat", "", "a dog ran, and the cat ran too.", "   ", "고양이가", "a"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of model, saved."""
    folder = tmp_path_factory.mktemp("models")
    kinds: dict[str, Model] = {
        "speaker": language_model(),
        "translator": translator(),
        "captioner": captioner(),
        "classifier": classifier(),
        "images": image_classifier(),
        "mute": made("gpt2", None, vocab_size=30),
    }
    return {name: model.save(folder / name) for name, model in kinds.items()}


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def into(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return into


def run(*words: Any) -> int:
    return cli.main([str(word) for word in words])


def told(capsys: Said, *words: Any) -> str:
    assert run(*words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def document(capsys: Said, *words: Any) -> dict[str, Any]:
    return json.loads(told(capsys, *words, "--json"))


# ---- generate


def test_generate_writes_what_follows(models: dict[str, Path], capsys: Said) -> None:
    path = models["speaker"]
    made = regard.generate(path, "ROMEO:", max_new_tokens=8)
    assert told(capsys, "generate", path, "ROMEO:", "--max-new-tokens", 8) == f"{made[0]}\n"
    assert told(capsys, "generate", path, "ROMEO:", "--max-new-tokens", 8, "--echo") == f"ROMEO:{made[0]}\n"


def test_generate_from_a_file_or_a_pipe(
    models: dict[str, Path], tmp_path: Path, capsys: Said, pipe: Callable[[bytes], None]
) -> None:
    path, file = models["speaker"], tmp_path / "prompt.txt"
    file.write_text("the cat\nsat on\n", encoding="utf-8")
    whole = regard.generate(path, "the cat\nsat on", max_new_tokens=5)[0]
    assert told(capsys, "generate", path, "--file", file, "--max-new-tokens", 5) == f"{whole}\n"
    pipe(file.read_bytes())
    assert told(capsys, "generate", path, "--max-new-tokens", 5) == f"{whole}\n"
    each = regard.generate(path, ["the cat", "sat on"], max_new_tokens=5)
    assert told(capsys, "generate", path, "--file", file, "--lines", "--max-new-tokens", 5) == "".join(
        f"{text}\n" for text in each
    )
    for name, encoding in (("utf-16", "auto"), ("cp949", "auto"), ("latin-1", "latin-1")):
        text = "é" if name == "latin-1" else "한국어 문장입니다"
        file.write_text(text, encoding=name)
        expected = regard.generate(path, text, max_new_tokens=2)[0]
        assert told(capsys, "generate", path, "--file", file, "--encoding", encoding, "--max-new-tokens", 2) == (
            f"{expected}\n"
        )


def test_every_option_of_generate_reaches_the_model(models: dict[str, Path], capsys: Said) -> None:
    path = models["speaker"]
    plain = regard.generate(path, "the cat", max_new_tokens=20, logit_bias={2: -1e9}, no_repeat_ngram=1)
    stop = plain[0][4:7]
    for words, fields in (
        (["--beam", 3, "--length-penalty", 0.5], {"beam": 3, "length_penalty": 0.5}),
        (["--beam", 3, "--n-best", 2], {"beam": 3, "n_best": 2}),
        (["--temperature", 0.9, "--top-k", 20, "--seed", 3], {"temperature": 0.9, "top_k": 20, "seed": 3}),
        (["--top-p", 0.9, "--min-p", 0.01, "--seed", 3], {"top_p": 0.9, "min_p": 0.01, "seed": 3}),
        (["--repetition-penalty", 1.5], {"repetition_penalty": 1.5}),
        (["--no-repeat-ngram", 1, "--stop", stop, "--bias", "<eos>=-inf"], {"no_repeat_ngram": 1, "stop": stop}),
        (["--stop-token", plain.tokens[0][3]], {"stop": [plain.tokens[0][3]]}),
        (["--min-new-tokens", 4, "--stop-token", "<eos>"], {"min_new_tokens": 4, "stop": [2]}),
        (["--prefix", " sat", "--bias", "q=3", "--bias", "5=-1"], {"prefix": " sat", "logit_bias": {"q": 3, 5: -1}}),
    ):
        if "--bias" in words and "logit_bias" not in fields:
            fields["logit_bias"] = {2: float("-inf")}
        made = regard.generate(path, "the cat", max_new_tokens=12, **fields)
        found = document(capsys, "generate", path, "the cat", "--max-new-tokens", 12, *words)
        best = found["results"][0]
        assert (best["text"], best["tokens"], best["finish"]) == (made[0], made.tokens[0], made.finishes[0]), words
        assert best["score"] == pytest.approx(made.scores[0], abs=1e-5)
        assert best["input"] == "the cat"
        assert len(best.get("n_best", [0])) == len(made.n_best[0])
        lines = told(capsys, "generate", path, "the cat", "--max-new-tokens", 12, *words)
        assert made[0] in lines


def test_a_seed_without_sampling_is_refused(models: dict[str, Path], capsys: Said) -> None:
    assert run("generate", models["speaker"], "the cat", "--seed", 3) == 2
    assert "--seed 3 is for sampling: --temperature T" in capsys.readouterr().err


def test_a_draft_is_reported(models: dict[str, Path], capsys: Said) -> None:
    path = models["speaker"]
    alone = told(capsys, "generate", path, "the cat", "--max-new-tokens", 10)
    assert run("generate", path, "the cat", "--max-new-tokens", 10, "--draft", path) == 0
    said = capsys.readouterr()
    assert said.out == alone
    assert said.err.startswith("draft: ")
    assert "(100.0%)" in said.err
    found = document(capsys, "generate", path, "the cat", "--max-new-tokens", 10, "--draft", path)
    assert found["draft"]["share"] == 1


def test_generate_truncates_when_told(models: dict[str, Path], capsys: Said) -> None:
    long = "the cat " * 60
    assert told(capsys, "generate", models["speaker"], long, "--truncate", "--max-new-tokens", 3).endswith("\n")


# ---- translate


def test_translate_words_and_json(models: dict[str, Path], capsys: Said) -> None:
    path, texts = models["translator"], ["the cat", "a dog ran"]
    made = regard.translate(path, texts)
    flat = [" ".join(text.splitlines()) for text in made]
    assert told(capsys, "translate", path, *texts) == "".join(f"{text}\n" for text in flat)
    found = document(capsys, "translate", path, *texts, "--beam", 4)
    assert found["engine"] == "torch"
    assert [x["input"] for x in found["results"]] == texts
    assert [x["text"] for x in found["results"]] == flat
    assert [x["score"] for x in found["results"]] == pytest.approx(made.scores, abs=1e-4)


@pytest.mark.parametrize("at_once", [2, 512])
def test_one_line_in_is_one_line_out(
    models: dict[str, Path],
    tmp_path: Path,
    capsys: Said,
    pipe: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
) -> None:
    monkeypatch.setattr("regard.cli.bulk_answers._LINES_AT_ONCE", at_once)
    path, file, out = models["translator"], tmp_path / "in.txt", tmp_path / "out.txt"
    options = ["--beam", 2, "--max-new-tokens", 12]
    alone = [
        " ".join(regard.translate(path, line, beam=2, max_new_tokens=12)[0].splitlines()) if line.strip() else ""
        for line in LINES
    ]
    file.write_bytes("\r\n".join([*LINES, ""]).encode())
    expected = "".join(f"{line}\n" for line in alone)
    assert run("translate", path, "--file", file, *options) == 0
    said = capsys.readouterr()
    assert said.out == expected
    assert said.err.splitlines()[-1] == "6 of 6 lines"
    assert len(said.err.splitlines()) == -(-6 // at_once)
    pipe("\n".join(LINES).encode())  # the last line has no end
    assert told(capsys, "translate", path, *options) == expected
    assert told(capsys, "translate", path, "--file", file, "--out", out, *options) == ""
    assert out.read_text(encoding="utf-8") == expected


def test_no_line_in_is_no_line_out(models: dict[str, Path], capsys: Said, pipe: Callable[[bytes], None]) -> None:
    pipe(b"")
    assert told(capsys, "translate", models["translator"]) == ""


def test_other_engines_are_asked_as_they_are_named(
    models: dict[str, Path], capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    model = regard.load(models["translator"])

    class Engine:
        config = model.config

        def tokenizer(self, side: str) -> Any:
            return model.processor.source

        def translate(self, texts: list[str], **options: Any) -> list[str]:
            asked.append((texts, options))
            return [text.upper() for text in texts]

    def open_engine(path: str, name: str) -> Engine:
        asked.append((path, name))
        return Engine()

    monkeypatch.setattr("regard.export.engines.open_engine", open_engine)
    monkeypatch.setitem(sys.modules, "ctranslate2", ModuleType("ctranslate2"))
    words = ["translate", "somewhere", "the cat", "--engine", "ctranslate2", "--length-penalty", 0.6]
    assert told(capsys, *words) == "THE CAT\n"
    options = {"beam": 4, "length_penalty": 0.6, "truncate": False}
    assert asked == [("somewhere", "ctranslate2"), (["the cat"], options)]
    found = document(capsys, *words)
    assert found == {
        "model": "somewhere",
        "engine": "ctranslate2",
        "results": [{"input": "the cat", "text": "THE CAT", "score": None}],
    }
    asked.clear()
    refused(capsys, 1, "but max_len=96", *words, "the cat " * 60)
    assert [entry[1] for entry in asked] == ["ctranslate2", "ctranslate2"]  # opened, and never asked


def test_weights_are_read_in_the_asked_type(models: dict[str, Path], capsys: Said) -> None:
    """As ``regard.load(path, dtype=…)`` answers, which is not what fp32 weights say to the last digit."""
    words = ["translate", models["translator"], "the cat", "--n-best", 2, "--json"]
    said = {dtype: json.loads(told(capsys, *words, "--dtype", dtype)) for dtype in ("float32", "bfloat16")}
    assert said["float32"] == json.loads(told(capsys, *words))
    half = regard.load(models["translator"], dtype="bfloat16")
    wanted = [text.score for text in regard.translate(half, ["the cat"], n_best=2).n_best[0]]
    assert [text["score"] for text in said["bfloat16"]["results"][0]["n_best"]] == pytest.approx(wanted)
    assert said["bfloat16"] != said["float32"]
    for name, more in (("classifier", ["classify"]), ("speaker", ["look"]), ("speaker", ["embed"])):
        plain, rounded = (
            told(capsys, *more, models[name], "the cat", "--json", *x) for x in ((), ("--dtype", "bfloat16"))
        )
        assert plain != rounded, name


def test_an_engine_that_is_not_installed_is_named(
    models: dict[str, Path], capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert run("translate", models["translator"], "the cat", "--engine", "ctranslate2") == 1
    said = 'regard: --engine ctranslate2 needs ctranslate2, which is not installed: pip install "regard[export]"\n'
    assert capsys.readouterr().err == said


def test_n_best_and_a_prefix(models: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    path, texts = models["translator"], ["the cat", "a dog ran"]
    made = regard.translate(path, texts, beam=3, n_best=2, prefix="the mat", max_new_tokens=12)
    words = ["translate", path, "--beam", 3, "--n-best", 2, "--prefix", "the mat", "--max-new-tokens", 12]
    flat = [[" ".join(x.text.splitlines()) for x in best] for best in made.n_best]
    assert all(text.startswith("the mat") for best in flat for text in best)
    found = document(capsys, *words, *texts)["results"]
    assert [[x["text"] for x in result["n_best"]] for result in found] == flat
    assert [result["text"] for result in found] == [best[0] for best in flat]
    (tmp_path / "in.txt").write_text("the cat\n\na dog ran\n", encoding="utf-8")
    lines = told(capsys, *words, "--file", tmp_path / "in.txt").splitlines()
    assert [line.partition("\t")[2] for line in lines] == [*flat[0], "", *flat[1]]
    assert float(lines[0].partition("\t")[0]) == pytest.approx(made.n_best[0][0].score, abs=1e-4)
    (tmp_path / "in.tsv").write_text("en\tid\nthe cat\t7\n\t8\n", encoding="utf-8")
    head, first, blank = told(capsys, *words, "--file", tmp_path / "in.tsv").splitlines()
    assert head.split("\t") == ["en", "id", "translation", "score", "translation_2", "score_2"]
    assert first.split("\t")[2::2] == flat[0]
    assert blank.split("\t") == ["", "8", "", "", "", ""]
    refused(capsys, 2, "--engine ctranslate2 does not support --n-best", *words, "the cat", "--engine", "ctranslate2")
    refused(capsys, 2, "--n-best 3 texts need --beam 3 or more", "translate", path, "the", "--beam", 2, "--n-best", 3)


def test_a_glossary(models: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    path, terms = models["translator"], tmp_path / "terms.tsv"
    terms.write_text("cat\t고양이\n", encoding="utf-8")
    words = ["translate", path, "--glossary", terms, "--max-new-tokens", 16]
    made = told(capsys, *words, "the cat", "a dog").splitlines()
    assert "고양이" in made[0]
    assert made[1] == told(capsys, "translate", path, "a dog", "--max-new-tokens", 16).rstrip("\n")
    assert "고양이" in document(capsys, *words, "the cat", "--beam", 1)["results"][0]["text"]
    assert run(*words[:-1], 2, "the cat") == 0
    said = "'the cat' is translated without the term 고양이: no room, or no tokens to write it with\n"
    assert capsys.readouterr().err == said
    refused(capsys, 2, "--engine ctranslate2 does not support --glossary", *words, "the cat", "--engine", "ctranslate2")
    terms.write_text("cat 고양이\n", encoding="utf-8")
    refused(capsys, 1, "terms.tsv:1: a term, a tab and its translation are needed, not 'cat 고양이'", *words, "a")
    refused(capsys, 2, "nowhere.tsv", *words, "a", "--glossary", tmp_path / "nowhere.tsv")


# ---- ONNX Runtime in place of torch


@pytest.fixture(scope="module")
def exports(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same models with their ONNX graphs."""
    folder, quick = tmp_path_factory.mktemp("exports"), {"n_shapes": 1, "compiled": False}
    names = ("speaker", "translator", "captioner", "classifier", "images")
    return {name: regard.export(regard.load(models[name]), "onnx", folder / name, **quick) for name in names}


def test_onnx_answers_every_task_as_torch_does(exports: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    image, terms = picture(tmp_path / "one.png"), tmp_path / "terms.tsv"
    terms.write_text("cat\t매트\n", encoding="utf-8")
    for words in (
        ["generate", exports["speaker"], "the cat", "--max-new-tokens", 6],
        ["generate", exports["speaker"], "the cat", "--max-new-tokens", 6, "--beam", 2, "--n-best", 2],
        ["translate", exports["translator"], "the cat", "a dog", "--max-new-tokens", 6],
        ["translate", exports["translator"], "the cat", "--n-best", 2, "--prefix", "the", "--max-new-tokens", 6],
        ["translate", exports["translator"], "the cat", "--glossary", terms, "--max-new-tokens", 10],
        ["classify", exports["classifier"], "the cat", "what light", "--top", 2],
        ["classify", exports["images"], image],
        ["caption", exports["captioner"], image, "--max-new-tokens", 5],
    ):
        assert told(capsys, *words, "--engine", "onnx") == told(capsys, *words), words


def test_a_model_without_graphs_says_how_to_make_them(models: dict[str, Path], capsys: Said) -> None:
    for words in (["generate", models["speaker"], "the"], ["classify", models["classifier"], "the"]):
        said = f"was not exported as onnx; regard export {words[1]} onnx shipped makes one"
        refused(capsys, 3, said, *words, "--engine", "onnx")
    refused(capsys, 2, "--engine ctranslate2 is not one of torch, onnx", *words, "--engine", "ctranslate2")


# ---- classify and caption


def test_classify_texts_and_images(
    models: dict[str, Path], tmp_path: Path, capsys: Said, pipe: Callable[[bytes], None]
) -> None:
    texts = ["the cat", "a dog ran"]
    found = regard.classify(models["classifier"], texts)
    lines = "".join(f"{one.label}\t{one.probability:.4f}\n" for one in found)
    assert told(capsys, "classify", models["classifier"], *texts) == lines
    pipe("\n".join(texts).encode())
    assert told(capsys, "classify", models["classifier"]) == lines
    all_three = told(capsys, "classify", models["classifier"], texts[0], "--top", 3)
    assert all_three.split("\t")[::2] == list(found[0].all)
    answer = document(capsys, "classify", models["classifier"], *texts)
    assert [x["label"] for x in answer["results"]] == [x.label for x in found]
    assert answer["results"][0]["all"] == pytest.approx(found[0].all)
    image = picture(tmp_path / "red.png")
    seen = regard.classify(models["images"], image)[0]
    assert told(capsys, "classify", models["images"], image) == f"{seen.label}\t{seen.probability:.4f}\n"


def test_caption_images(models: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    first, second = picture(tmp_path / "red.png"), picture(tmp_path / "blue.png", (0, 0, 255))
    texts = [" ".join(text.splitlines()) for text in regard.caption(models["captioner"], [first, second])]
    assert told(capsys, "caption", models["captioner"], first) == f"{texts[0]}\n"
    assert told(capsys, "caption", models["captioner"], first, second) == (
        f"{first}\t{texts[0]}\n{second}\t{texts[1]}\n"
    )
    found = document(capsys, "caption", models["captioner"], first, "--beam", 2)
    assert found["results"][0]["input"] == str(first)


# ---- bad input: one sentence, its exit code, and nothing written


def bomb(path: Path, side: int) -> Path:
    """A few bytes that say they are an image of side × side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    return path


def refused(capsys: Said, code: int, said: str, *words: Any) -> None:
    for form in ([], ["--json"]):
        assert run(*words, *form) == code
        answer = capsys.readouterr()
        assert answer.out == ""
        assert len(answer.err.splitlines()) == 1, answer.err
        assert answer.err.startswith("regard: ")
        assert said in answer.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["generate", "speaker", ""], 1, "prompt 0 is empty"),
        (["generate", "speaker", "the cat " * 60], 1, "max_len=96 leaves no room; --truncate keeps its end"),
        (["generate", "speaker", "the", "--beam", "301"], 1, "beam=301 is larger than the vocabulary of 300 tokens"),
        (["generate", "speaker", "the", "--temperature", "0"], 2, "--temperature 0.0 must be a positive number"),
        (["generate", "speaker", "the", "--temperature", "-1"], 2, "--temperature -1.0 must be a positive number"),
        (["generate", "speaker", "the", "--temperature", "nan"], 2, "--temperature nan must be a positive number"),
        (["generate", "speaker", "the", "--stop-token", "<nope>"], 1, "'<nope>' is an unknown token"),
        (["generate", "speaker", "the", "--stop-token", "4000"], 1, "stop holds the unknown token 4000"),
        (["generate", "speaker", "the", "--stop", ""], 1, "holds an empty string"),
        (["generate", "speaker", "the", "--bias", "the"], 2, "--bias 'the' is not TOKEN=NUMBER"),
        (["generate", "speaker", "the", "--bias", "q=nan"], 1, "--bias of token"),
        (["generate", "speaker", "the", "--bias", "=5"], 2, "--bias '=5' is not TOKEN=NUMBER"),
        (["generate", "speaker", "the", "--column", "text"], 2, "--column text needs a table"),
        (["generate", "speaker", "the", "--on", "moon"], 2, "regard: --on moon is not one of local, ray"),
        (["generate", "speaker", "--file", "x.txt", "--encoding", "hex"], 2, "--encoding 'hex': 'hex' is an unknown"),
        (["translate", "translator", "--file", "x.txt", "--encoding", "hex"], 2, "'hex' is an unknown encoding"),
        (["generate", "speaker", "the", "--file", "x.txt"], 2, "--file x.txt and text are both given"),
        (["generate", "speaker", "--file", "missing.txt"], 2, "there is no file missing.txt"),
        (["generate", "speaker", "the", "--device", "moon"], 2, "--device moon is not one of"),
        (["generate", "speaker", "the", "--device", "cpu:one"], 2, "--device cpu:one is not a device, such as cpu"),
        (["generate", "mute", "the"], 1, "this model has no tokenizer"),
        (["generate", "mute", "the", "--stop-token", "q"], 1, "this model has no tokenizer"),
        (["generate", "classifier", "the"], 1, "writes no text"),
        (["generate", "captioner", "the"], 1, "regard.caption describes images"),
        (["generate", "nowhere", "the"], 3, "there is no directory"),
        (["translate", "classifier", "the"], 1, "head='classify': it does not translate"),
        (["translate", "speaker", "the"], 1, "architecture='decoder'"),
        (["translate", "nowhere", "the"], 3, "there is no directory"),
        (["translate", "translator", ""], 2, "a text to translate is empty"),
        (["translate", "translator", "the cat " * 60], 1, "but max_len=96; --truncate keeps its beginning"),
        (["translate", "translator", "the", "--beam", "400"], 1, "beam=400 is larger than the vocabulary"),
        (["translate", "translator", "the", "--engine", "abacus"], 2, "--engine abacus is not one of torch, onnx"),
        (
            ["translate", "translator", "the", "--dtype", "int8"],
            2,
            "--dtype int8 is not one of float32, bfloat16, float16",
        ),
        (["classify", "classifier", "the", "--dtype", "float16", "--engine", "onnx"], 2, "is for --engine torch"),
        (["translate", "translator", "the", "--length-penalty", "nan"], 2, "--length-penalty nan must be a finite"),
        (["translate", "translator", "the", "--out", "no/such/place.txt"], 2, "there is no directory no/such"),
        (["classify", "translator", "the"], 1, "but classification needs head='classify'"),
        (["classify", "classifier", ""], 2, "a text to classify is empty"),
        (["classify", "images", "missing.png"], 2, "missing.png: no such file"),
        (["caption", "translator", "missing.png"], 1, "it does not caption images"),
        (["caption", "captioner", "missing.png"], 2, "missing.png: no such file"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_input(
    models: dict[str, Path],
    tmp_path: Path,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    command, model, *rest = words
    refused(capsys, code, said, command, models.get(model, model), *rest)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["generate", "translate", "classify"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x89PNG\r\n\x1a\n\0\xff" * 9, "the input is not UTF-8 text: byte 0x89 at 0"),
        (b"good line\nbad \xff\n", "the input is not UTF-8 text: byte 0xff at 14"),
        (b"a\0b\n", "the input is not text: it contains a NUL character at 1"),
    ],
)
def test_garbage_on_stdin(
    models: dict[str, Path], capsys: Said, pipe: Callable[[bytes], None], command: str, content: bytes, said: str
) -> None:
    model = {"generate": "speaker", "translate": "translator", "classify": "classifier"}[command]
    pipe(content)
    assert run(command, models[model]) == 1
    answer = capsys.readouterr()
    assert (answer.out, answer.err) == ("", f"regard: {said}\n")


def test_nothing_typed_and_nothing_piped(
    models: dict[str, Path], capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    for command, model in (("generate", "speaker"), ("translate", "translator"), ("classify", "classifier")):
        refused(capsys, 2, "there is nothing to read: give text, --file F, or pipe text in", command, models[model])


def test_one_bad_line_among_many_writes_nothing(
    models: dict[str, Path], tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the lines before it would have been told already."""
    monkeypatch.setattr("regard.cli.bulk_answers._LINES_AT_ONCE", 2)
    file, out = tmp_path / "in.txt", tmp_path / "out.txt"
    file.write_text("the cat\n" * 7 + "the cat " * 90 + "\nthe cat\n", encoding="utf-8")
    sentence = f"{file}:8: 183 tokens, but max_len=96; --truncate keeps its beginning"
    for more in ((), ("--out", out)):
        refused(capsys, 1, sentence, "translate", models["translator"], "--file", file, *more)
    assert not out.exists()
    assert run("translate", models["translator"], "--file", file, "--truncate", "--beam", 1) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: bomb(path, 60_000), "more pixels than can be decoded safely"),
        (lambda path: bomb(path, 10_000), "10000 × 10000 pixels, more than max_pixels=50000000"),
        (lambda path: bomb(path, 64), "cannot be decoded"),
        (lambda path: path.write_bytes(picture(path).read_bytes()[:60]), "cannot be decoded"),
        (lambda path: path.write_bytes(b"not an image at all"), "cannot be decoded: cannot identify image file"),
        (lambda path: path.write_bytes(b""), "cannot be decoded"),
        (lambda path: path.mkdir(), "no images in this folder"),
    ],
    ids=["bomb", "large", "no pixels", "truncated", "text", "empty", "folder"],
)
def test_bad_images(
    models: dict[str, Path], tmp_path: Path, capsys: Said, make: Callable[[Path], object], said: str
) -> None:
    good, bad = picture(tmp_path / "good.png"), tmp_path / "bad.png"
    make(bad)
    refused(capsys, 1, f"{bad}: {said}", "caption", models["captioner"], bad)
    refused(capsys, 1, f"{bad}: {said}", "caption", models["captioner"], good, bad)
    refused(capsys, 1, f"{bad}: {said}", "classify", models["images"], good, bad)


def test_usage_is_told_before_a_model_is_opened(capsys: Said) -> None:
    for words in (
        ["generate", "nowhere", "x", "--temperature", "0"],
        ["caption", "nowhere", "x", "--length-penalty", "inf"],
    ):
        assert run(*words) == 2
        assert "nowhere" not in capsys.readouterr().err
    for words in (["generate"], ["caption", "nowhere"], ["generate", "nowhere", "x", "--beam", "0"]):
        assert run(*words) == 2
