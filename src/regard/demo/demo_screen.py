"""What the demo says, in English and in Korean."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

LANGUAGES = ("en", "ko")

_TEXTS: dict[str, tuple[str, str]] = {
    "title": (
        "English → Korean: a Transformer learns it here, from nothing, without a download.",
        "영어 → 한국어: 내려받는 것 없이, 이 컴퓨터에서 처음부터 트랜스포머를 학습시킵니다.",
    ),
    "about": (
        "About 3 minutes on 2 processor cores. Ctrl-C at any time: the same command goes on where it stopped.",
        "코어 2개로 약 3분 걸립니다. 언제든 Ctrl-C로 멈추고, 같은 명령으로 이어서 할 수 있습니다.",
    ),
    "kept": ("kept from before", "이미 되어 있음"),
    "seconds": ("{seconds:.1f} s", "{seconds:.1f}초"),
    "train": ("Train", "학습"),
    "train.why": (
        "on {n:,} sentence pairs of a small grammar; Korean puts the verb last, so word order must be learned",
        "작은 문법에서 만든 문장 쌍 {n:,}개로. 한국어는 서술어가 끝에 오므로 어순을 배워야 합니다",
    ),
    "train.goes_on": ("going on from step {step:,} of {steps:,}", "{steps:,}단계 중 {step:,}단계부터 이어서"),
    "judge": ("Test", "시험"),
    "judge.why": (
        "on {n:,} sentences with combinations of verbs and nouns that training never showed",
        "학습에 나온 적 없는 동사와 명사의 조합이 든 문장 {n:,}개로",
    ),
    "judge.exact": ("exactly right, letter by letter", "한 글자도 틀리지 않음"),
    "judge.lookup": ("a dictionary without attention", "어텐션 없이 사전으로만"),
    "translate": ("Translate", "번역"),
    "translate.why": (
        "the tag says how politely to speak; Korean changes its endings and even its nouns with it",
        "꼬리표가 말씨를 정합니다. 한국어는 말씨에 따라 어미는 물론 낱말까지 바뀝니다",
    ),
    "translate.wanted": ("the grammar says", "문법의 답"),
    "look": ("Look inside", "들여다보기"),
    "look.why": (
        "each row a Korean word, bright where the model looked while writing it",
        "한 줄이 한국어 낱말 하나. 그 낱말을 쓸 때 모델이 본 곳이 밝습니다",
    ),
    "look.layer": (
        "Shown: layer {layer}, the mean of its {heads} heads, which aligns best: over {n} held-out sentences its"
        " alignment error rate is {error:.0%}. Guessing by position alone: {diagonal:.0%}.",
        "{layer}층 헤드 {heads}개의 평균으로, 정렬이 가장 잘 맞습니다. 처음 보는 문장 {n}개에서 정렬 오류율"
        " {error:.0%}, 위치로만 짐작하면 {diagonal:.0%}.",
    ),
    "look.given": (
        "the model would write something else here; this is the grammar's own sentence",
        "모델은 여기서 다르게 쓰므로, 문법의 문장을 주고 봅니다",
    ),
    "look.page": ("every head and every weight, in one file", "모든 헤드의 모든 가중치, 파일 하나에"),
    "export": ("Ship", "내보내기"),
    "export.why": (
        "as ONNX, for programs without Python, and compared with the model number by number",
        "파이썬 없이도 쓰도록 ONNX로 내보내고, 모델과 숫자 하나하나 비교합니다",
    ),
    "export.certificate": (
        "certificate: no logit differs by more than {max_abs:.1g}, {same:.0%} of texts the same,"
        " over {n} random shapes",
        "증명서: 무작위 입력 {n}가지에서 로짓 차이 최대 {max_abs:.1g}, 같은 글 {same:.0%}",
    ),
    "export.missing": (
        'left out: {name} is not installed; pip install "regard[export]" adds it',
        '건너뜀: {name}이(가) 없습니다. pip install "regard[export]"로 설치하세요',
    ),
    "serve": ("Explore", "살펴보기"),
    "serve.why": (
        "type your own sentence and see every head; Ctrl-C ends it",
        "문장을 직접 넣고 모든 헤드를 보세요. Ctrl-C로 끝냅니다",
    ),
    "serve.missing": (
        'left out: {name} is not installed; pip install "regard[serve]" adds it',
        '건너뜀: {name}이(가) 없습니다. pip install "regard[serve]"로 설치하세요',
    ),
    "total": ("All of it took {seconds:.0f} s.", "모두 {seconds:.0f}초 걸렸습니다."),
    "next": ("What next", "다음에 해 볼 것"),
    "next.translate": ("your own sentence", "내 문장 번역"),
    "next.look": ("a picture of where it looked", "어디를 보았는지 그림으로"),
    "next.train": ("your own pairs, one a line, a tab between", "내 자료로 학습: 한 줄에 한 쌍, 사이에 탭"),
    "stopped": (
        "Stopped. The same command goes on from here.",
        "멈췄습니다. 같은 명령으로 여기서부터 이어집니다.",
    ),
}


class Phrases:
    """The texts of one language."""

    def __init__(self, language: str) -> None:
        if language not in LANGUAGES:
            raise ValueError(f"lang={language!r} is none of {', '.join(LANGUAGES)}")
        self.language = language

    def __call__(self, key: str, /, **values: object) -> str:
        return _TEXTS[key][LANGUAGES.index(self.language)].format(**values)


def environment_language() -> str:
    """What the environment asks for, by the same variables as every program; English unless it is Korean."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := os.environ.get(name):
            return "ko" if value.lower().startswith("ko") else "en"
    return "en"


if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from .demo_run import Demo

STAGES = ("train", "judge", "translate", "look", "export", "serve")
_MARGIN = "     "


class DemoScreen:
    """Everything the demo says, through one console."""

    def __init__(self, console: Console, phrases: Phrases) -> None:
        self.console, self.phrases = console, phrases

    # ---------------------------------------------------------------- around the stages

    def title(self) -> None:
        self._print("regard demo", "bold")
        self._print(self.phrases("title"))
        self._print(self.phrases("about"), "dim")

    def stage(self, name: str, *, kept: bool = False, **about: Any) -> None:
        from rich.text import Text

        number = STAGES.index(name) + 1
        line = Text(f"{number}/{len(STAGES)}  ", style="cyan").append(self.phrases(name), style="bold cyan")
        if kept:
            line.append(f"  {self.phrases('kept')}", style="dim")
        self.console.print()
        self.console.print(line)
        self._print_indented(self.phrases(f"{name}.why", **about), "italic")

    def note(self, name: str, **values: Any) -> None:
        self._print_indented(self.phrases(name, **values), "dim")

    def result(self, name: str, result: dict[str, Any], demo: Demo | None = None) -> None:
        if "left_out" in result:
            self._print_indented(self.phrases(f"{name}.missing", name=result["left_out"]), "yellow")
            return
        match name:
            case "judge":
                self._print_evaluation(result)
            case "translate":
                self._print_translations(result)
            case "look":
                assert demo is not None
                self._print_look(result, demo)
            case "export":
                text = {"max_abs": result["max_abs"], "same": result["same_text"] or 0.0, "n": result["n"]}
                assert demo is not None
                self._print_indented(f"{demo.onnx}  {self.phrases('export.certificate', **text)}")
        if not result["kept"]:
            self._print_indented(self.phrases("seconds", seconds=result["seconds"]), "dim")

    def end(self, seconds: float, run: Path) -> None:
        """What next: three commands."""
        from rich.cells import cell_len

        place = quote(str(run))
        commands = {
            "next.translate": f'regard translate {place} "[formal] The teacher will read a book."',
            "next.look": f'regard look {place} "[plain] The cat chased a mouse." --out look.png',
            "next.train": "regard train translate data.source=pairs.tsv",
        }
        self.console.print()
        self._print(self.phrases("total", seconds=seconds), "bold")
        self._print(self.phrases("next"), "bold cyan")
        widest = max(map(len, commands.values()))
        beside = widest + 8 + max(cell_len(self.phrases(name)) for name in commands) <= self.console.width
        for name, command in commands.items():
            if beside:
                self._print(f"{_MARGIN}{command:{widest}}   # {self.phrases(name)}")
            else:
                self._print(f"{_MARGIN}# {self.phrases(name)}", "dim")
                self.console.print(_MARGIN + command, soft_wrap=True, markup=False)  # to be copied as it is

    # ---------------------------------------------------------------- of single stages

    def _print_evaluation(self, result: dict[str, Any]) -> None:
        from rich.text import Text

        line = Text().append(f"{100 * result['exact']:.1f} %", style="bold green")
        line.append(f" {self.phrases('judge.exact')}   ").append(f"BLEU {result['bleu']:.1f}", style="bold green")
        line.append(f"   {self.phrases('judge.lookup')}: {100 * result['lookup_exact']:.1f} %", style="dim")
        self._print_indented(line)

    def _print_translations(self, result: dict[str, Any]) -> None:
        from rich.text import Text

        for row in result["sentences"]:
            self._print_indented(row["source"])
            mark = ("✓", "green") if row["right"] else ("✗", "red")
            line = Text(f"{_MARGIN}  ", no_wrap=True, overflow="ellipsis")
            self.console.print(line.append(*mark).append(f" {row['text']}", style="bold"))
            if not row["right"]:
                self._print_indented(f"    {self.phrases('translate.wanted')}: {row['wanted']}", "dim")

    def _print_look(self, result: dict[str, Any], demo: Demo) -> None:
        from ..lens import look

        seen = look(demo.model, result["source"], None if result["right"] else result["target"])
        seen.print(layer=result["layer"], head=None, kind="cross", words=True, specials=False, console=self.console)
        if not result["right"]:
            self.note("look.given")
        facts = {name: result[name] for name in ("layer", "heads", "n", "error", "diagonal")}
        self.note("look.layer", **facts)
        self._print_indented(f"{demo.page}  {self.phrases('look.page')}")

    def _print_indented(self, text: Text | str, style: str = "") -> None:
        """Below a stage's name, indented also where a line is broken."""
        from rich.padding import Padding
        from rich.text import Text

        line = Text(text, style=style) if isinstance(text, str) else text
        self.console.print(Padding(line, (0, 0, 0, len(_MARGIN)), expand=False))

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self.console.print(Text(text, style=style))
