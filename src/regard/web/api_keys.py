"""API keys: a file of names, SHA-256 digests and limits, and the rate limit of each key.

A key is 256 random bits, so a fast digest is as safe as a slow one. The key itself is shown once and not stored.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..config.config_file import parse_yaml
from ..errors import RegardError, UsageError
from ..foundation.files import file_lock, read_input, write_atomic

_HEAD = """# API keys of regard serve. The keys themselves are not here, only their SHA-256.
# per_minute: requests a key may make; admin: whether it may reload models. Delete an entry to revoke its key.
"""


class ApiKey(BaseModel):
    """One entry of a keys file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    per_minute: Annotated[int, Field(ge=1)] | None = None  # None: unlimited
    admin: bool = False


class ApiKeys:
    """The keys of a server, by digest, each with a token bucket that refills over a minute."""

    def __init__(
        self, keys: Iterable[ApiKey], path: Path | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.path, self._now, self._secret = path, now, secrets.token_bytes(32)
        self._buckets: dict[str, tuple[float, float]] = {}  # by name: (requests left, time of that count)
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        self._by_digest = {key.sha256: key for key in keys}
        self._by_cookie = {self.cookie(key): key for key in self._by_digest.values()}

    @classmethod
    def single(cls, key: str) -> ApiKeys:
        """A single key, from the command line."""
        return cls([ApiKey(name="api-key", sha256=digest(key), admin=True)])

    @classmethod
    def read(cls, path: str | Path) -> ApiKeys:
        return cls(read_keys(Path(path)), Path(path))

    def find(self, bearers: Iterable[str], cookies: Iterable[str] = ()) -> ApiKey | None:
        """The entry of the first known key or cookie; None if there is none."""
        entries = [*(self._by_digest.get(digest(key)) for key in bearers), *map(self._by_cookie.get, cookies)]
        return next((entry for entry in entries if entry is not None), None)

    def cookie(self, key: ApiKey) -> str:
        """The cookie that stands for a key in a browser. It depends on a secret of this process, so it cannot be
        derived from a stolen keys file."""
        return hmac.new(self._secret, key.sha256.encode(), "sha256").hexdigest()

    def take(self, key: ApiKey) -> int:
        """Count a request; returns 0 if it is allowed, otherwise the seconds until the next one is."""
        if key.per_minute is None:
            return 0
        now, rate = self._now(), key.per_minute / 60
        left, since = self._buckets.get(key.name, (float(key.per_minute), now))
        left = min(float(key.per_minute), left + rate * (now - since))
        is_allowed = left >= 1
        self._buckets[key.name] = (left - is_allowed, now)
        return 0 if is_allowed else max(1, math.ceil((1 - left) / rate))


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> list[ApiKey]:
    """Read and check the entries of a keys file."""
    content = read_input(path)
    try:
        entries: Any = parse_yaml(content.decode())
    except ValueError:
        raise RegardError(
            f"keys file {path} is not YAML; create one with regard serve --new-key NAME --keys FILE"
        ) from None
    if not isinstance(entries, list) or not entries:
        raise RegardError(f"keys file {path} lists no keys; add one with regard serve --new-key NAME --keys {path}")
    try:
        keys = TypeAdapter(list[ApiKey]).validate_python(entries)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise RegardError(f"keys file {path}: entry {where}: {problem['msg']}") from None
    if len({key.name for key in keys}) < len(keys):
        raise RegardError(f"keys file {path}: two keys have the same name")
    return keys


def add_key(path: Path, name: str, per_minute: int | None = None, admin: bool = False) -> str:
    """Create a key and add its digest to the file; the key itself is only returned, not stored."""
    import yaml

    key = f"rg-{secrets.token_urlsafe(32)}"
    try:
        entry = ApiKey(name=name, sha256=digest(key), per_minute=per_minute, admin=admin)
    except ValidationError:
        raise UsageError(f"--new-key {name!r} is not a valid name: use letters, digits, - . _, at most 64") from None
    with file_lock(path.parent):
        keys = read_keys(path) if path.exists() else []
        if any(key_entry.name == name for key_entry in keys):
            raise UsageError(f"{path} already has a key {name!r}; remove its entry to replace it")
        entries = [key_entry.model_dump(exclude_defaults=True) for key_entry in (*keys, entry)]
        write_atomic(path, f"{_HEAD}{yaml.safe_dump(entries, sort_keys=False)}".encode())
        path.chmod(0o600)
    return key
