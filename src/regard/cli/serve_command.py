"""`regard serve`: the explorer and an HTTP API for programs; `regard deploy`: the API with replicas."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import UsageError

from . import completion, terminal
from .options import PORT, Device, On, argument, engine_option, flag, option

if TYPE_CHECKING:
    from regard.serving.serve_config import ServeConfig

ServedModels = Annotated[list[str] | None, argument("RUN", "Runs or model directories.", completion.models)]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on; 0.0.0.0 lets other machines in.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free one.")]
OpenBrowser = Annotated[
    bool | None,
    typer.Option("--open/--no-open", help="Open the browser; the default in a terminal.", show_default=False),
]
Waiting = Annotated[int, typer.Option(min=1, help="Maximum number of queued requests.")]
KeysFile = Annotated[
    Path | None, option("FILE", "Accept only the keys in this file; `regard serve --new-key` adds one.")
]
OneKey = Annotated[
    str | None,
    typer.Option(
        envvar="REGARD_API_KEY", metavar="KEY", help="Accept only requests with this key.", show_default=False
    ),
]
NoKey = Annotated[bool, typer.Option("--no-api-key", help="Require no key, even if --host lets other machines in.")]
ConfigFile = Annotated[Path | None, option("FILE", "A YAML file with these options: models, port, keys …")]
AllowOrigin = Annotated[
    list[str] | None, option("URL", "Allow requests from pages of this site, https://example.org; * for any.")
]
AllowHost = Annotated[list[str] | None, option("NAME", "Another host name of this server, such as behind a proxy.")]
TlsCert = Annotated[Path | None, option("FILE", "Serve HTTPS with this certificate (PEM).")]
TlsKey = Annotated[Path | None, option("FILE", "The certificate's private key.")]
AccessLog = Annotated[str | None, option("FILE", "Log each request as a line of JSON, without texts; - is stdout.")]
LogTexts = Annotated[bool, flag("--log-texts", "Log requests and responses with their texts.")]
ServingEngine = Annotated[str, engine_option("Engine that runs the models of the API", "torch", "onnx", "ctranslate2")]
Drain = Annotated[
    int, typer.Option(min=0, metavar="S", help="Time for running requests to finish after Ctrl-C or SIGTERM.")
]


def serve(
    ctx: typer.Context,
    models: ServedModels = None,
    api: Annotated[
        bool, typer.Option("--api", help="Also serve an HTTP API for programs, at /v1 like OpenAI's.")
    ] = False,
    no_explorer: Annotated[bool, flag("--no-explorer", "With --api: without the explorer.")] = False,
    port: Port = PORT,
    host: Host = "127.0.0.1",
    open_: OpenBrowser = None,
    memory: Annotated[int, typer.Option(min=50, metavar="MB", help="Memory limit of all open looks.")] = 2000,
    waiting: Waiting = 256,
    api_key: OneKey = None,
    no_api_key: NoKey = False,
    keys: KeysFile = None,
    new_key: Annotated[str | None, option("NAME", "Add a key to the file of --keys, print it, and exit.")] = None,
    per_minute: Annotated[int | None, option("N", "With --new-key: requests per minute.", least=1)] = None,
    admin: Annotated[bool, flag("--admin", "With --new-key: may reload models.")] = False,
    config: ConfigFile = None,
    allow_origin: AllowOrigin = None,
    allow_host: AllowHost = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    access_log: AccessLog = None,
    log_texts: LogTexts = False,
    drain_seconds: Drain = 60,
    engine: ServingEngine = "torch",
    device: Device = "auto",
) -> None:
    """Explore models in the browser: every head, every weight, exactly. Press Ctrl-C to stop.

    With --api, also serve an HTTP API; see docs/serve.md. SIGHUP then reloads the models and keys.
    """
    if new_key is not None:
        _print_new_key(new_key, keys, per_minute, admin)
        return
    settings = read_settings(ctx, config)
    options = server_options(settings)
    if settings.api:
        from regard.serving import serve_api

        options |= {"engine": settings.engine, "has_explorer": not settings.no_explorer}
        raise typer.Exit(serve_api(settings.models, operations=settings, **options))
    for name in ("no_explorer", "allow_origin", "allow_host", "access_log", "log_texts", "engine"):
        if getattr(settings, name) not in ((), None, False, "torch"):
            raise UsageError(f"--{name.replace('_', '-')} needs --api")
    from regard.web import serve as run

    options |= {"open_browser": sys.stderr.isatty() if open_ is None else open_, "tls": settings.tls}
    raise typer.Exit(run(settings.models, **options))


def deploy(
    ctx: typer.Context,
    models: ServedModels = None,
    on: On = "ray",
    replicas: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes that hold the models.")] = 2,
    cores: Annotated[
        float, typer.Option(min=0.1, metavar="N", help="CPU cores per replica; and a GPU, if there are any.")
    ] = 1,
    port: Port = PORT,
    host: Host = "127.0.0.1",
    waiting: Waiting = 256,
    api_key: OneKey = None,
    no_api_key: NoKey = False,
    keys: KeysFile = None,
    config: ConfigFile = None,
    access_log: AccessLog = None,
    drain_seconds: Drain = 60,
    engine: ServingEngine = "torch",
    device: Device = "auto",
) -> None:
    """Serve the API with several replicas of the models, on a Ray cluster. Ctrl-C stops them.

    This process receives the requests and forwards them to the replicas; requests of a lost replica are retried.
    """
    from regard.experiments.sweep_runner import check_runner

    check_runner(on)
    if on == "local":
        raise UsageError("replicas run on a Ray cluster: use --on ray, or regard serve --api on one machine")
    settings = read_settings(ctx, config)
    from regard.serving.ray_replicas import deploy_api

    options = server_options(settings) | {"on": on, "replicas": replicas, "cores": cores, "operations": settings}
    options["engine"] = settings.engine
    raise typer.Exit(deploy_api(settings.models, **options))


def read_settings(ctx: typer.Context, config: Path | None) -> ServeConfig:
    """The config file's settings, overridden by the command line and the environment."""
    from regard.serving.serve_config import ServeConfig

    sources = {name: getattr(ctx.get_parameter_source(name), "name", "") for name in ctx.params}
    typed = {name: ctx.params[name] for name in ServeConfig.model_fields if sources.get(name) == "COMMANDLINE"}
    if {"keys", "api_key"} <= typed.keys():
        raise UsageError("--keys and --api-key are both given: one of them is enough")
    if sources["api_key"] == "ENVIRONMENT":
        typed |= {} if "keys" in typed else {"api_key": ctx.params["api_key"] or None}
    settings = ServeConfig.read(config, typed)
    if not settings.models:
        raise UsageError("there is nothing to serve: give a RUN, or models: [RUN] in the file of --config")
    return settings


def server_options(settings: ServeConfig) -> dict[str, Any]:
    """The options that the explorer and the API share."""
    from regard.web.api_keys import ApiKeys
    from regard.web.requests import MEGABYTE, Limits

    keys = settings.api_key if settings.keys is None else ApiKeys.read(settings.keys)
    return {
        "host": settings.host,
        "port": settings.port,
        "device": settings.device,
        "limits": Limits(kept_bytes=settings.memory * MEGABYTE, waiting=settings.waiting),
        "api_key": keys,
        "needs_key": not settings.no_api_key,
        "say": terminal.progress,
    }


def _print_new_key(name: str, keys: Path | None, per_minute: int | None, admin: bool) -> None:
    from regard.web.api_keys import add_key

    if keys is None:
        raise UsageError(f"--new-key {name} needs the file to add it to: --keys F")
    print(add_key(keys, name, per_minute, admin))
    terminal.progress(f"{keys} stores only its SHA-256: the key is not shown again")
