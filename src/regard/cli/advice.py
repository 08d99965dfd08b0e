"""Hints that the command line adds to the library's error messages.

A missing directory gets the name of the nearest run; a model that does not suit a command gets the command that does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from regard.errors import Diverged
from regard.foundation.checks import did_you_mean, nearest_name

_MODEL_COMMANDS = (
    *("generate", "translate", "backtranslate", "classify", "caption", "embed", "answer", "look", "export", "serve"),
    *("info", "eval", "cost"),
)
_COMMAND_OF_TASK = {  # if their names differ
    **dict.fromkeys(("lm", "sft", "dpo"), "generate"),
    **dict.fromkeys(("classify-images", "tag", "contrast"), "classify"),
    **dict.fromkeys(("mlm", "features"), "look"),
}
_UNABLE = (
    *("does not continue", "does not translate", "does not caption", "but classification needs", "writes no text"),
    *("does not embed", "not text: regard."),
)
_MAX_ENTRIES = 500
_OPTION_SPELLINGS = {  # spelling in the library: on the command line
    "bad_lines='skip'": "data.bad_lines=skip",
    ": columns=": ": data.columns=",
    ": column=": ": --column ",
    "truncate=True": "--truncate",
    ", with sample=False": "",
    "or sample=True": "or --temperature T",
    "logit_bias": "--bias",
}


def advise(command_line: Sequence[str], failure: Exception) -> str:
    """A hint such as ``; did you mean runs/demo?``, or "" if there is none."""
    message = str(failure)
    words = [word for word in command_line[1:] if not word.startswith("-")]
    command = words[0] if words else ""
    if match := re.search(r"(?<!written: )there is no (?:run and no model )?directory '?([^';]+)'?", message):
        return _advise_directory(match[1], command)
    if match := re.match(r"(.+) has no run\.json, so it is not a training run", message):
        if (Path(match[1]) / "config.json").is_file():
            return f"; it is a model: regard train TASK train.init={match[1]} starts from its weights"
        runs = [run for run in _models_near(match[1]) if (Path(run) / "run.json").is_file()]
        return _nearest_or_newest(match[1], runs) or "; regard train --list shows what can be trained"
    if match := re.match(r"(.+) has no checkpoint yet|(.+) is an unfinished run", message):
        return f"; regard train --resume {match[1] or match[2]} resumes it"
    if match := re.match(r"(.+) has no config\.json, so it is not a model directory", message):
        return _nearest_or_newest(match[1], _models_near(match[1])) or "; regard train --list shows how to train one"
    if match := re.search(r"there is no file ([^;]+)", message):
        return _nearest(match[1], _entries(Path(match[1]).parent))
    if match := re.search(r"there is no folder ([^;]+)", message):
        return _nearest(match[1], [name for name in _entries(Path(match[1]).parent) if Path(name).is_dir()])
    if match := re.match(r"'([^']+)' is not of the form section\.field=value", message):
        return _advise_word(match[1])
    lines = [str(line) for line in getattr(failure, "lines", ())]
    if all("invalid UTF-8" in text for text in lines or [message]):
        return f"; {'data.encoding=…' if lines else '--encoding'} sets another encoding"
    images_given = any("data.images=" in word for word in command_line)
    if lines and all("no such file" in line for line in lines) and not images_given:
        return "; data.images=FOLDER sets the folder of the images"
    if isinstance(failure, Diverged):
        return "; a smaller train.lr or a longer train.warmup often helps"
    if "learns from" in message and (match := re.match(r"(\S+) holds ", message)):
        return f"; regard data describe {match[1]} shows what was read"
    if any(part in message for part in _UNABLE) and command in _MODEL_COMMANDS:
        return _advise_command(words[1:])
    if message.endswith("no such file") and command in ("classify", "look", "caption"):
        return "; this model reads image files"
    return ""


def in_command_line_terms(message: str) -> str:
    """A message with the library's options spelt as on the command line."""
    for library, option in _OPTION_SPELLINGS.items():
        message = message.replace(library, option)
    return re.sub(r"^on=", "--on ", message)


def _advise_directory(path: str, command: str) -> str:
    from regard.presets import PRESETS

    if path in PRESETS:
        return f"; {path} is a preset: regard train TASK model={path} trains one, regard cost {path} says what it costs"
    if command in ("bench", "cost") and (hint := did_you_mean(path, PRESETS, 0.7, dotted=False)):
        return hint
    hint = _nearest_or_newest(path, _models_near(path))
    return hint or "; regard demo makes one, regard train --list shows how to train others"


def _advise_word(word: str) -> str:
    """A hint for a word without "=", as in ``train translate pairs.tsv``."""
    from regard.data.corpora import CORPORA
    from regard.presets import PRESETS

    if word in PRESETS:
        return f"; did you mean model={word}?"
    is_file = Path(word).exists() or Path(word).suffix in (".tsv", ".csv", ".jsonl", ".json", ".txt")
    return f"; did you mean data={word}?" if is_file or word in CORPORA else ""


def _nearest_or_newest(path: str, runs: Sequence[str]) -> str:
    return _nearest(path, runs) or (f"; the newest here is {runs[-1]}" if runs else "")


def _nearest(path: str, paths: Sequence[str]) -> str:
    """``; did you mean runs/demo?``, judged by the last parts of the paths, as those in a folder begin alike."""
    by_name = {Path(candidate).name: candidate for candidate in paths}
    nearest = nearest_name(Path(path).name, by_name, dotted=False)
    return did_you_mean(path, paths, 0.85, dotted=False) if nearest is None else f"; did you mean {by_name[nearest]}?"


def _entries(folder: Path) -> list[str]:
    return [str(folder / entry.name) for entry in list(folder.iterdir())[:_MAX_ENTRIES]] if folder.is_dir() else []


def _models_near(path: str) -> list[str]:
    """Runs and model directories next to a path, in it, and in runs/; the newest last."""
    times: dict[str, float] = {}
    for folder in (Path(path).parent, Path(path), Path("runs"), Path("runs/demo")):
        for entry in list(folder.iterdir())[:_MAX_ENTRIES] if folder.is_dir() else ():
            marker = next((entry / name for name in ("run.json", "config.json") if (entry / name).is_file()), None)
            if marker is not None and not entry.name.startswith("."):
                times[str(entry)] = marker.stat().st_mtime
    return sorted(times, key=times.__getitem__)


def _advise_command(words: Sequence[str]) -> str:
    """A hint at the command that suits the model named by ``words``."""
    from regard.io import describe
    from regard.web.served_models import task_name

    try:
        task = task_name(describe(words[0], verify=False).config)
    except Exception:  # a hint must not cause a second failure
        return ""
    options = " --classes NAMES" if task == "contrast" else ""
    return f"; it is for {task}: regard {_COMMAND_OF_TASK.get(task, task)} {shlex.quote(words[0])}{options}"
