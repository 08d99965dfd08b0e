"""What to type next: a clause after the sentence that says what went wrong, where the command line knows more of it.

Failures come from rooms that know nothing of commands. Here their words meet what was typed: a missing directory gets
the nearest run, a model that cannot do what was asked gets the command that fits it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from regard.errors import Diverged

_MODEL_COMMANDS = ("generate", "translate", "classify", "caption", "look", "export", "serve", "info", "eval", "cost")
# By what a model is for, in the words of `regard train`.
_COMMAND_OF = {
    **{"lm": "generate", "translate": "translate", "caption": "caption"},
    **{"classify": "classify", "classify-images": "classify", "mlm": "look", "features": "look"},
}
_CANNOT = ("does not translate", "does not caption", "does it know classes", "writes no text", "not text: regard.")
_MOST = 500
_TYPED = (
    *(("bad_lines='skip'", "data.bad_lines=skip"), ("truncate=True", "--truncate")),
    *((", with sample=False", ""), ("or sample=True", "or --temperature T")),
)


def advise(typed: Sequence[str], failure: Exception) -> str:
    """``; did you mean runs/demo?``, or nothing where nothing better is known."""
    said = str(failure)
    command, words = _command(typed)
    if missing := re.search(r"there is no (?:run and no model )?directory '?([^';]+)'?", said):
        return _no_directory(missing[1], command)
    if found := re.match(r"(.+) has no run\.json, so it is no training run", said):
        return _no_run(found[1])
    if found := re.match(r"(.+) has no checkpoint yet|(.+) is a run that has not come to its end", said):
        return f"; regard train --resume {found[1] or found[2]} goes on with it"
    if found := re.match(r"(.+) has no config\.json, so it is no model directory", said):
        return _no_model(found[1])
    if found := re.search(r"there is no file ([^;]+)", said):
        return _near_file(found[1])
    lines = [str(line) for line in getattr(failure, "lines", ())]
    if lines and all("no such file" in line for line in lines) and not any("data.images=" in word for word in typed):
        return "; data.images=FOLDER says where the images lie"
    if isinstance(failure, Diverged):
        return "; a smaller train.lr or a longer train.warmup often helps"
    if "learns from" in said and (found := re.match(r"(\S+) holds ", said)):
        return f"; regard data describe {found[1]} shows what was read"
    if any(words_of in said for words_of in _CANNOT) and command in _MODEL_COMMANDS:
        return _fitting(words)
    if said.endswith("no such file") and command in ("classify", "look", "caption"):
        return "; this model reads image files"
    return ""


def in_command_line_terms(said: str) -> str:
    """Options of the library as they are typed here."""
    for library, here in _TYPED:
        said = said.replace(library, here)
    return said


def _command(typed: Sequence[str]) -> tuple[str, list[str]]:
    """The command and the words after it, options left out."""
    words = [word for word in typed[1:] if not word.startswith("-")]
    return (words[0], words[1:]) if words else ("", [])


def _no_directory(path: str, command: str) -> str:
    from regard.presets import PRESETS

    if path in PRESETS:
        return f"; {path} is a preset: regard train TASK model={path} trains one, regard cost {path} says what it costs"
    if (near := difflib.get_close_matches(path, PRESETS, 1, 0.7)) and command in ("bench", "cost"):
        return f"; did you mean {near[0]}?"
    runs = list(_models_near(Path(path)))
    return _nearest(path, runs) or "; regard demo makes one, regard train --list shows how to train others"


def _no_run(path: str) -> str:
    if (Path(path) / "config.json").is_file():
        return f"; it is a model: regard train TASK train.init={path} starts from its weights"
    runs = [run for run in _models_near(Path(path)) if (Path(run) / "run.json").is_file()]
    return _nearest(path, runs) or "; regard train --list shows what can be trained"


def _no_model(path: str) -> str:
    return _nearest(path, list(_models_near(Path(path)))) or "; regard train --list shows how to train one"


def _nearest(path: str, runs: Sequence[str]) -> str:
    """One that is spelt alike, else the newest."""
    if near := difflib.get_close_matches(path, runs, 1, 0.6):
        return f"; did you mean {near[0]}?"
    return f"; the newest here is {runs[-1]}" if runs else ""


def _models_near(path: Path) -> Iterator[str]:
    """Runs and model directories beside a path, in it, and in runs/, the newest last."""
    found: dict[str, float] = {}
    for folder in (path.parent, path, Path("runs"), Path("runs/demo")):
        if not folder.is_dir():
            continue
        for place in list(folder.iterdir())[:_MOST]:
            mark = next((place / name for name in ("run.json", "config.json") if (place / name).is_file()), None)
            if mark is not None and not place.name.startswith("."):
                found[str(place)] = mark.stat().st_mtime
    yield from sorted(found, key=found.__getitem__)


def _near_file(path: str) -> str:
    folder = Path(path).parent
    if not folder.is_dir():
        return ""
    names = [str(folder / place.name) for place in list(folder.iterdir())[:_MOST]]
    near = difflib.get_close_matches(str(Path(path)), names, 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _fitting(words: Sequence[str]) -> str:
    """The command that suits a model."""
    from regard.io import describe
    from regard.web.served_models import task_name

    try:
        task = task_name(describe(words[0], verify=False).config)
    except Exception:  # advice is never worth a second failure
        return ""
    return f"; it is for {task}: regard {_COMMAND_OF[task]} {words[0]}"
