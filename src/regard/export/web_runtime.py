"""The JavaScript libraries of an exported page, and the browser or Node.js that its certificate is measured in.

The libraries are not part of regard: onnxruntime-web (WebAssembly) computes the graphs, @huggingface/tokenizers encodes
texts. They come from a folder laid out like ``node_modules``: the one given, the environment's share/web, or the user's
cache, into which ``npm pack`` downloads the versions below; their SHA-512 is verified.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ..errors import RegardError
from ..foundation.files import cache_folder, replace_directory

# Each package: version, SHA-512 of the archive from npm, and the files used from it.
PACKAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "onnxruntime-web": (
        "1.30.0",
        "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
        ("package.json", "dist/ort.wasm.bundle.min.mjs", "dist/ort-wasm-simd-threaded.wasm"),
    ),
    "@huggingface/tokenizers": (
        "0.2.0",
        "LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
        ("package.json", "LICENSE", "dist/tokenizers.min.mjs"),
    ),
}
# The files of a page: their names there, and where they come from.
RUNTIME_FILES = {
    "ort.mjs": ("onnxruntime-web", "dist/ort.wasm.bundle.min.mjs"),
    "ort.wasm": ("onnxruntime-web", "dist/ort-wasm-simd-threaded.wasm"),
    "tokenizers.mjs": ("@huggingface/tokenizers", "dist/tokenizers.min.mjs"),
}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_HOW_TO_GET_THEM = (
    "install npm, with which regard fetches them, or name a node_modules folder that has them with --runtime"
)


def find_runtime(folder: str | Path | None = None) -> Path:
    """The folder with the libraries: ``folder``, or the environment's, or the cache, which is filled if needed."""
    if folder is not None:
        if missing := _missing(Path(folder)):
            raise RegardError(f"{folder} has no {missing}: a page needs {' and '.join(PACKAGES)}")
        return Path(folder)
    cached, needed = cache_folder() / "web", {name: version for name, (version, _, _) in PACKAGES.items()}
    for candidate in (Path(sys.prefix) / "share" / "web", cached):
        if _missing(candidate) is None and runtime_versions(candidate) == needed:
            return candidate
    return fetch_runtime(cached)


def runtime_versions(folder: Path) -> dict[str, str]:
    """The versions of the libraries in a folder, by package."""
    return {name: json.loads((folder / name / "package.json").read_bytes())["version"] for name in PACKAGES}


def _missing(folder: Path) -> str | None:
    """The first required file that a folder lacks."""
    files = (f"{package}/{file}" for package, (_, _, files) in PACKAGES.items() for file in files if file != "LICENSE")
    return next((file for file in files if not (folder / file).is_file()), None)


def fetch_runtime(folder: Path) -> Path:
    """Download the libraries with npm into ``folder``, completely or not at all."""
    npm = shutil.which("npm")
    if npm is None:
        raise RegardError(
            f"a page needs {' and '.join(PACKAGES)}, and npm, which fetches them, is not installed: {_HOW_TO_GET_THEM}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replace_directory(folder) as new, tempfile.TemporaryDirectory() as scratch:
        for name, (version, digest, needed) in PACKAGES.items():
            archive = _pack(npm, f"{name}@{version}", Path(scratch))
            if base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() != digest:
                raise RegardError(f"{name}@{version} is not the file that was published: its SHA-512 differs")
            with tarfile.open(archive) as files:
                for file in needed:
                    content = files.extractfile(f"package/{file}")
                    assert content is not None
                    (new / name / file).parent.mkdir(parents=True, exist_ok=True)
                    (new / name / file).write_bytes(content.read())
    return folder


def _pack(npm: str, package: str, scratch: Path) -> Path:
    """The archive of a package, downloaded by ``npm pack`` into a folder of its own."""
    own = scratch / package.replace("/", "-")
    own.mkdir()
    try:
        subprocess.run([npm, "pack", "--silent", package], cwd=own, check=True, capture_output=True, timeout=300)
    except (subprocess.SubprocessError, OSError) as error:
        stderr = getattr(error, "stderr", None) or b""
        reason = stderr.decode(errors="replace").strip().split("\n")[-1] or type(error).__name__
        raise RegardError(f"npm could not fetch {package}: {reason}; {_HOW_TO_GET_THEM}") from None
    return next(own.glob("*.tgz"))


def find_browser() -> Path | None:
    """The browser in REGARD_BROWSER, or a Chromium or Chrome on PATH."""
    if named := os.environ.get("REGARD_BROWSER"):
        return Path(named) if Path(named).exists() else None
    paths = (shutil.which(name) for name in _BROWSERS)
    return next((Path(path) for path in paths if path), None)


def page_command(address: str, scripts: Path, folder: Path, profile: Path) -> tuple[str, list[str]]:
    """The program that runs a page's comparison, a headless browser or else Node.js: its name and its command line.

    address  the URL at which the page and its comparison are served
    scripts  the folder with the comparison's script, for Node.js
    folder   the folder of the page, for Node.js
    profile  an empty folder for the browser's profile
    """
    browser = find_browser()
    if browser is not None:
        options = ["--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
        options += ["--no-sandbox", "--disable-dev-shm-usage"] if os.name == "posix" and os.geteuid() == 0 else []
        return "Chromium", [str(browser), *options, f"--user-data-dir={profile}", f"{address}compare.html"]
    if (node := shutil.which("node")) is not None:
        return "Node.js", [node, str(scripts / "compare.mjs"), address, str(folder)]
    raise RegardError("comparing a page with the model needs Chromium or Node.js, and this machine has neither")


if __name__ == "__main__":
    try:
        print(fetch_runtime(Path(sys.argv[1])))
    except RegardError as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(1)
