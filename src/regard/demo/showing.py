"""The demo on the screen: a line for each stage that says what happens and why, and below it what came of it."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from .says import Says

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from .run import Demo

STAGES = ("train", "judge", "translate", "look", "export", "serve")
_MARGIN = "     "


class Shown:
    """Everything the demo says, through one console."""

    def __init__(self, console: Console, says: Says) -> None:
        self.console, self.says = console, says

    # ---------------------------------------------------------------- around the stages

    def title(self) -> None:
        self._print("regard demo", "bold")
        self._print(self.says("title"))
        self._print(self.says("about"), "dim")

    def stage(self, name: str, *, kept: bool = False, **about: Any) -> None:
        from rich.text import Text

        number = STAGES.index(name) + 1
        line = Text(f"{number}/{len(STAGES)}  ", style="cyan").append(self.says(name), style="bold cyan")
        if kept:
            line.append(f"  {self.says('kept')}", style="dim")
        self.console.print()
        self.console.print(line)
        self._inside(self.says(f"{name}.why", **about), "italic")

    def note(self, name: str, **values: Any) -> None:
        self._inside(self.says(name, **values), "dim")

    def result(self, name: str, found: dict[str, Any], demo: Demo | None = None) -> None:
        if "left_out" in found:
            self._inside(self.says(f"{name}.missing", name=found["left_out"]), "yellow")
            return
        match name:
            case "judge":
                self._judged(found)
            case "translate":
                self._translated(found)
            case "look":
                assert demo is not None
                self._looked(found, demo)
            case "export":
                text = {"max_abs": found["max_abs"], "same": found["same_text"] or 0.0, "n": found["n"]}
                assert demo is not None
                self._inside(f"{demo.onnx}  {self.says('export.certificate', **text)}")
        if not found["kept"]:
            self._inside(self.says("seconds", seconds=found["seconds"]), "dim")

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
        self._print(self.says("total", seconds=seconds), "bold")
        self._print(self.says("next"), "bold cyan")
        widest = max(map(len, commands.values()))
        beside = widest + 8 + max(cell_len(self.says(name)) for name in commands) <= self.console.width
        for name, command in commands.items():
            if beside:
                self._print(f"{_MARGIN}{command:{widest}}   # {self.says(name)}")
            else:
                self._print(f"{_MARGIN}# {self.says(name)}", "dim")
                self.console.print(_MARGIN + command, soft_wrap=True, markup=False)  # to be copied as it is

    # ---------------------------------------------------------------- of single stages

    def _judged(self, found: dict[str, Any]) -> None:
        from rich.text import Text

        line = Text().append(f"{100 * found['exact']:.1f} %", style="bold green")
        line.append(f" {self.says('judge.exact')}   ").append(f"BLEU {found['bleu']:.1f}", style="bold green")
        line.append(f"   {self.says('judge.lookup')}: {100 * found['lookup_exact']:.1f} %", style="dim")
        self._inside(line)

    def _translated(self, found: dict[str, Any]) -> None:
        from rich.text import Text

        for row in found["sentences"]:
            self._inside(row["source"])
            mark = ("✓", "green") if row["right"] else ("✗", "red")
            line = Text(f"{_MARGIN}  ", no_wrap=True, overflow="ellipsis")
            self.console.print(line.append(*mark).append(f" {row['text']}", style="bold"))
            if not row["right"]:
                self._inside(f"    {self.says('translate.wanted')}: {row['wanted']}", "dim")

    def _looked(self, found: dict[str, Any], demo: Demo) -> None:
        from ..lens import look

        seen = look(demo.model, found["source"], None if found["right"] else found["target"])
        seen.print(layer=found["layer"], head=None, kind="cross", words=True, specials=False, console=self.console)
        if not found["right"]:
            self.note("look.given")
        facts = {name: found[name] for name in ("layer", "heads", "n", "error", "diagonal")}
        self.note("look.layer", **facts)
        self._inside(f"{demo.page}  {self.says('look.page')}")

    def _inside(self, text: Text | str, style: str = "") -> None:
        """Below a stage's name, indented also where a line is broken."""
        from rich.padding import Padding
        from rich.text import Text

        line = Text(text, style=style) if isinstance(text, str) else text
        self.console.print(Padding(line, (0, 0, 0, len(_MARGIN)), expand=False))

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self.console.print(Text(text, style=style))
