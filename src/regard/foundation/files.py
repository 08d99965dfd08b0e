"""Paths confined to a directory, atomic writes of files and directories, and locks on directories."""

from __future__ import annotations

import ctypes
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from ..errors import BadData, BadModelFile, RegardError, UsageError

try:
    import fcntl
except ImportError:  # Windows: no locks, so leftovers of a crash are not removed
    fcntl = None  # type: ignore[assignment]  # a module otherwise


def resolve_inside(root: Path, name: str) -> Path:
    """The path of file ``name`` in a directory; BadModelFile if it is absolute, contains ".." or links to the outside.

    One exception: a snapshot in the Hugging Face cache consists of links to files in the ``blobs`` folder next to it.
    """
    plain = PurePosixPath(name)
    if not plain.parts or plain.is_absolute() or ".." in plain.parts or set(name) & set("\\:\0"):
        raise BadModelFile(f"{root}: the path {name!r} leads out of the directory")
    path, home = root / name, root.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    try:
        real, _ = path.resolve(), path.exists()
    except RuntimeError as error:
        raise BadModelFile(f"{path} is a link that points to itself: {error}") from None
    except (OSError, ValueError) as error:  # too long, or not encodable
        why = getattr(error, "strerror", None) or "it is not text"
        raise BadModelFile(f"{root}: {name[:80]!r} cannot be the name of a file: {why}") from None
    if not (real.is_relative_to(home) or real.is_relative_to(blobs)):
        raise BadModelFile(f"{path} is a link out of the directory, to {real}")
    return path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/regard, else ~/.cache/regard: files that can be recreated at any time."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """$XDG_STATE_HOME/regard, else ~/.local/state/regard: the user's own state, which cannot be recreated."""
    return _user_folder("XDG_STATE_HOME", ".local/state")


def _user_folder(variable: str, default: str) -> Path:
    folder = os.environ.get(variable, "")
    if os.path.isabs(folder):  # the XDG specification says to ignore relative paths
        return Path(folder) / "regard"
    try:
        return Path.home() / default / "regard"
    except RuntimeError:  # a user without a home directory: return a path that cannot be created
        return Path(os.devnull) / "regard"


def read_input(path: str | Path) -> bytes:
    """The content of a file that the user names; UsageError if there is none, BadData if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror or error}") from None


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers, and a crash, see either the old content or the new."""
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A temporary binary file that replaces ``path`` when the block succeeds, after it has been flushed to disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with _file_in_errors(path), open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush the content of a file, or the entries of a directory, to disk."""
    if path.is_dir() and os.name != "posix":  # Windows cannot open a directory
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        with _file_in_errors(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _file_in_errors(path: Path) -> Iterator[None]:
    """Add the file name to an OSError from writing to an open file, which lacks it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """A new directory that replaces ``target`` when the block succeeds; otherwise nothing changes.

    The two are swapped atomically where the system can, so a crash leaves either the old directory or the new one,
    complete. The next call for the same target removes leftovers of a crash.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.saving"):
        remove_abandoned(leftover)
    new, lock = _new_directory(target)
    try:
        yield new
        _apply_umask(new)
        fsync(new)
        old = _swap(new, target)
        fsync(target.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    shutil.rmtree(old, ignore_errors=True)


def _apply_umask(folder: Path) -> None:
    """Give every file the mode that ``open`` would give it: safetensors writes 0600, which other users cannot read.

    The umask is taken from the folder, to which ``mkdir`` applied it: reading it otherwise means changing it for all
    threads.
    """
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def previous_version(target: Path) -> Path:
    """The name of the old directory during a replacement on systems that need two renames for it."""
    return target.with_name(f".{target.name}.previous")


def _new_directory(target: Path) -> tuple[Path, int | None]:
    """A hidden directory next to the target, and a lock on it that the end of this process releases."""
    while True:
        new = target.with_name(f".{target.name}.{secrets.token_hex(4)}.saving")
        new.mkdir()
        lock = acquire_lock(new, wait=True)
        if new.is_dir():  # another process may have removed it as a leftover before it was locked
            return new, lock
        if lock is not None:
            os.close(lock)


def acquire_lock(folder: Path, *, wait: bool) -> int | None:
    """Lock a folder; returns a file descriptor that holds the lock until it is closed or the process ends.

    None if the system has no locks or the folder does not exist. If another process holds the lock, wait for it or
    raise BlockingIOError.
    """
    if fcntl is None:
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


@contextmanager
def file_lock(folder: Path, busy: str | None = None) -> Iterator[None]:
    """A context that holds the lock of a folder; the end of the process releases it too.

    If another process holds it, raise RegardError("FOLDER ``busy``") or, without ``busy``, wait.
    """
    try:
        handle = acquire_lock(folder, wait=busy is None)
    except BlockingIOError:
        raise RegardError(f"{folder} {busy}") from None
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def remove_abandoned(folder: Path) -> None:
    """Remove a directory left by a process that was killed; a running process still holds its lock."""
    with suppress(BlockingIOError):
        handle = acquire_lock(folder, wait=False)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _swap(new: Path, target: Path) -> Path:
    """Replace ``target`` by ``new``; returns the path of the old directory."""
    if not target.exists():
        os.rename(new, target)
    elif _exchange(new, target):
        return new
    else:
        shutil.rmtree(previous_version(target), ignore_errors=True)
        os.rename(target, previous_version(target))
        os.rename(new, target)
    return previous_version(target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths atomically by renameat2 on Linux; False if the system cannot."""
    if sys.platform != "linux":
        return False
    at_fdcwd, rename_exchange = -100, 2
    with suppress(AttributeError, OSError):
        renameat2 = ctypes.CDLL(None).renameat2
        return bool(renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0)
    return False
