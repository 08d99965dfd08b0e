"""Paths that stay inside their directory, atomic writes of files and directories, and locks on folders."""

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

from ..errors import BadModelFile, RegardError

try:
    import fcntl
except ImportError:  # Windows; leftovers of a crash are then left alone
    fcntl = None  # type: ignore[assignment]  # a module otherwise


def resolve_inside(root: Path, name: str) -> Path:
    """The file ``name`` of a directory, refused where it leads out: absolute, through "..", or by a symbolic link.

    One kind of link may leave: a snapshot in the Hugging Face cache is made of links into the blobs folder beside it.
    """
    plain = PurePosixPath(name)
    if not plain.parts or plain.is_absolute() or ".." in plain.parts or set(name) & set("\\:\0"):
        raise BadModelFile(f"{root}: the path {name!r} leads out of the directory")
    path, home = root / name, root.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    try:
        real, _ = path.resolve(), path.exists()
    except RuntimeError as error:  # a link that leads to itself
        raise BadModelFile(f"{path} is a link that leads nowhere: {error}") from None
    except (OSError, ValueError) as error:  # too long, or no text
        why = getattr(error, "strerror", None) or "it is not text"
        raise BadModelFile(f"{root}: no file can be called {name[:80]!r}: {why}") from None
    if not (real.is_relative_to(home) or real.is_relative_to(blobs)):
        raise BadModelFile(f"{path} is a link out of the directory, to {real}")
    return path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/regard, else ~/.cache/regard: what can be made again at any time."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the standard says to pass over a path that is not absolute
        return Path(given) / "regard"
    try:
        return Path.home() / ".cache" / "regard"
    except RuntimeError:  # a user without a home: a folder that cannot be made, as in a home that is read-only
        return Path(os.devnull) / "regard"


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old content or the new, never a part."""
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file to write to, beside ``path``; when the block ends well it is forced to disk and takes its place."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with _file_in_errors(path), open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Force a file's content, or a directory's list of names, to disk."""
    if path.is_dir() and os.name != "posix":  # elsewhere a directory cannot be opened
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        with _file_in_errors(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _file_in_errors(path: Path) -> Iterator[None]:
    """Which file it was, in an error of writing to one that is open, which does not know its name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """A new directory that takes the target's place when the block ends well; otherwise nothing changes.

    The two are swapped in one step, so a crash at any moment leaves the old directory or the new one, whole. Leftovers
    of a crash beside the target are removed by the next one to save there.
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
    """Give every file the mode that ``open`` would: safetensors writes 0600, which no other user could read.

    ``mkdir`` has applied the umask to the folder itself, which spares changing it, for all threads, to read it.
    """
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def previous_version(target: Path) -> Path:
    """Where the old directory waits while the new one takes its place, on systems that need two steps for it."""
    return target.with_name(f".{target.name}.previous")


def _new_directory(target: Path) -> tuple[Path, int | None]:
    """A hidden directory beside the target, and a lock on it that ends with this process, whichever way it ends."""
    while True:
        new = target.with_name(f".{target.name}.{secrets.token_hex(4)}.saving")
        new.mkdir()
        lock = acquire_lock(new, wait=True)
        if new.is_dir():  # another process may have taken it for a leftover before it was locked
            return new, lock
        if lock is not None:
            os.close(lock)


def acquire_lock(folder: Path, *, wait: bool) -> int | None:
    """A handle that holds the folder's lock until it is closed, which the end of this process does in any case.

    None where there are no locks, or no such folder. Where someone else holds it: wait, or raise BlockingIOError.
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
    """Hold a folder's lock inside the block; the end of the process releases it too.

    Where another process holds it: raise a RegardError that says "FOLDER ``busy``", or without ``busy``, wait.
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
    """Remove what a killed writer left; a live one holds the lock on it."""
    with suppress(BlockingIOError):
        handle = acquire_lock(folder, wait=False)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _swap(new: Path, target: Path) -> Path:
    """Put ``new`` in the target's place; where the old one is to be found then."""
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
    """Swap two names in one step: Linux' renameat2 with RENAME_EXCHANGE. False where there is no such thing."""
    if sys.platform != "linux":
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    with suppress(AttributeError, OSError):
        renameat2 = ctypes.CDLL(None).renameat2
        return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)
    return False
