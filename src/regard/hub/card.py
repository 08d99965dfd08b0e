"""The README.md of a saved model: what can be read off it, and how to open it."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..models import Model
from .configs import Written


def changed_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    values = config.model_dump(mode="json")
    defaults = {name: field.default for name, field in ModelConfig.model_fields.items()}
    return {name: value for name, value in values.items() if getattr(config, name) != defaults[name]}


def model_card(model: Model, written: Written) -> str:
    """Facts only: nothing here goes stale, and the same model always gives the same card."""
    config = model.config
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    rows = "\n".join(f"| {field} | {value} |" for field, value in changed_fields(config).items())
    return f"""---
library_name: {"regard" if written.obstacles else "transformers"}
tags:
- regard
---

# {written.model_type}, {model.n_parameters:,} parameters

Architecture {config.architecture}, reads {config.source}, head {config.head}; numbers in {", ".join(kinds)}.
Saved by regard.

```python
import regard

model = regard.load("path/to/this/directory")
```

{_transformers(written)}

`manifest.json` holds the SHA-256 of every file here; `regard.load` checks them before it reads anything.

## Config

Fields that differ from regard's defaults; config.json has all of them.

| field | value |
|---|---|
{rows}
"""


def _transformers(written: Written) -> str:
    if written.obstacles:
        reasons = "\n".join(f"- {reason}" for reason in written.obstacles)
        return f"transformers has no twin of this model and cannot open this directory. In the way:\n\n{reasons}"
    name = written.fields["architectures"][0]
    return f"""transformers opens it too, as model_type `{written.model_type}`:

```python
from transformers import {name}

model = {name}.from_pretrained("path/to/this/directory")
```"""
