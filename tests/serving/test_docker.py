"""The container's files say what regard and each other understand; nothing is built here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from regard.cli import app
from regard.serving.serve_config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_copies_what_is_there_and_drops_root() -> None:
    steps = instructions()
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    assert {name for name, _ in steps} == known | {"ENTRYPOINT", "CMD"}
    assert ("ARG", "DEVICE=cpu") in steps
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    for sources in (rest.split()[:-1] for name, rest in steps if name == "COPY"):
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, source
    names = [name for name, _ in steps]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    for name in ("ENTRYPOINT", "CMD"):
        assert json.loads(dict(steps)[name])
    command = json.loads(dict(steps)["CMD"])
    assert command[0] in {each.name for each in app.registered_commands}


def test_the_files_agree_with_each_other() -> None:
    served = ServeConfig.read(DOCKER / "serve.yaml")
    assert served.api
    assert served.keys is not None
    assert served.access_log == "-"
    services = read_yaml("compose.yaml")["services"]
    mounts = [volume.split(":") for service in services.values() for volume in service["volumes"]]
    inside = {target for _, target, mode in mounts if mode == "ro"}
    assert {*served.models, str(served.keys), json.loads(dict(instructions())["CMD"])[-1]} <= inside
    for source, _, _ in mounts:
        made = ("../runs/translator", "./keys.yaml", "./metrics.key")  # by the commands at the top
        assert source in made or (DOCKER / source).is_file()
    regard = services["regard"]
    assert (DOCKER / regard["build"]["context"] / regard["build"]["dockerfile"]).is_file()
    assert int(regard["stop_grace_period"].removesuffix("s")) > served.drain_seconds
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    (job,) = read_yaml("prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert name in services
    assert name in served.allow_host
    assert int(port) == served.port
    assert job["authorization"]["credentials_file"] in inside
