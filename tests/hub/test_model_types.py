"""The table of model types in docs/ship.md: what is read, how it is saved, and who else runs it.

python tests/hub/test_model_types.py --update    writes the table anew
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from transformers import AutoConfig

from regard.export.ctranslate2_export import obstacles as ctranslate2_obstacles
from regard.hub import write_config
from regard.hub.families import BY_TYPE
from regard.hub.gguf_file import gguf_obstacles
from regard.hub.hf_family import ForeignFields

PAGE = Path(__file__).parents[2] / "docs" / "ship.md"
BEGIN, END = "<!-- model types: python tests/hub/test_model_types.py --update -->", "<!-- end of model types -->"


def row(model_type: str) -> list[str]:
    """Of the sizes that transformers starts from."""
    fields = AutoConfig.for_model(model_type).to_dict()
    for name in ("eos_token_id", "bos_token_id", "decoder_start_token_id"):  # some types leave them to a checkpoint
        fields[name] = fields.get(name) or 1
    config = BY_TYPE[model_type].read(ForeignFields(fields))
    written = write_config(config)
    assert not written.obstacles, (model_type, written.obstacles)
    runs = {"CTranslate2": ctranslate2_obstacles(config), "llama.cpp": gguf_obstacles(config)}
    others = ", ".join(name for name, reasons in runs.items() if not reasons)
    return [f"`{model_type}`", config.architecture, f"`{written.model_type}`", others or "–"]


def table() -> str:
    rows = [["model type", "architecture", "saved as", "also run by"], ["---"] * 4, *map(row, BY_TYPE)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def test_the_table_is_current_and_long() -> None:
    assert len(BY_TYPE) >= 34
    page = PAGE.read_text(encoding="utf-8")
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == table()


if __name__ == "__main__" and "--update" in sys.argv:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", text, flags=re.S),
        encoding="utf-8",
    )
