"""Files of a release: the hashes of all dependencies, a list of them (SBOM), and a reproducible wheel.

python tools/release.py lock     # requirements.lock: every pin of constraints.txt with its hashes on PyPI
python tools/release.py sbom     # dist/regard.cdx.json: the installed dependencies of regard, as CycloneDX JSON
python tools/release.py wheel    # dist/regard-….whl: the same bytes on every machine
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
INDEX = "https://pypi.org/simple"
EXTRAS = ("hub", "export", "serve", "api", "data")
_HEADER = """\
# Every pin of constraints.txt with the hashes of its files on PyPI; written by `make lock`. To install exactly these:
# pip install --require-hashes -r requirements.lock && pip install --no-deps regard
"""


def normal(name: str) -> str:
    """A project's name as PyPI spells it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """Versions by name."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


# ---- hashes


def hashes_on_index(page: str, name: str, version: str) -> list[str]:
    """SHA-256 of every wheel and source archive of a version, from the index's page (PEP 503)."""
    found = set()
    for file, sha256 in re.findall(r'href="[^"]*?/([^/"#]+)#sha256=([0-9a-f]{64})"', page):
        stem = file.removesuffix(".tar.gz").removesuffix(".zip")
        parts = file.split("-")[:2] if file.endswith(".whl") else stem.rsplit("-", 1)
        if len(parts) == 2 and normal(parts[0]) == name and parts[1] == version:
            found.add(sha256)
    return sorted(found)


def lock() -> None:
    def fetch(pin: tuple[str, str]) -> str:
        name, version = pin
        with urlopen(Request(f"{INDEX}/{name}/", headers={"Accept": "text/html"}), timeout=60) as page:
            hashes = hashes_on_index(page.read().decode(), name, version)
        if not hashes:
            raise SystemExit(f"{INDEX}/{name}/ has no file of version {version}")
        return " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{sha256}" for sha256 in hashes)])

    with ThreadPoolExecutor(8) as threads:
        entries = list(threads.map(fetch, sorted(pins().items())))
    (ROOT / "requirements.lock").write_text(_HEADER + "\n".join(entries) + "\n", encoding="utf-8")
    print(f"requirements.lock: {len(entries)} packages")


def read_lock(file: Path = ROOT / "requirements.lock") -> dict[tuple[str, str], list[str]]:
    """Hashes by name and version."""
    text = file.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {
        (name, version): [word.removeprefix("--hash=sha256:") for word in words]
        for (name, _, version), words in ((line[0].partition("=="), line[1:]) for line in lines)
    }


# ---- SBOM


def requirements(package: Distribution, extras: tuple[str, ...] = ()) -> Iterator[str]:
    """Names of the packages that a package requires on this machine."""
    from packaging.requirements import Requirement

    for text in package.requires or ():
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield normal(need.name)


def needed(extras: tuple[str, ...] = EXTRAS) -> dict[str, tuple[Distribution, list[str]]]:
    """The installed packages that regard requires, directly or not, each with its own requirements."""
    found: dict[str, tuple[Distribution, list[str]]] = {}
    todo = ["regard"]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = package, sorted(set(requirements(package, extras if name == "regard" else ())))
        todo += found[name][1]
    return dict(sorted(found.items()))


def sbom() -> dict[str, Any]:
    """The SBOM as CycloneDX 1.6, without a time stamp, so that the same installation gives the same document."""
    hashes, packages = read_lock(), needed()

    def reference(name: str) -> str:
        return f"pkg:pypi/{name}@{packages[name][0].version.partition('+')[0]}"

    def component(name: str) -> dict[str, Any]:
        meta, version = packages[name][0].metadata, packages[name][0].version.partition("+")[0]
        about: dict[str, Any] = {"type": "library", "bom-ref": reference(name), "name": name, "version": version}
        about["purl"] = reference(name)
        licence = meta.get("License-Expression") or (meta.get("License") or "").partition("\n")[0].strip()
        if licence:
            about["licenses"] = [{"license": {"name": licence[:200]}}]
        if known := hashes.get((name, version)):
            about["hashes"] = [{"alg": "SHA-256", "content": sha256} for sha256 in known]
        return about

    others = [name for name in packages if name != "regard"]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component("regard") | {"type": "application"}},
        "components": [component(name) for name in others],
        "dependencies": [
            {"ref": reference(name), "dependsOn": [reference(each) for each in needs if each in packages]}
            for name, (_, needs) in packages.items()
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return {"serialNumber": f"urn:uuid:{serial}", **document}


def write_sbom() -> None:
    file = ROOT / "dist" / "regard.cdx.json"
    file.parent.mkdir(exist_ok=True)
    document = sbom()
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{file.relative_to(ROOT)}: {len(document['components'])} packages")


# ---- wheel


def build_wheel(tree: Path = ROOT, folder: Path = ROOT / "dist") -> Path:
    """Build a wheel whose bytes depend on the sources only: order, times and permissions of its files are fixed."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", "1577836800")}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return max(folder.glob("regard-*.whl"), key=lambda file: file.stat().st_mtime)


def wheel() -> None:
    file = build_wheel()
    print(f"{file.relative_to(ROOT)}: sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    commands = {"lock": lock, "sbom": write_sbom, "wheel": wheel}
    parser = argparse.ArgumentParser(description="Hashes, SBOM and wheel of a release.")
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args().command]()
