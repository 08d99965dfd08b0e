"""mypy accepts every Python snippet of the documents: what people copy from them is typed."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import markdown

# As in a user's project without settings of its own: their calls into regard are checked, not their annotations.
# What is imported keeps the settings of `make types`, so that its cache serves here too.
LENIENT = """
[[tool.mypy.overrides]]
module = {modules}
allow_redefinition = true
check_untyped_defs = false
disallow_any_generics = false
disallow_incomplete_defs = false
disallow_subclassing_any = false
disallow_untyped_defs = false
disable_error_code = ["redundant-expr", "truthy-bool", "possibly-undefined"]
extra_checks = false
ignore_missing_imports = true
implicit_reexport = true
strict_equality = false
warn_unused_ignores = false
"""
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
    settings = tmp_path / "pyproject.toml"
    lenient = LENIENT.replace("{modules}", json.dumps([Path(name).stem for name in sources]))
    settings.write_text((markdown.ROOT / "pyproject.toml").read_text(encoding="utf-8") + lenient, encoding="utf-8")
    files = [str(tmp_path / name) for name in sources]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={settings}", *files],
        cwd=markdown.ROOT,
        env={**os.environ, "MYPYPATH": "src"},
        capture_output=True,
        text=True,
    )
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert not [line for line in errors if "page_" in line], checked.stdout  # src has its own run
    refused = {match[0] for line in errors if (match := re.search(r"wrong_\d+\.py", line))}
    assert len(refused) == len(WRONG), errors
