"""`regard doctor`: what is installed, what is missing, what it would add, and how to install it."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import typer

from regard.foundation.language import localise

from . import terminal
from .options import AsJson

_PACKAGES = tomllib.loads(Path(__file__).with_name("doctor_packages.toml").read_text(encoding="utf-8"))
CORE: dict[str, str] = _PACKAGES["core"]  # minimum versions
EXTRAS: dict[str, tuple[dict[str, str], str]] = {
    name: (extra["packages"], extra["adds"]) for name, extra in _PACKAGES["extras"].items()
}
_IMPORTED_AS = {"pillow": "PIL", "pyyaml": "yaml", "markdown-it-py": "markdown_it"}
_IMPORTED_AS |= {"faiss-cpu": "faiss", "llama-cpp-python": "llama_cpp"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    group: str
    name: str
    state: str  # ok, note (optional and missing), broken (the core needs it)
    text: str
    type: str = ""  # the command that fixes it


def doctor(as_json: AsJson = False) -> None:
    """Show what is installed, what is missing, what it would add, and how to install it.

    The exit code is 1 if something that the core needs is broken, else 0.
    """
    findings = list(examine())
    broken = [finding.name for finding in findings if finding.state == "broken"]
    if as_json:
        rows = [{name: text for name, text in asdict(finding).items() if text} for finding in findings]
        terminal.print_json({"ok": not broken, "findings": rows})
    else:
        marks = {"ok": "✓", "note": "·", "broken": "✗"}
        for group, members in groupby(findings, key=lambda finding: finding.group):
            print(localise(group))
            for finding in members:
                print(f"  {marks[finding.state]} {finding.name:14} {localise(finding.text)}")
                if finding.type:
                    print(f"    {'':14} {localise(finding.type)}")
            print()
        print(localise(f"broken: {', '.join(broken)}" if broken else "everything the core needs is here"))
    raise typer.Exit(1 if broken else 0)


def examine() -> Iterator[Finding]:
    """Yield all findings, in the order in which they are shown."""
    yield from _programs()
    core = list(_core())
    yield from core
    usable = all(finding.state != "broken" for finding in core)
    if usable:
        yield from _devices()
        yield _attention()
    for extra, (packages, adds) in EXTRAS.items():
        yield _extra(extra, packages, adds)
    if usable:
        yield from _surroundings()


def _programs() -> Iterator[Finding]:
    from regard import __version__

    yield Finding("versions", "regard", "ok", f"{__version__}  {Path(__file__).resolve().parents[1]}")
    state, hint = ("ok", "") if sys.version_info >= (3, 11) else ("broken", "Python 3.11 or later is needed")
    yield Finding("versions", "python", state, f"{platform.python_version()}  {sys.executable}", hint)
    yield Finding("versions", "system", "ok", platform.platform())


def _core() -> Iterator[Finding]:
    for name, least in CORE.items():
        version, problem, install = version_of(name), "", f'pip install "{name}>={least}"'
        try:
            if version is not None:
                importlib.import_module(_IMPORTED_AS.get(name, name))
        except Exception as failure:  # a broken package may raise anything
            problem, install = f"cannot be imported: {_one_line(failure)}", f"{install} --force-reinstall"
        if version is None:
            yield Finding("core", name, "broken", "not installed", install)
        elif problem or numbers(version) < numbers(least):
            yield Finding("core", name, "broken", f"{version}, {problem or f'older than {least}'}", install)
        else:
            yield Finding("core", name, "ok", version)


def _extra(extra: str, packages: dict[str, str], adds: str) -> Finding:
    """The finding about an extra; its packages are not imported, which would take seconds."""
    versions = {name: version_of(name) for name in packages}
    missing = [
        name for name, version in versions.items() if version is None or find_spec(_IMPORTED_AS.get(name, name)) is None
    ]
    old = [name for name in packages if name not in missing and numbers(versions[name]) < numbers(packages[name])]
    if not missing and not old:
        present = ", ".join(f"{name} {version}" for name, version in versions.items())
        return Finding("extras", extra, "ok", f"{present}; adds: {adds}")
    problems = [f"{name} is not installed" for name in missing]
    problems += [f"{name} {versions[name]} is older than {packages[name]}" for name in old]
    return Finding("extras", extra, "note", f"{', '.join(problems)}; adds: {adds}", f'pip install "regard[{extra}]"')


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _one_line(failure: Exception) -> str:
    return " ".join(str(failure).split()) or type(failure).__name__


def numbers(version: str | None) -> tuple[int, ...]:
    """`2.13.0+cpu` → (2, 13, 0), for comparison."""
    parts = (version or "").partition("+")[0].split(".")
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def _devices() -> Iterator[Finding]:
    import torch

    from regard.foundation.device import n_cores

    cores = n_cores()
    threads = torch.get_num_threads()
    limit = os.environ.get("OMP_NUM_THREADS")
    why = f" (OMP_NUM_THREADS={limit})" if limit else ""
    hint = "unset OMP_NUM_THREADS" if limit and threads < cores else ""
    text = f"{cores} cores, torch uses {threads} threads{why}, {platform.machine()}"
    yield Finding("devices", "cpu", "note" if hint else "ok", text, hint)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            yield Finding("devices", f"cuda:{index}", "ok", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    else:
        built = torch.version.cuda
        why = f"none found, though torch is built for CUDA {built}" if built else "none; this torch is built without"
        yield Finding("devices", "cuda", "note", f"{why}: everything runs on the processor")
    if torch.backends.mps.is_available():
        yield Finding("devices", "mps", "ok", "Apple GPU: --device mps, train.device=mps")
    if compiler := shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        yield Finding("devices", "compiler", "ok", f"{compiler}: torch.compile works on the processor")
    else:
        text = "no C++ compiler: training on the processor runs uncompiled"
        yield Finding("devices", "compiler", "note", text, "apt install g++")


def _attention() -> Finding:
    """Compute attention with the fused path and compare it with the formula."""
    import torch

    from regard import attend
    from regard.attention.masks import causal

    q, k, v = (torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    try:
        fast = attend(q, k, v, mask=causal()).output
        slow = attend(q, k, v, mask=causal(), backend="reference").output
    except Exception as failure:  # a failure of torch is reported as the finding
        return Finding("devices", "attention", "broken", f"cannot be computed: {_one_line(failure)}")
    worst = float((fast - slow).abs().max())
    if not worst < 1e-4:
        return Finding("devices", "attention", "broken", f"the fused path is {worst:.2g} away from the formula")
    return Finding("devices", "attention", "ok", f"the fused path agrees with the formula to {worst:.1e}")


def _surroundings() -> Iterator[Finding]:
    from regard.foundation.plotting import fonts_for

    fonts, missing = fonts_for("한글을읽다")
    if missing:
        text = "none with Korean letters: they become boxes in pictures; pages and the explorer are not affected"
        yield Finding("around", "fonts", "note", text, "apt install fonts-noto-cjk")
    else:
        yield Finding("around", "fonts", "ok", f"Korean labels in pictures: {fonts[-1]}")
    yield Finding("around", "browser", "ok", "any will do; none is needed but to look at pages and the explorer")
    from regard.foundation.files import cache_folder

    for name, folder, otherwise in (
        ("cache", cache_folder(), "large data is read and split into tokens anew in each run"),
        ("here", Path.cwd(), "runs are written to runs/ here: go elsewhere, or give train.out=DIR"),
        ("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a directory you may write to"),
    ):
        yield _writable(name, folder, otherwise, needed=name == "temporary")


def _writable(name: str, folder: Path, otherwise: str, *, needed: bool) -> Finding:
    """Whether a file can be created in a folder, or in its nearest existing parent."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".regard-"):
            pass
    except OSError as failure:
        why = f"{folder} cannot be written to ({failure.strerror or failure}): {otherwise}"
        return Finding("around", name, "broken" if needed else "note", why)
    free = shutil.disk_usage(existing).free / 2**30
    return Finding("around", name, "ok", f"{folder} can be written to, {free:.0f} GiB free")
