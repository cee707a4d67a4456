"""The files of scripts/deploy: their form, their commands, and that their times and addresses fit each other."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.frontend.flags.parser import CommandParser
from quire.frontend.http.server_config import ServerConfig

FOLDER = Path(__file__).parent.parent / "scripts/deploy"
PORT = 8000
MARGIN_SECONDS = 5
"""What a server may take after its timeout."""


def documents(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((FOLDER / name).read_text()) if each]


def parsed(words: list[str]) -> Any:
    """The arguments of `quire serve`. A word that the command does not know ends the test."""
    assert words[0] == "serve"
    parser = CommandParser("quire serve", "")
    importlib.import_module("quire.frontend.cli.serve").add_arguments(parser)
    return parser.parse_args(words[1:])


def shutdown_timeout(words: list[str]) -> int:
    config = parsed(words).server_config
    assert isinstance(config, ServerConfig)
    return config.shutdown_timeout


def serve_words(script: str, **variables: str) -> list[str]:
    """The words after `quire` in a shell's line, with its variables' values."""
    for name, value in variables.items():
        script = script.replace(f'"${name}"', value)
    words = shlex.split(script)
    return words[words.index("quire") + 1 :]


# ---------------------------------------------------------------------------------------------------------- container


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (FOLDER / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_container_file_has_known_instructions_and_stages() -> None:
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    found = instructions()
    assert {word for word, _ in found} <= known | {"ENTRYPOINT", "CMD"}
    stages = {rest.split(" AS ")[1] for word, rest in found if word == "FROM" and " AS " in rest}
    assert stages == {"build", "base-cpu", "base-cuda"}
    assert ("FROM", "base-${VARIANT}") in found
    assert all(
        source in stages for word, rest in found if word == "COPY" for source in re.findall("--from=(\\S+)", rest)
    )
    assert found[-3][0] == "HEALTHCHECK"
    assert "/health" in found[-3][1]
    assert ("USER", "quire") in found


def test_the_containers_command_is_one() -> None:
    words = dict(instructions())
    assert json.loads(words["ENTRYPOINT"]) == ["quire"]
    assert shutdown_timeout(json.loads(words["CMD"])) > 0
    assert words["EXPOSE"] == str(PORT)
    assert words["STOPSIGNAL"] == "SIGTERM"


def test_what_a_wheel_needs_is_installed_before_it_is_built() -> None:
    steps = [rest for word, rest in instructions() if word == "RUN"]
    assert "g++" in steps[0]
    assert steps[1].startswith("pip wheel ")
    assert steps[1].split()[-3:] == ["--wheel-dir", "/wheels", "."]


def test_compose() -> None:
    [compose] = documents("compose.yaml")
    services = compose["services"]
    for variant in ("cpu", "cuda"):
        service = services[variant]
        assert service["build"]["args"] == {"VARIANT": variant}
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        words = [re.sub(r"^\$\{MODEL:-(.*)\}$", r"\1", word) for word in service["command"]]
        assert int(service["stop_grace_period"].removesuffix("s")) >= shutdown_timeout(words) + MARGIN_SECONDS
        assert service["networks"]["default"]["aliases"] == ["quire"]
    [mounted] = services["nginx"]["volumes"]
    assert (FOLDER / mounted.split(":")[0]).is_file()
    assert set(compose["volumes"]) == {"models"}


# ------------------------------------------------------------------------------------------------------------ systemd


def unit(name: str) -> dict[str, dict[str, list[str]]]:
    sections: dict[str, dict[str, list[str]]] = {}
    for line in (FOLDER / name).read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return sections


@pytest.mark.parametrize("name", ["quire.service", "quire-headless.service"])
def test_units(name: str, tmp_path: Path) -> None:
    service = unit(name)["Service"]
    [command] = service["ExecStart"]
    words = shlex.split(command)
    assert words[0] == "/opt/quire/bin/quire"
    settings = tmp_path / "options.yaml"
    comments = "\n".join(line for line in (FOLDER / name).read_text().splitlines() if line.startswith("#"))
    settings.write_text("\n".join(re.findall(r"`([\w-]+: .*?)`", comments)).replace("...", "a-model"))
    args = parsed([*words[1:3], str(settings), *words[4:]])
    assert int(service["TimeoutStopSec"][0]) >= args.server_config.shutdown_timeout + MARGIN_SECONDS
    assert args.engine_args.parallel.headless == (name == "quire-headless.service")
    assert service["KillMode"] == ["mixed"]
    assert service["Restart"] == ["always"]
    assert unit(name)["Install"]["WantedBy"] == ["multi-user.target"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("name", ["quire.service", "quire-headless.service"])
def test_systemd_takes_the_units(name: str, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text().replace("/opt/quire/bin/quire", "/bin/true")
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if name in line]
    assert complaints == []


# --------------------------------------------------------------------------------------------------------- Kubernetes


def check_serving_pod(pod: dict[str, Any], words: list[str]) -> None:
    """Probes and times of a pod that serves HTTP."""
    [container] = pod["containers"]
    assert {"name": "http", "containerPort": PORT} in container["ports"]
    for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/ready"), ("livenessProbe", "/live")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    [pause] = [int(word) for word in container["lifecycle"]["preStop"]["exec"]["command"] if word.isdigit()]
    assert pod["terminationGracePeriodSeconds"] >= pause + shutdown_timeout(words) + MARGIN_SECONDS
    check_volumes(pod)


def check_volumes(pod: dict[str, Any]) -> None:
    [container] = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    uid = re.search(r"--uid (\d+)", dict(instructions())["RUN"])
    assert uid is not None
    assert pod["securityContext"]["runAsUser"] == int(uid[1])


def test_a_deployment() -> None:
    deployment, claim, service = documents("deployment.yaml")
    assert [each["kind"] for each in (deployment, claim, service)] == ["Deployment", "PersistentVolumeClaim", "Service"]
    template = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    pod = template["spec"]
    check_serving_pod(pod, pod["containers"][0]["args"])
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_a_leader_and_its_workers() -> None:
    group, service = documents("leader-worker-set.yaml")
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    size, leader, worker = template["size"], template["leaderTemplate"], template["workerTemplate"]
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= worker["metadata"]["labels"].items()
    variables = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "quire-0.quire"}
    scripts = [each["spec"]["containers"][0]["args"][0] for each in (leader, worker)]
    words = serve_words(scripts[0], QUIRE_HOST_IP="10.0.0.1", **variables)
    check_serving_pod(leader["spec"], words)
    check_volumes(worker["spec"])
    first, other = (parsed(each).engine_args for each in (words, serve_words(scripts[1], **variables)))
    assert (first.parallel.nnodes, first.parallel.node_rank, first.parallel.headless) == (size, 0, False)
    assert (other.parallel.nnodes, other.parallel.node_rank, other.parallel.headless) == (size, 1, True)
    assert first.model.model == other.model.model
    devices = leader["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert first.parallel.tensor_parallel_size == size * devices
    for pod in (leader, worker):
        environment = {each["name"]: each["valueFrom"] for each in pod["spec"]["containers"][0]["env"]}
        assert environment["QUIRE_JOIN_TOKEN"]["secretKeyRef"]["name"] == "quire"
        assert environment["QUIRE_HOST_IP"]["fieldRef"]["fieldPath"] == "status.podIP"


# ------------------------------------------------------------------------------------------------------------ proxies


def nginx_settings() -> dict[str, str]:
    """The settings of nginx.conf by name; the last of a name counts."""
    text = re.sub(r"#.*", "", (FOLDER / "nginx.conf").read_text())
    assert text.count("{") == text.count("}")
    assert all(re.search(r"[;{}]\s*$", line) for line in text.splitlines() if line.strip())
    return dict(re.findall(r"^\s*([a-z_]+) ([^{};]*);", text, re.MULTILINE))


def test_nginx_lets_streams_through() -> None:
    settings = nginx_settings()
    assert settings["proxy_buffering"] == settings["gzip"] == "off"
    assert settings["proxy_http_version"] == "1.1"
    assert settings["proxy_read_timeout"] == "1h"
    assert settings["server"].split()[0] == f"quire:{PORT}"
    assert int(settings["client_max_body_size"].removesuffix("m")) * 2**20 == ServerConfig().max_request_body_bytes


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not here")
def test_nginx_takes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "nginx.conf"
    path.write_text((FOLDER / "nginx.conf").read_text().replace("server quire:", "server 127.0.0.1:"))
    done = subprocess.run(
        ["nginx", "-t", "-p", str(tmp_path), "-c", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_envoy_lets_streams_through() -> None:
    [config] = documents("envoy.yaml")
    [listener], [cluster] = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    [route] = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert route["route"]["timeout"] == "0s"
    assert route["route"]["cluster"] == cluster["name"] == cluster["load_assignment"]["cluster_name"]
    assert int(manager["stream_idle_timeout"].removesuffix("s")) >= 600
    assert manager["http_filters"][-1]["name"] == "envoy.filters.http.router"
    assert cluster["health_checks"][0]["http_health_check"]["path"] == "/health"
    [endpoint] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"]["port_value"] == PORT


@pytest.mark.timeout(400)  # where no kernels are built yet, the server builds them
@pytest.mark.skipif(not (FOLDER.parents[1] / ".git").exists(), reason="the script takes the files that git tracks")
@pytest.mark.skipif(shutil.which("curl") is None, reason="the script asks with curl")
def test_the_containers_steps_make_a_server() -> None:
    """All but its kernels, which take minutes: the wheel is a pure one, and dependencies are those of the tests."""
    environment = os.environ | {"PYTHON": sys.executable, "QUIRE_WHEEL_ISA": "none"}
    done = subprocess.run(
        [FOLDER / "try_container_steps", "--here"], env=environment, capture_output=True, text=True, timeout=390
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the container's steps work\n")
    assert "run: pip wheel" in done.stdout
    assert '"state":"serving"' in done.stdout
