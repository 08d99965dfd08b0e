"""The settings of a server: the fields of ``regard serve --config FILE``, each also an option of the command."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..config.config_file import parse_yaml
from ..errors import RegardError, UsageError
from ..foundation.checks import did_you_mean

Port = Annotated[int, Field(ge=0, le=65535)]


class OperationsConfig(BaseModel):
    """The settings around the models: who may call the server, what is logged, how it shuts down."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    allow_origin: tuple[str, ...] = ()  # origins whose pages may call the server; "*": any
    allow_host: tuple[str, ...] = ()  # additional host names of this server, such as that of a proxy in front of it
    tls_cert: Path | None = None
    tls_key: Path | None = None
    access_log: str | None = None  # a file, or - for stdout
    log_texts: bool = False  # log request and response bodies verbatim
    drain_seconds: Annotated[int, Field(ge=0)] = 60  # time that running requests get to finish after a signal
    file: Path | None = Field(default=None, exclude=True)  # the config file itself, read again at a reload

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The certificate file and its key file."""
        if self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise UsageError("TLS needs a certificate and its key: --tls-cert F --tls-key F")
        for file in (self.tls_cert, self.tls_key):
            if not file.is_file():
                raise UsageError(f"there is no file {file} for TLS")
        try:  # no password: the server could not ask for one
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as error:
            names = f"{self.tls_cert} and {self.tls_key}"
            raise UsageError(f"{names} are not a certificate and its unencrypted key in PEM: {error}") from None
        return self.tls_cert, self.tls_key

    def models_now(self) -> tuple[str, ...]:
        """The models that the config file names at this moment; none without a file."""
        return () if self.file is None else ServeConfig.read(self.file).models

    def open_log(self) -> Callable[[str], None] | None:
        """Open the access log; returns the function that writes a line."""
        if self.access_log is None:
            return None
        if self.access_log == "-":
            return lambda line: print(line, file=sys.stdout, flush=True)
        try:
            file = open(self.access_log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open until the process ends
        except OSError as error:
            raise RegardError(
                f"the access log {self.access_log} cannot be written: {error.strerror or error}"
            ) from None
        return lambda line: print(line, file=file)


class ServeConfig(OperationsConfig):
    """All settings of a server."""

    models: tuple[str, ...] = ()  # runs or model directories
    api: bool = False
    no_explorer: bool = False  # serve only /v1
    host: str = "127.0.0.1"
    port: Port = 8017
    device: str = "auto"
    engine: Literal["torch", "onnx", "ctranslate2"] = "torch"  # runtime of the API
    memory: Annotated[int, Field(ge=50)] = 2000  # MB for all looks of the explorer together
    waiting: Annotated[int, Field(ge=1)] = 256  # length of the request queue
    keys: Path | None = None  # file of API keys
    api_key: str | None = None
    no_api_key: bool = False

    @classmethod
    def read(cls, path: Path | None, typed: Mapping[str, Any] | None = None) -> ServeConfig:
        """Read the fields of a YAML file; options ``typed`` on the command line override them."""
        fields: Any = {}
        if path is not None:
            try:
                fields = parse_yaml(path.read_text(encoding="utf-8")) or {}
            except OSError as error:
                raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
            except ValueError as error:
                raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
            if not isinstance(fields, dict):
                raise UsageError(f"{path} has no fields; write each as field: value")
            names = [name for name in cls.model_fields if name != "file"]
            for name in fields:
                if name not in names:
                    raise UsageError(f"{path}: there is no {name}{did_you_mean(str(name), names)}")
        try:
            return cls.model_validate({**fields, **(typed or {}), "file": path})
        except ValidationError as error:
            problem = error.errors()[0]
            where, message = ".".join(map(str, problem["loc"])), str(problem["msg"])
            fault = f"{where}={problem['input']!r}: {message[:1].lower()}{message[1:]}"
            raise UsageError(f"{path or 'regard serve'}: {fault}") from None
