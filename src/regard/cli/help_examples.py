"""Examples at the end of each command's help, read from help_examples.txt."""

from __future__ import annotations

from pathlib import Path

import typer


def _load_examples() -> dict[str, list[tuple[str, str]]]:
    examples: dict[str, list[tuple[str, str]]] = {}
    rows: list[tuple[str, str]] = []
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = examples[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            typed, _, what_for = line.partition("  # ")
            rows.append((typed, what_for))
    return examples


EXAMPLES = _load_examples()  # by the command's name: what is typed, what for; `regard` is the program itself


def epilog(name: str) -> str | None:
    """The examples of a command as they stand at the end of its help; None where there are none."""
    if name not in EXAMPLES:
        return None
    lines = ["[bold]Examples[/bold]"]
    for row in EXAMPLES[name]:
        typed, what_for = (text.replace("[", r"\[") for text in row)  # square brackets are markup in a help text
        lines += [f"[dim]# {what_for}[/dim]", typed]
    return "\n".join(lines)


def add_examples(app: typer.Typer, path: str = "") -> None:
    """Give every command of the program its examples."""
    for command in app.registered_commands:
        name = f"{path} {command.name}".strip()
        command.epilog = epilog(name) or command.epilog
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{path} {group.name}".strip())
