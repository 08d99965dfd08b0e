"""The house rules: imports point one way, optional libraries stay in their rooms, the README's tree is the real one."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "regard"

# Each room and the rooms directly to its left; what those may import, it may import too.
LEFT_OF: dict[str, set[str]] = {
    "errors": set(),
    "foundation": {"errors"},
    "config": {"foundation"},
    "presets": {"config"},
    "text": {"config"},
    "data": {"text"},
    "layers": {"config"},
    "kernels": {"config"},
    "attention": {"layers", "kernels"},
    "models": {"attention", "presets"},
    "hub": {"models", "text"},
    "generation": {"hub", "data"},
    "recipes": {"presets"},
    "training": {"generation", "recipes"},
    "lens": {"generation"},
    "export": {"training", "lens"},
    "experiments": {"export"},
    "io": {"experiments"},
    "web": {"experiments", "io"},
    "serving": {"web"},
    "course": {"training", "lens"},
    "demo": {"web", "io"},
    "cli": {"__init__", "demo", "serving", "course"},
    "__main__": {"cli"},
}
# The steps to the right: model.save() delegates to io.save when it is called, train.init reads the config and loads the
# weights of what a run starts from, train.ship_to asks whether the model can be exported, a run notes the version, and
# a page that is exported describes its model as the explorer's server does.
LAZY_STEPS_RIGHT = {
    *(("models", "io"), ("recipes", "training"), ("training", "io")),
    *(("training", "export"), ("training", "__init__"), ("export", "web")),
}
# The front door exports from every room, but only when a name is asked for.
FRONT_DOOR = "__init__"
# Which rooms may import an optional or slow library, and then only inside a function.
OWNERS: dict[str, set[str]] = {
    "transformers": {"hub"},
    "huggingface_hub": {"hub"},
    "datasets": {"data"},
    "pyarrow": {"data"},
    "jinja2": {"text"},
    "triton": {"kernels"},
    "onnx": {"export"},
    "onnxscript": {"export"},
    "onnxruntime": {"export"},
    "ctranslate2": {"export"},
    "gguf": {"hub"},
    "llama_cpp": {"export"},
    "torchao": {"export"},
    "fastapi": {"web", "serving"},
    "starlette": {"web", "serving"},
    "uvicorn": {"web", "serving"},
    "markdown_it": {"web"},
    "llguidance": {"serving"},
    "matplotlib": {"foundation", "lens", "experiments", "training"},
    "ray": {"experiments", "serving"},
    "sacrebleu": {"training"},
    "tensorboard": {"training"},
    "torch.utils.tensorboard": {"training"},
    "wandb": {"training"},
    "mlflow": {"training"},
    "faiss": {"generation"},
    "comet": {"training"},
}
# Kernels are written in triton's own language and routes in FastAPI's: at home these stand at the top of the file, and
# the file itself is imported inside a function.
TOP_LEVEL_AT_HOME = {"triton", "fastapi"}
WITHOUT_TORCH = {"errors", "config"}

# What `import regard` may add to `import torch`, in modules: a count does not depend on how busy the machine is.
MOST_MODULES_ADDED = 40
# And what it may add once every exported name has been touched.
MOST_MODULES_ADDED_IN_USE = 325


@dataclass(frozen=True)
class Import:
    """One import statement as it stands in a file."""

    where: str  # "attention/tiled.py:12"
    room: str  # "attention"
    target: str  # "regard.layers.feedforward", "torch.nn"
    lazy: bool  # inside a function: runs only when called


def room_of(file: Path, package: Path) -> str:
    """`regard/attention/masks.py` → attention, `regard/cli.py` → cli, `regard/__init__.py` → __init__."""
    return file.relative_to(package).parts[0].removesuffix(".py")


def _absolute(node: ast.ImportFrom, file: Path, package: Path) -> str:
    """The dotted name of a `from … import`, relative dots resolved."""
    if node.level == 0:
        return node.module or ""
    folder = [package.name, *file.relative_to(package).parent.parts]
    base = folder[: len(folder) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)


def _targets(node: ast.AST, file: Path, package: Path) -> Iterator[str]:
    """The modules a statement or call imports; `from regard import cli` counts as regard.cli."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(names=names):
            module = _absolute(node, file, package)
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    yield name


def imports_of(file: Path, package: Path) -> Iterator[Import]:
    """Every import of a file: at the top, inside functions, and through importlib with a literal name."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            where = f"{file.relative_to(package)}:{getattr(child, 'lineno', 0)}"
            for target in _targets(child, file, package):
                yield Import(where, room_of(file, package), target, lazy)
            yield from walk(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return walk(ast.parse(file.read_text(encoding="utf-8")), lazy=False)


def rooms_to_the_left(room: str) -> set[str]:
    """Everything a room may import: itself and all that its left neighbours may."""
    return {room}.union(*(rooms_to_the_left(left) for left in LEFT_OF.get(room, set())))


def _own_room(target: str, package: Path) -> str:
    """`regard.layers.feedforward` → layers; `regard.attend`, a name exported by the front door → __init__."""
    first = target.split(".")[1] if "." in target else FRONT_DOOR
    return first if (package / first).is_dir() or (package / f"{first}.py").is_file() else FRONT_DOOR


def _direction_fault(found: Import, package: Path) -> str | None:
    target = _own_room(found.target, package)
    if found.room == FRONT_DOOR or target in rooms_to_the_left(found.room):
        return None
    if found.lazy and (found.room, target) in LAZY_STEPS_RIGHT:
        return None
    return f"{found.where}: {found.room} must not import {found.target}"


def _library_fault(found: Import) -> str | None:
    if found.room in WITHOUT_TORCH and found.target.split(".")[0] == "torch":
        return f"{found.where}: {found.room} must not import torch"
    for library, owners in OWNERS.items():
        if not f"{found.target}.".startswith(f"{library}."):
            continue
        if found.room not in owners:
            return f"{found.where}: only {', '.join(sorted(owners))} may import {library}"
        if not found.lazy and library not in TOP_LEVEL_AT_HOME:
            return f"{found.where}: {library} must be imported inside a function"
    return None


def faults(package: Path) -> list[str]:
    """Every broken house rule of a package tree, as `file:line: what is wrong`."""
    found: list[str] = []
    for file in sorted(package.rglob("*.py")):
        if (room := room_of(file, package)) not in {*LEFT_OF, FRONT_DOOR}:
            found.append(f"{file.relative_to(package)}: {room} has no place in the table LEFT_OF")
            continue
        for statement in imports_of(file, package):
            ours = statement.target.split(".")[0] == package.name
            fault = _direction_fault(statement, package) if ours else _library_fault(statement)
            if fault:
                found.append(fault)
    return found


# -------------------------------------------------------------------------------- (a) the imports


def test_imports_point_one_way_and_optional_libraries_stay_in_their_rooms() -> None:
    assert not (broken := faults(PACKAGE)), "\n".join(broken)


def test_the_table_itself_has_no_circle() -> None:
    for room, left in LEFT_OF.items():
        assert all(room not in rooms_to_the_left(neighbour) for neighbour in left if neighbour != FRONT_DOOR)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small tree that keeps every rule; each test below breaks one of them."""
    package = tmp_path / "regard"
    for file, text in {
        "__init__.py": "def __getattr__(name):\n    from regard.attention import attend\n    return attend\n",
        "config.py": "import pydantic\n",
        "layers/__init__.py": "from ..config import ModelConfig\n",
        "attention/__init__.py": "import torch\nfrom regard.layers import norm\nfrom . import masks\n",
        "attention/masks.py": "from ..config import ModelConfig\n",
        "kernels/__init__.py": "",
        "kernels/flash.py": "import triton\nimport triton.language as tl\n",
        "models/__init__.py": "def save(self, path):\n    from regard.io import save\n    save(self, path)\n",
        "hub/__init__.py": "def read(path):\n    import transformers\n",
        "lens/__init__.py": "def draw():\n    import matplotlib.pyplot as plt\n",
        "io.py": "from regard.models import build\n",
        "cli.py": "from regard import __version__\nfrom regard.io import load\n",
    }.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(text, encoding="utf-8")
    return package


def test_a_tree_that_keeps_the_rules_has_no_faults(house: Path) -> None:
    assert faults(house) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("config.py", "import torch", "config must not import torch"),
        ("config.py", "from torch import nn", "config must not import torch"),
        ("config.py", "def f():\n    import torch.nn", "config must not import torch"),
        ("layers/__init__.py", "from regard.attention import attend", "layers must not import regard.attention.attend"),
        ("layers/__init__.py", "from ..attention import attend", "layers must not import regard.attention.attend"),
        ("layers/__init__.py", "from .. import attention", "layers must not import regard.attention"),
        ("layers/__init__.py", "from regard import attention", "layers must not import regard.attention"),
        (
            "layers/__init__.py",
            "def f():\n    import regard.attention.masks",
            "layers must not import regard.attention",
        ),
        ("layers/__init__.py", "from regard import attend", "layers must not import regard.attend"),
        ("layers/__init__.py", "import regard", "layers must not import regard"),
        ("layers/__init__.py", "import regard.kernels.flash", "layers must not import regard.kernels.flash"),
        ("attention/masks.py", "if True:\n    from regard import cli", "attention must not import regard.cli"),
        ("attention/masks.py", "import importlib\nimportlib.import_module('regard.io')", "attention must not import"),
        ("models/__init__.py", "from regard.io import save", "models must not import regard.io.save"),
        ("hub/__init__.py", "def f():\n    from regard.io import load", "hub must not import regard.io.load"),
        ("hub/__init__.py", "import transformers", "transformers must be imported inside a function"),
        (
            "hub/__init__.py",
            "class A:\n    from transformers import B",
            "transformers must be imported inside a function",
        ),
        ("hub/__init__.py", "def f():\n    import onnx", "only export may import onnx"),
        ("attention/__init__.py", "def f():\n    import triton", "only kernels may import triton"),
        ("attention/__init__.py", "f = lambda: __import__('triton.language')", "only kernels may import triton"),
        ("models/__init__.py", "def f():\n    from torch.utils.tensorboard import SummaryWriter", "only training may"),
        ("lens/__init__.py", "from matplotlib import pyplot", "matplotlib must be imported inside a function"),
        ("cellar.py", "", "cellar has no place in the table LEFT_OF"),
    ],
)
def test_a_planted_violation_is_found(house: Path, file: str, line: str, complaint: str) -> None:
    path = house / file
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(f"{before}{line}\n", encoding="utf-8")
    broken = faults(house)
    assert len(broken) == 1
    assert complaint in broken[0]
    assert broken[0].startswith(file)


# -------------------------------------------------------------------------------- (b) the README's tree


def real_tree(package: Path) -> set[str]:
    """`attention/`, `cli.py`, …: packages and top-level modules; files with dunder names are Python's business."""
    packages = {f"{folder.name}/" for folder in package.iterdir() if (folder / "__init__.py").is_file()}
    modules = {file.name for file in package.glob("*.py") if not file.name.startswith("__")}
    return packages | modules


def readme_tree(text: str) -> set[str]:
    """The names one level below `src/regard/` in the README's fenced tree."""
    block = re.search(r"^```[a-z]*\nsrc/regard/[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert block, "README.md has no fenced block that starts with src/regard/"
    return set(re.findall(r"^  (\S+)", block[1], flags=re.MULTILINE))


def test_the_tree_in_the_readme_is_the_real_one() -> None:
    written, real = readme_tree((ROOT / "README.md").read_text(encoding="utf-8")), real_tree(PACKAGE)
    assert written == real, f"README only: {sorted(written - real)}; src/regard only: {sorted(real - written)}"


def test_the_readme_check_sees_what_is_missing_and_what_is_extra(house: Path) -> None:
    rooms = "  config.py    sizes\n  attic/       boxes\n    deeper.py  not a room\n"
    text = f"# x\n```\nother\n```\n```text\nsrc/regard/\n{rooms}```\n"
    assert readme_tree(text) == {"config.py", "attic/"}
    assert real_tree(house) == {"config.py", "io.py", "cli.py"} | {
        f"{room}/" for room in ("attention", "hub", "kernels", "layers", "lens", "models")
    }
    with pytest.raises(AssertionError, match="no fenced block"):
        readme_tree("# nothing here\n")


# -------------------------------------------------------------------------------- (c) what an import costs

# Loaded by nobody who only computes: every owned library, and what the command line alone needs.
NOT_BY_IMPORT = {library for library in OWNERS if "." not in library} | {"typer", "rich", "PIL", "hypothesis", "pytest"}


def modules_added(statement: str) -> set[str]:
    """The modules a statement adds to `import torch` in a new interpreter."""
    script = f"""
import json, sys
import torch
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    # From src/, so that an environment in which another copy is installed measures this one.
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "src")
    assert answer.returncode == 0, answer.stderr
    return set(json.loads(answer.stdout.splitlines()[-1]))


def forbidden(modules: set[str]) -> set[str]:
    return NOT_BY_IMPORT & {module.split(".")[0] for module in modules}


@pytest.mark.parametrize(
    ("statement", "most"),
    [
        ("import regard", MOST_MODULES_ADDED),
        ("import regard; [getattr(regard, name) for name in regard.__all__]", MOST_MODULES_ADDED_IN_USE),
    ],
)
def test_import_regard_is_light(statement: str, most: int) -> None:
    added = modules_added(statement)
    assert not forbidden(added), f"{statement} loads {sorted(forbidden(added))}"
    assert len(added) <= most, f"{statement} adds {len(added)} modules, {most} allowed: {sorted(added)}"


def test_the_import_check_sees_a_library_and_counts_modules() -> None:
    added = modules_added("import matplotlib.pyplot")
    assert "matplotlib" in forbidden(added)
    assert len(added) > MOST_MODULES_ADDED
    assert forbidden({"regard", "torch.nn", "typer.main"}) == {"typer"}
