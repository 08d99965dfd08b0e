"""How the documents' commands are run here: what makes them small, and what is checked where they cannot run.

A command that no entry of these tables knows fails the test.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from processor import HAS_VNNI

# ------------------------------------------------------------------------------------- run, but smaller

_FEW_STEPS = "train.steps=3 train.warmup=1 train.samples=0 train.eval_examples=2 train.log_every=1"
_ON_ONE_CORE = "train.precision=fp32 train.compile=off train.device=cpu"
_NARROW = "model.d_model=32 model.n_heads=2 model.d_ff=48 model.n_layers=1"
_SHORT = "data.max_len=48 model.max_len=64 train.batch_tokens=256"
_TEXT = f"{_FEW_STEPS} {_ON_ONE_CORE} {_NARROW} {_SHORT}"
_IMAGES = f"{_FEW_STEPS} {_ON_ONE_CORE} {_NARROW} train.batch_tokens=512"

_PAIRS = f"{_TEXT} data.epoch_examples=200 data.valid_rows=8 data.vocab_size=320"
# A sweep has many runs: each as short as it can be.
_SWEPT = (
    f"{_FEW_STEPS} {_ON_ONE_CORE} {_NARROW} data.max_len=32 model.max_len=32 train.batch_tokens=128 "
    "data.epoch_examples=40 data.valid_rows=4 data.vocab_size=320"
)
# The shoot-outs: a masked model and a language model of bytes. Their widths ask for other lengths.
_BYTES = (
    f"train.steps=2 train.warmup=1 train.eval_batches=1 {_ON_ONE_CORE} data.max_len=16 model.max_len=16 "
    "train.batch_tokens=64 model.d_model=16 model.n_heads=2 model.d_ff=16 model.n_layers=1"
)
_ONE_SEED = "--seeds 1 --jobs 1"

# The beginning of a command → words it is run with; a word that is there already is replaced, others are appended.
SMALLER: dict[str, str] = {
    "regard train --list": "",
    "regard train --fields": "",
    "regard train --resume": "",
    "regard train translate": _PAIRS,
    "regard train lm": f"{_TEXT} data.vocab_size=320 train.eval_batches=2",
    "regard train lm --preset induction": (
        f"{_FEW_STEPS} {_ON_ONE_CORE} model.d_model=32 model.n_heads=2 model.d_ff=32 train.batch_tokens=256 "
        "data.epoch_examples=40 data.valid_rows=8 train.eval_batches=2"
    ),
    "regard circuit": "--pairs 1 --steps 1",
    "regard lens": "--steps 1 --limit 4",
    "regard train mlm": f"{_TEXT} data.vocab_size=320 train.eval_batches=2",
    "regard train sft": f"{_TEXT} data.vocab_size=320",
    "regard train dpo": f"{_TEXT} data.vocab_size=320",
    "regard distill": "--limit 4 --beam 2",
    "regard backtranslate": "--sample",
    "regard train classify-images": _IMAGES,
    "regard train classify": f"{_TEXT} data.vocab_size=320",
    "regard train tag": f"{_TEXT} data.vocab_size=320",
    "regard train caption": f"{_IMAGES} model.max_len=32 data.max_len=32 data.valid_rows=4 data.epoch_examples=64",
    "regard train embed": f"{_TEXT} data.vocab_size=320",
    "regard train electra": f"{_TEXT} data.vocab_size=320 train.eval_batches=2 model.generator_width=16",
    "regard embed": "",
    "regard train answer": f"{_TEXT} data.vocab_size=320",
    "regard index": "",
    "regard answer": "--max-new-tokens 6",
    "regard train contrast": (
        f"{_IMAGES} model.image_size=16 model.patch_size=8 model.max_len=32 data.max_len=32 data.valid_rows=4 "
        "data.epoch_examples=64"
    ),
    "regard eval": "--limit 4",
    "regard average": "",
    "regard export": "--shapes 2 --no-compile --same-text 0",
    "regard bench attention": "--lengths 64,128 --mechanisms sdpa --heads 2 --width 16 --out runs/bench",
    "regard bench serve": "--clients 1 --requests 2 --max-tokens 2 --device cpu",
    "regard serve --new-key": "",
    "regard bench generate": "--batch 1 --beam 1 --weights fp32 --new 4",
    "regard generate": "--max-new-tokens 8",
    "regard translate": "",
    "regard classify": "",
    "regard caption": "",
    "regard look": "",
    "regard look runs/captioner --score": "",
    "regard look runs/captioner": "--max-new-tokens 3",
    "regard ablate": f"{_SWEPT} {_ONE_SEED}",
    "regard ablate --list": "",
    "regard ablate scaling": "",
    "regard ablate mechanisms": f"data.source=book.txt {_BYTES} {_ONE_SEED}",
    "regard ablate extrapolation": f"data.source=book.txt {_BYTES} {_ONE_SEED}",
    "regard ablate extrapolation data.source=data/wikitext-2/train.txt": f"data.vocab_size=320 {_BYTES} {_ONE_SEED}",
    "regard data describe": "",
    "regard info": "",
    "regard doctor": "",
    "regard cost": "",
    "regard --help": "",
    "regard learn": "",
    "for seed in": "",
    "done": "",
    "cat": "",
    "printf": "",
    "head": "",
    "ls": "",
}

# The beginning of a command → what must be true after it, where its exit status does not say so.
_RESULTS = "runs/*/cells/*/*/result.json"
_ALL_DONE = f'ls {_RESULTS}; test -z "$(grep -L \'"status": "done"\' {_RESULTS} || true)"'
AFTERWARDS: dict[str, str] = {
    "regard ablate": _ALL_DONE,
    "regard ablate mechanisms": _ALL_DONE,
    "regard ablate extrapolation": _ALL_DONE,
    "regard ablate extrapolation data.source=data/wikitext-2/train.txt": _ALL_DONE,
}

# What a single command is changed to, and why.
CHANGED: tuple[tuple[str, str, str], ...] = (
    (r"for seed in 0 1 2;", "for seed in 0;", "one seed says as much about the command as three"),
    (r"--seeds [2-9]", "--seeds 1", "and as much about an ablation"),
    (r"--jobs [2-9]", "--jobs 1", "one core"),
    (r"--shapes 50", "--shapes 2", "tests/export compares at fifty"),
    (r"--stride 64", "--stride 16", "the context is shorter here"),
    *(() if HAS_VNNI else ((r"\bonnx-int8 ", "onnx ", "refused where the processor's int8 products round"),)),
    (r"data\.source=data/(nsmc/binary_train.tsv|fashion-mnist)", r"\g<0> data.valid_rows=8", "a few lines stand there"),
)


def smaller(command: str) -> str | None:
    """The command as it is run here; None where no entry knows it."""
    beginning = beginning_of(command)
    if beginning is None:
        return None
    for pattern, instead, _ in CHANGED:
        command = re.sub(pattern, instead, command)
    words = SMALLER[beginning].split()
    if "train.init=" in command:  # which brings the sizes
        words = [word for word in words if not word.startswith("model.")]
    place = command.find(" | ") if " | " in command else len(command)
    body, rest = command[:place], command[place:]
    for key, value in _pairs(words):
        given = re.compile(rf"(?<=\s){re.escape(key)}[= ]\S+")
        if "=" in value:
            body = given.sub(value, body) if given.search(body) else f"{body} {value}"
        elif not given.search(body):
            body = f"{body} {value}"
    return body + rest


def afterwards(command: str) -> list[str]:
    """What is to be checked after it."""
    return [AFTERWARDS[known] for known in [beginning_of(command)] if known in AFTERWARDS]


def beginning_of(command: str) -> str | None:
    """The entry that knows most of the command."""
    return max((known for known in SMALLER if _begins(command, known)), key=len, default=None)


def _begins(command: str, known: str) -> bool:
    return command == known or command.startswith((f"{known} ", f"{known};"))


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    """Words as (field, word), options as (name, name and value)."""
    found: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("--"):
            found.append((word, word))
        elif "=" in word:
            found.append((word.partition("=")[0], word))
        else:
            name, so_far = found[-1]
            found[-1] = (name, f"{so_far} {word}")
    return found


# ------------------------------------------------------------------------------------- not run, but checked


@dataclass(frozen=True)
class Instead:
    """Why a command is not run as it stands, and the commands that are run in its place."""

    why: str
    run: Callable[[str], list[str]]


ROOT = Path(__file__).resolve().parents[2]


def _make(command: str) -> list[str]:
    return [f"make -C {ROOT} -n {' '.join(shlex.split(command)[1:])}"]


def _script(command: str) -> list[str]:
    """A script is there, and every option given to it stands in its text."""
    _, script, *words = shlex.split(command)
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    checks = [f"grep -q -e {shlex.quote(option)} {ROOT / script}" for option in options]
    return [f"test -f {ROOT / script}", *checks]


def _in_one_process(command: str) -> list[str]:
    words = command.partition("-m ")[2]
    made = smaller(words.replace("train.parallel=fsdp", "").replace("train.parallel=ddp", ""))
    assert made is not None, f"no entry knows how to run: {words}"
    return [made]


def _prepared(command: str) -> list[str]:
    """Read, checked, laid out and reported, with no time to train anything."""
    return [re.sub(r" --(minutes|jobs) \S+", "", command) + " --minutes 0 --jobs 1"]


INSTEAD: dict[str, Instead] = {
    "make": Instead("builds an environment, or runs everything", _make),
    "source .venv/bin/activate": Instead(
        "what `make install` built", lambda _: [f"grep -q 'VENV.*\\.venv' {ROOT}/Makefile"]
    ),
    "torchrun": Instead("several processes: tests/training/test_torchrun.py", _in_one_process),
    "python benchmarks/": Instead("measures for minutes", _script),
    "python tests/trust/promises.py": Instead(
        "tries everything at full size",
        lambda command: [f"test -e {ROOT / word}" for word in shlex.split(command, comments=True)[1:]],
    ),
    "pip install numpy": Instead("installed already", lambda _: ["python -c 'import numpy, onnxruntime, tokenizers'"]),
    "pip install --require-hashes": Instead(
        "gigabytes", lambda _: [f"grep -q -e --hash=sha256 {ROOT}/requirements.lock"]
    ),
    "npm install": Instead("downloads: tests/export/test_shipping.py runs what it finds", lambda _: ["true"]),
    **{
        name: Instead(
            "another program, on what the commands before it wrote", lambda _: ["test -f shipped/gguf/model.gguf"]
        )
        for name in ("llama-", "ollama", "lms", 'echo "FROM')
    },
    "node examples/": Instead("tests/export/test_shipping.py runs it where node is", _script),
    "python examples/": Instead("tests/test_examples.py runs them", _script),
    "regard ablate paper data=data/multi30k train.steps=1600": Instead("the one before it, longer", _prepared),
    "regard ablate mechanisms --seeds 1": Instead("the one before it, wider and with other rows", _prepared),
    "regard deploy": Instead("a Ray cluster: tests/serving/test_ray_replicas.py", lambda _: ["regard deploy --help"]),
    "regard translate runs/translator --file sentences.txt --out translated.txt --on ray": Instead(
        "a Ray cluster: tests/experiments/test_ray.py", lambda command: [command.replace("--on ray", "--on local")]
    ),
    "docker": Instead(
        "tests/serving/test_docker.py reads its files", lambda _: [f"test -f {ROOT}/docker/compose.yaml"]
    ),
    "curl": Instead("tests/serving/test_serve_page.py runs them", lambda _: ["true"]),
    "tensorboard": Instead("serves until it is stopped", lambda _: ["python -c 'import tensorboard'"]),
}
# Servers: started on a free port, asked for a page, and stopped as Ctrl-C stops them.
SERVERS = ("regard serve", "regard learn watch")


def instead(command: str) -> Instead | None:
    return next((entry for known, entry in INSTEAD.items() if command == known or command.startswith(known)), None)
