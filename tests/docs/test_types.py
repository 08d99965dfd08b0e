"""mypy accepts every Python snippet of the documents: what people copy from them is typed."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import markdown

# As in a user's project without settings of its own: their calls into regard are checked, not their annotations.
OPTIONS = (f"--config-file={os.devnull}", "--python-version=3.11", "--allow-redefinition", "--ignore-missing-imports")
OPENED = "import regard\nmodel = regard.build('gpt2')\nlook = regard.look(model, 'a')\n"
WRONG = ("look.entropy('self', 1)", "regard.build(3)", "look.weights(layer='first')", "regard.train(7)")


def snippet_source(block: markdown.Block) -> str:
    """A block's statements, prompts and printed output left out."""
    if block.language == "python":
        return block.text
    examples = doctest.DocTestParser().get_examples(block.text)
    return re.sub(r"^_ = ", "", "".join(example.source for example in examples), flags=re.MULTILINE)


@pytest.mark.slow
def test_mypy_accepts_every_snippet_and_refuses_wrong_calls(tmp_path: Path) -> None:
    sources = {f"wrong_{n}.py": f"{OPENED}{call}\n" for n, call in enumerate(WRONG)}
    for file in markdown.documents():
        snippets = [snippet_source(block) for block in markdown.blocks(file) if block.language in ("python", "pycon")]
        if snippets:
            page = re.sub(r"\W+", "_", markdown.name_of(file))
            sources[f"page_{page}.py"] = "\n".join(snippets)
    for name, source in sources.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", *OPTIONS, f"--cache-dir={tmp_path / 'cache'}"]
    files = [str(tmp_path / name) for name in sources]
    checked = subprocess.run([*command, *files], cwd=markdown.ROOT / "src", capture_output=True, text=True)
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert not [line for line in errors if "page_" in line], checked.stdout  # src has its own run
    refused = {match[0] for line in errors if (match := re.search(r"wrong_\d+\.py", line))}
    assert len(refused) == len(WRONG), errors
