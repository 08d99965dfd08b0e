"""The output of the demo, in English or Korean; the texts are in demo_texts.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from ..config.config_file import load_package_data
from ..foundation.language import LANGUAGES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from . import Demo

STAGES = ("train", "judge", "translate", "look", "export", "publish", "serve")
_MARGIN = "     "


@cache
def load_texts() -> dict[str, dict[str, str]]:
    """All texts, by name and language."""
    return load_package_data("demo/demo_texts.yaml")


class DemoTexts:
    """The texts in one language; a call fills in the values of one."""

    def __init__(self, language: str) -> None:
        if language not in LANGUAGES:
            raise ValueError(f"lang={language!r} is not one of {', '.join(LANGUAGES)}")
        self.language = language

    def __call__(self, key: str, /, **values: object) -> str:
        return load_texts()[key][self.language].format(**values)


class DemoScreen:
    """Prints the demo's stages and results on a console."""

    def __init__(self, console: Console, texts: DemoTexts) -> None:
        self.console, self.texts = console, texts

    def title(self) -> None:
        self._print("regard demo", "bold")
        self._print(self.texts("title"))
        self._print(self.texts("about"), "dim")

    def stage(self, name: str, *, kept: bool = False, **about: Any) -> None:
        from rich.text import Text

        number = f"{STAGES.index(name) + 1}/{len(STAGES)}  "
        line = Text(number, style="cyan").append(self.texts(name), style="bold cyan")
        if kept:
            line.append(f"  {self.texts('kept')}", style="dim")
        self.console.print()
        self.console.print(line)
        self._print_indented(self.texts(f"{name}.why", **about), "italic")

    def note(self, name: str, **values: Any) -> None:
        self._print_indented(self.texts(name, **values), "dim")

    def result(self, name: str, result: dict[str, Any], demo: Demo | None = None) -> None:
        from rich.text import Text

        if "left_out" in result:
            self._print_indented(self.texts(f"{name}.missing", name=result["left_out"]), "yellow")
            return
        if name == "judge":
            line = Text().append(f"{100 * result['exact']:.1f} %", style="bold green")
            line.append(f" {self.texts('judge.exact')}   ").append(f"BLEU {result['bleu']:.1f}", style="bold green")
            line.append(f"   {self.texts('judge.lookup')}: {100 * result['lookup_exact']:.1f} %", style="dim")
            self._print_indented(line)
        elif name == "translate":
            for row in result["sentences"]:
                self._print_indented(row["source"])
                mark = ("✓", "green") if row["right"] else ("✗", "red")
                line = Text(f"{_MARGIN}  ", no_wrap=True, overflow="ellipsis")
                self.console.print(line.append(*mark).append(f" {row['text']}", style="bold"))
                if not row["right"]:
                    self._print_indented(f"    {self.texts('translate.wanted')}: {row['wanted']}", "dim")
        elif name == "look" and demo is not None:
            self._print_look(result, demo)
        elif name == "export" and demo is not None:
            facts = {"max_abs": result["max_abs"], "same": result["same_text"] or 0.0, "n": result["n"]}
            self._print_indented(f"{demo.onnx}  {self.texts('export.certificate', **facts)}")
        elif name == "publish" and demo is not None:
            self._print_indented(f"{demo.web}  {self.texts('publish.page', megabytes=result['bytes'] / 1e6)}")
        if not result["kept"]:
            self._print_indented(self.texts("seconds", seconds=result["seconds"]), "dim")

    def end(self, seconds: float, run: Path) -> None:
        """Print the total time and three commands to try next."""
        from rich.cells import cell_len

        path = quote(str(run))
        commands = {
            "next.translate": f'regard translate {path} "[formal] The teacher will read a book."',
            "next.look": f'regard look {path} "[plain] The cat chased a mouse." --out look.png',
            "next.train": "regard train translate data.source=pairs.tsv",
        }
        self.console.print()
        self._print(self.texts("total", seconds=seconds), "bold")
        self._print(self.texts("next"), "bold cyan")
        widest = max(map(len, commands.values()))
        fits = widest + 8 + max(cell_len(self.texts(name)) for name in commands) <= self.console.width
        for name, command in commands.items():
            if fits:
                self._print(f"{_MARGIN}{command:{widest}}   # {self.texts(name)}")
            else:
                self._print(f"{_MARGIN}# {self.texts(name)}", "dim")
                self.console.print(_MARGIN + command, soft_wrap=True, markup=False)  # unbroken, to be copied

    def _print_look(self, result: dict[str, Any], demo: Demo) -> None:
        from ..lens import look

        view = look(demo.model, result["source"], None if result["right"] else result["target"])
        view.print(layer=result["layer"], head=None, kind="cross", words=True, specials=False, console=self.console)
        if not result["right"]:
            self.note("look.given")
        facts = {name: result[name] for name in ("layer", "heads", "n", "error", "diagonal")}
        self.note("look.layer", **facts | {"layer": result["layer"] + 1})
        self._print_indented(f"{demo.page}  {self.texts('look.page')}")

    def _print_indented(self, text: Text | str, style: str = "") -> None:
        """Print below a stage's name, indenting wrapped lines too."""
        from rich.padding import Padding
        from rich.text import Text

        line = Text(text, style=style) if isinstance(text, str) else text
        self.console.print(Padding(line, (0, 0, 0, len(_MARGIN)), expand=False))

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self.console.print(Text(text, style=style))
