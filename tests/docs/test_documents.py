"""Every command and every snippet of the README and the documents runs, in the order in which a reader meets it."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import signal
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_shell import Shell

from . import markdown, table, world
from .markdown import Block

# Pages whose blocks take more than a few seconds.
SLOW = {
    "README.md",
    *(f"docs/{name}.md" for name in ("ablations", "build", "cost", "look", "research", "results", "ship")),
    *(f"docs/{folder}/{page}.md" for folder in ("learn", "ko/learn") for page in ("6-the-transformer", "7-generation")),
}
RUN = {"sh", "pycon", "python"}
# Shown, not run: output, trees, files to write, a page's own words.
SHOWN = {"text", "toml", "yaml", "json", "mermaid", "csv", "js"}


def pages(*languages: str) -> list[Any]:
    """The documents that have blocks of these languages."""
    found = [
        file for file in markdown.documents() if any(block.language in languages for block in markdown.blocks(file))
    ]
    names = [markdown.name_of(file) for file in found]
    return [
        pytest.param(file, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for file, name in zip(found, names, strict=True)
    ]


def is_translated(file: Path) -> bool:
    """Korean pages have the commands of the English ones (test_languages.py), which are run once."""
    return file.name.endswith(".ko.md") or "ko" in file.relative_to(markdown.ROOT).parts


@pytest.mark.parametrize("file", pages(*RUN))
def test_a_page_does_what_it_says(file: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    here = tmp_path / "here"
    blocks = [block for block in markdown.blocks(file) if block.language in RUN or block.title is not None]
    if is_translated(file):
        # What a chapter's sessions need is on the page itself; elsewhere a command before it may have written a run.
        typed = ("pycon", "python") if file.parent.name == "learn" else ("pycon",)
        blocks = [block for block in blocks if block.language in typed]
    if any(block.language == "sh" for block in blocks):
        world.make(here)
    if re.search(r"\bdata/(shakespeare|multi30k|wikitext-2)\b", file.read_text(encoding="utf-8")):
        world.make_data_sets(here)
    here.mkdir(exist_ok=True)
    names: dict[str, Any] = {}
    exported: list[str] = []
    before, seed = Path.cwd(), torch.random.get_rng_state()
    os.chdir(here)
    try:
        for block in blocks:
            if block.title is not None:
                (here / block.title).write_text(block.text, encoding="utf-8")
            elif block.language == "sh":
                exported = run_commands(block, request.getfixturevalue("bash"), here, exported)
            elif block.language == "pycon":
                run_session(block, names)
            else:
                run_python(block, names)
    finally:
        os.chdir(before)
        torch.random.set_rng_state(seed)


def run_session(block: Block, names: dict[str, Any]) -> None:
    """What is typed gives what is shown."""
    test = doctest.DocTestParser().get_doctest(block.text, names, block.where, str(block.file), block.line)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(
        test, out=said.append, clear_globs=False
    )
    names.update(test.globs)
    assert result.attempted > 0, f"{block.where} shows no session"
    assert result.failed == 0, "".join(said)


def run_python(block: Block, names: dict[str, Any]) -> None:
    """A piece of a program."""
    exec(compile(block.text, block.where, "exec"), names)


def run_commands(block: Block, bash: Shell, here: Path, exported: list[str] | None = None) -> list[str]:
    """Line by line; the lines of a loop together. What is exported holds for the rest of the page, and is returned."""
    loop: list[str] = []
    exported = list(exported or ())
    for command in block.commands():
        if command.startswith("export "):
            exported.append(command)
            continue
        if command.startswith(table.SERVERS) and "--new-key" not in command and "--out" not in command:
            check_server(shlex.split(command)[1:], bash, here, exported)
            continue
        entry = table.instead(command)
        lines = entry.run(command) if entry is not None else [table.smaller(command), *table.afterwards(command)]
        assert None not in lines, f"{block.where}: no table knows how to run: {command}"
        if loop or command.startswith("for "):
            loop += [line for line in lines if line is not None]
            if command != "done":
                continue
            lines, loop = ["\n".join(loop)], []
        for line in lines:
            done = bash.run("\n".join([*exported, str(line)]), here)
            said = f"{block.where}: {command}\nrun as: {line}\n{done.stdout}{done.stderr}"
            assert done.returncode == 0, said
    return exported


def check_server(words: list[str], bash: Shell, here: Path, exported: list[str]) -> None:
    """It says where it is, answers there, and goes when it is told to."""
    server = bash.start([*words, "--port", "0", "--no-open"], here, exported)
    said = ""
    late = threading.Timer(400, server.kill)  # its output then ends
    late.start()
    try:
        assert server.stdout is not None
        for line in server.stdout:
            said += line
            if found := re.search(r"http://[\w.:\[\]]+/?\S*", line):
                address, content = (f"{found[0]}/models", b'"object"') if "--api" in words else (found[0], b"<html")
                if "--config" in words:  # which names keys
                    address, content = found[0].replace("/v1", "/ready"), b"ready"
                with urllib.request.urlopen(address, timeout=120) as page:
                    assert content in page.read()
                break
        else:
            pytest.fail(f"{words} gave no address:\n{said}")
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=120) in (0, 130), said
    finally:
        late.cancel()
        if server.poll() is None:
            server.kill()
            server.wait(timeout=120)
        if server.stdout is not None:
            server.stdout.close()


# -------------------------------------------------------------------------------- the tests themselves


def test_every_block_is_run_or_known_to_be_shown() -> None:
    strange = {
        block.where: block.language
        for file in markdown.documents()
        for block in markdown.blocks(file)
        if block.language not in RUN | SHOWN
    }
    assert not strange, f"blocks in languages nobody runs: {strange}"


def is_known(command: str) -> bool:
    done_here = command.startswith((*table.SERVERS, "export "))
    return done_here or table.instead(command) is not None or table.smaller(command) is not None


def test_every_command_is_known_to_a_table() -> None:
    unknown = [
        f"{block.where}: {command}"
        for file in markdown.documents()
        for block in markdown.blocks(file)
        if block.language == "sh"
        for command in block.commands()
        if not is_known(command)
    ]
    assert not unknown, unknown


def test_the_tables_hold_nothing_that_no_page_says() -> None:
    blocks = [block for file in markdown.documents() for block in markdown.blocks(file)]
    commands = [command for block in blocks if block.language == "sh" for command in block.commands()]
    ran = [command for command in commands if table.instead(command) is None]
    idle = set(table.SMALLER) - {table.beginning_of(command) for command in ran}
    idle |= set(table.AFTERWARDS) - set(table.SMALLER)
    idle |= {pattern for pattern, *_ in table.CHANGED if not any(re.search(pattern, command) for command in commands)}
    idle |= {known for known in table.INSTEAD if not any(command.startswith(known) for command in commands)}
    assert not idle, f"nobody needs these entries any more: {sorted(idle)}"


def test_words_are_made_smaller_and_nothing_else_passes() -> None:
    made = table.smaller("regard train lm data.source=book.txt train.steps=3000")
    assert made is not None
    assert "train.steps=3 " in made
    assert "3000" not in made
    assert "data.source=book.txt" in made
    assert table.smaller("regard eval runs/a --limit 9") == "regard eval runs/a --limit 9"
    assert table.smaller("regard trian lm") is None
    assert table.smaller("regard eval runs/a | head -3") == "regard eval runs/a --limit 4 | head -3"


def test_a_wrong_session_and_a_failing_command_are_seen(bash: Shell, tmp_path: Path) -> None:
    file = markdown.ROOT / "README.md"
    with pytest.raises(AssertionError):
        run_session(Block(file, 1, "pycon", ">>> 1 + 1\n3\n"), {})
    with pytest.raises(AssertionError, match=r"there is no train\.stops"):
        run_commands(Block(file, 1, "sh", "regard train lm train.stops=3\n"), bash, tmp_path)
    with pytest.raises(AssertionError, match="no table knows"):
        run_commands(Block(file, 1, "sh", "rm -rf /\n"), bash, tmp_path)
    assert bash.run("regard --version | cat", tmp_path).stdout.startswith("regard ")


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_killed_wherever_it_runs(bash: Shell, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("all work and no play\n" * 400, encoding="utf-8")
    endless = table.smaller("regard train lm data.source=book.txt train.out=runs/endless")
    assert endless is not None
    endless = endless.replace("train.steps=3 ", "train.steps=9000000 ")
    for command, seconds in (("sleep 90", 0.5), (endless, 2), (endless, 10), (endless, 60)):
        began = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired, match=f"timed out after {seconds} seconds"):
            bash.run(command, tmp_path, seconds)  # returns when nobody holds its output any more
        assert time.monotonic() - began < seconds + 60
        if (tmp_path / "runs/endless").is_dir():
            return
    pytest.fail("the run was not under way, even after a minute")
