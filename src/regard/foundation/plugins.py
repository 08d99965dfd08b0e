"""Optional libraries, and classes from outside the package, named ``module:Class``.

A class is imported only if the user names it, never because a file does.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import RegardError

MIXERS_VARIABLE = "REGARD_MIXERS"  # environment variables with such names, separated by commas
MODELS_VARIABLE = "REGARD_MODELS"


def import_optional(module: str, what: str, extra: str) -> Any:
    """An optional library; without it, RegardError says that ``what`` needs it and which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        raise RegardError(f'{what} needs {library}, which is not installed: pip install "regard[{extra}]"') from None


def import_class(field: str, name: str, variable: str) -> Any:
    """Import ``module:Class``, which runs the module, and add its name to the environment variable for child processes.

    The working directory is searched too, as with ``python -m``.
    """
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"{field}={name!r} is not of the form module:Class")
    folder = Path.cwd()
    file = folder.joinpath(*module_name.split("."))
    is_in_folder = file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()
    if is_in_folder and not {"", str(folder)} & set(sys.path):
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module itself imports something that is not installed
        raise ValueError(f"{field}={name!r}: there is no module {error.name!r}, here or on the path") from None
    if not hasattr(module, class_name):
        raise ValueError(f"{field}={name!r}: {module_name} has no {class_name}")
    os.environ[variable] = ",".join(dict.fromkeys([*environment_names(variable), name]))
    return getattr(module, class_name)


def environment_names(variable: str) -> list[str]:
    """The names of classes in an environment variable."""
    return [name for part in os.environ.get(variable, "").split(",") if (name := part.strip())]


def unregistered_class(field: str, name: str, function: str, variable: str) -> ValueError:
    """The error for a class that a model file names but that is not registered."""
    return ValueError(
        f"{field}={name!r} is not registered, and code that a model names is never run by itself; if you trust it, "
        f"call {function}({name!r}), or set {variable}={name}"
    )
