"""Test the files in deploy/: lint them, compare them with the program, and run the unit in systemd if possible."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from server_program import Start
from waiting import eventually, free_port

import mmpos
from mmpos.client import Client
from mmpos.errors import ServiceOverloadedError
from mmpos.images import ImageProcessor
from mmpos_bench.machine import TUNED
from mmpos_server.config import ServerConfig, load
from mmpos_server.options import app
from mmpos_server.streams import WINDOW_BYTES
from mmpos_server.telemetry import Metrics, ProcessMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HADOLINT, HELM = (Path(sysconfig.get_path("scripts")) / name for name in ("hadolint", "helm"))
DEPLOYING = (ROOT / "docs/service-deploy.md").read_text()
KUBERNETES = "1.37"
ALERT = re.compile(r"^\| [a-z ]+ \| `([^`]*mmpos_[^`]*)` \|", re.MULTILINE)

MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
KINDS: dict[str, dict[str, Any]] = {manifest["kind"]: manifest for manifest in MANIFESTS}
POD = KINDS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


def lines_of(unit: str, setting: str) -> list[str]:
    return [
        line.partition("=")[2] for line in (DEPLOY / unit).read_text().splitlines() if line.startswith(f"{setting}=")
    ]


def options_of(arguments: list[str]) -> dict[str, Any]:
    """Return the options that the program parses from these arguments."""
    return typer.main.get_command(app).make_context("mmpos_server", list(arguments)).params


def unit_arguments() -> list[str]:
    (line,) = lines_of("mmpos.service", "ExecStart")
    python, *arguments = shlex.split(line)
    assert (python, arguments[:2]) == ("/opt/mmpos/bin/python", ["-m", "mmpos_server"])
    return arguments[2:]


def image_arguments() -> list[str]:
    (line,) = (line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line.startswith("CMD "))
    arguments: list[str] = json.loads(line.removeprefix("CMD "))
    return arguments


def hadolint(text: str) -> list[str]:
    """Return the hadolint rules that a Dockerfile breaks."""
    command = [str(HADOLINT), "--format", "json", "-"]
    completed = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return [rule["code"] for rule in json.loads(completed.stdout)]


def test_the_dockerfile_breaks_no_rule() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert hadolint(text) == []
    assert "DL3002" in hadolint(text.replace("USER 10001:10001", "USER root"))


def test_the_image_includes_the_package_sources() -> None:
    included = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert all((ROOT / name).exists() for name in included)
    assert {"mmpos", "server", "csrc", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} == set(included)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_contains_only_fields_of_its_kind(manifest: dict[str, object]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**manifest, "spce": {}}, KUBERNETES, strict=True)


def test_the_manifests_agree_with_each_other_and_with_the_program() -> None:
    labels = POD["metadata"]["labels"]
    selectors = [KINDS[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    assert [*selectors, KINDS["Service"]["spec"]["selector"]] == [labels] * 3
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    options = options_of(CONTAINER["args"])
    assert ports == {"grpc": 50051, "page": options["metrics_port"]}
    assert options["port"] is None  # 50051
    probes = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    ready, live = {"path": "/readyz", "port": "page"}, {"path": "/livez", "port": "page"}
    assert probes == {"startup": ready, "readiness": ready, "liveness": live}
    grace = POD["spec"]["terminationGracePeriodSeconds"]
    assert grace > options["notice_seconds"] + options["drain_seconds"]
    readiness = CONTAINER["readinessProbe"]
    assert options["notice_seconds"] > readiness["periodSeconds"] * readiness["failureThreshold"]
    (scaled,) = KINDS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert Metrics().registry.get_sample_value(scaled["pods"]["metric"]["name"]) == 0


def test_the_settings_in_the_manifest_are_valid_and_fit_its_memory() -> None:
    config = ServerConfig.read(KINDS["ConfigMap"]["data"]["mmpos.toml"], Path("mmpos.toml"))
    limits, concurrency = config.limits, config.concurrency
    parts = [
        7e8,  # the program and torch
        3 * concurrency.max_in_flight_bytes,
        (concurrency.max_in_flight + concurrency.max_streams) * limits.request_bytes,
        concurrency.max_streams * (WINDOW_BYTES + 5 * limits.response_bytes),
        concurrency.image_threads * 20 * 16_000_000,
        2 * 20 * ImageProcessor().max_source_pixels,
        2**30,
    ]
    assert CONTAINER["resources"]["limits"] == {"memory": "13Gi"}
    assert sum(parts) <= 13 * 2**30
    table = DEPLOYING.partition("| part | memory | in the chart |")[2].partition("\n\n")[0]
    assert re.findall(r"\| (\d\.\d) GB \|$", table, re.MULTILINE) == [f"{part / 1e9:.1f}" for part in parts]
    assert f"The sum is {sum(parts) / 1e9:.1f} GB" in DEPLOYING


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, check=False)


def rendered(*arguments: str) -> dict[str, dict[str, Any]]:
    """Return the manifests rendered by the chart, by kind, without the settings checksum."""
    completed = helm("template", "mmpos", str(DEPLOY / "helm"), *arguments)
    assert completed.returncode == 0, completed.stderr
    kinds = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(completed.stdout)}
    digest = kinds["Deployment"]["spec"]["template"]["metadata"]["annotations"].pop("checksum/settings")
    assert re.fullmatch("[0-9a-f]{64}", digest)
    return kinds


def test_the_chart_renders_the_manifest() -> None:
    lint = helm("lint", "--strict", str(DEPLOY / "helm"))
    assert lint.returncode == 0, lint.stdout
    assert rendered() == KINDS


def test_the_values_on_the_page_mount_the_files_that_the_server_reads(tmp_path: Path) -> None:
    (values,) = re.findall(r"^```yaml\n(.*?)^```", DEPLOYING, re.DOTALL | re.MULTILINE)
    (tmp_path / "values.yaml").write_text(values)
    kinds = rendered("-f", str(tmp_path / "values.yaml"))
    for manifest in kinds.values():
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = options_of(container["args"])
    files = {str(options[name]) for name in ("tls_cert", "tls_key", "token_file", "config")}
    assert files == {"/tls/tls.crt", "/tls/tls.key", "/tokens/tokens", "/etc/mmpos/mmpos.toml"}
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [
        *("/etc/mmpos", "/tmp", "/tls", "/tokens", "/models"),
    ]
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
    # The server warns about secrets that every user can read.
    assert [volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume] == [0o440] * 2
    config = ServerConfig.read(kinds["ConfigMap"]["data"]["mmpos.toml"], Path("mmpos.toml"))
    default = ServerConfig.read(KINDS["ConfigMap"]["data"]["mmpos.toml"], Path("mmpos.toml"))
    assert config.concurrency == default.concurrency
    assert str(config.profiles["my-model"].model).startswith("/models/")
    (port,) = kinds["Service"]["spec"]["ports"]
    assert port == {"name": "grpc", "port": 50051, "targetPort": "grpc"}


def test_chart_values_reach_the_manifests() -> None:
    flags = [
        "autoscaling.enabled=false",
        "replicas=2",
        "image.repository=registry/mmpos",
        "image.tag=2026",
        "noticeSeconds=5",
    ]
    kinds = rendered("--set", ",".join(flags), "--set-json", 'args=["--workers=2"]')
    for manifest in kinds.values():
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert kinds.keys() == KINDS.keys() - {"HorizontalPodAutoscaler"}
    assert (kinds["Deployment"]["spec"]["replicas"], pod["terminationGracePeriodSeconds"]) == (2, 55)
    assert container["image"] == "registry/mmpos:2026"
    assert options_of(container["args"])["workers"] == 2
    assert options_of(container["args"])["notice_seconds"] == 5


ALERTS = [rule for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
ALERT_EXPRESSIONS = [rule["expr"] for rule in ALERTS]
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_alerts_and_dashboard_name_existing_metrics() -> None:
    registry = Metrics().registry
    registry.register(ProcessMetrics(None))
    existing = {"mmpos_certificate_not_after_seconds"}  # exists only with TLS
    for family in registry.collect():
        existing |= {f"{family.name}{suffix}" for suffix in ("", "_total", "_bucket", "_info")}
    alerts, panels = (set(re.findall(r"mmpos_[a-z_]+", " ".join(words))) for words in (ALERT_EXPRESSIONS, QUERIES))
    assert alerts <= existing
    assert panels <= existing
    assert len(alerts) == 8
    families = {family.name for family in registry.collect()} | {"mmpos_certificate_not_after_seconds"}
    drawn = {re.sub("_(total|bucket|info)$", "", name) for name in panels}
    assert families - drawn == {"mmpos_start_time_seconds"}  # every other metric has a panel


def test_the_documentation_quotes_the_alerts() -> None:
    (quoted,) = filter(None, (ALERT.findall(page.read_text()) for page in (ROOT / "docs").rglob("*.md")))
    assert quoted == ALERT_EXPRESSIONS


def test_systemd_waits_longer_than_the_notice_and_the_drain() -> None:
    options = options_of(unit_arguments())
    (stop_timeout,) = map(int, lines_of("mmpos.service", "TimeoutStopSec"))
    assert stop_timeout > options["notice_seconds"] + options["drain_seconds"]


def test_the_image_exposes_the_server_ports() -> None:
    text, options = (DEPLOY / "Dockerfile").read_text(), options_of(image_arguments())
    assert (options["host"], options["port"]) == ("0.0.0.0", None)
    assert f"EXPOSE 50051 {options['metrics_port']}\n" in text
    assert f"127.0.0.1:{options['metrics_port']}/livez" in text


def test_the_image_and_the_unit_set_malloc_as_the_benchmarks_do() -> None:
    tuned = " ".join(f"{variable}={value}" for variable, (_, value) in TUNED.items())
    assert f"ENV {tuned}\n" in (DEPLOY / "Dockerfile").read_text()
    assert lines_of("mmpos.service", "Environment") == [tuned]


PROXY = (DEPLOY / "haproxy.cfg").read_text()
HAPROXY = shutil.which("haproxy")


def number(pattern: str) -> int:
    """Return the number in the only match of a pattern in the proxy's configuration."""
    (result,) = re.findall(pattern, PROXY)
    return int(result)


def test_the_proxy_agrees_with_the_servers() -> None:
    concurrency = load().concurrency
    assert number(r"default-server .* maxconn (\d+) ") < concurrency.max_in_flight + concurrency.max_streams
    assert number(r"bind :(\d+) proto h2\n") == 50051
    assert number(r"http-check connect port (\d+)") == options_of(image_arguments())["metrics_port"]
    assert f"uri {CONTAINER['readinessProbe']['httpGet']['path']}\n" in PROXY
    settings = "\n".join(re.findall(r"^#   (.*)", PROXY, re.MULTILINE))
    assert ServerConfig.read(settings, Path("mmpos.toml")).clients.max_share == 1.0


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
def test_the_proxy_refuses_calls_from_an_address_above_its_rate_but_no_probe(start: Start, tmp_path: Path) -> None:
    page, port, config = free_port(), free_port(), tmp_path / "haproxy.cfg"
    server = start("--metrics-port", str(page))
    text = PROXY
    for old, new in (
        ("bind :50051 proto", f"bind 127.0.0.1:{port} proto"),
        ("maxconn 4000", "maxconn 100"),  # connections use file descriptors, of which the tests may open only a few
        ("127.0.0.1:50061", server.address),
        ("connect port 9090", f"connect port {page}"),
        ("sc0_http_req_rate gt 5000", "sc0_http_req_rate gt 50"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    config.write_text(text)
    segments = mmpos.SegmentTable.from_documents([[mmpos.Text(3)]])
    with subprocess.Popen([str(HAPROXY), "-f", str(config)]) as proxy, Client(f"127.0.0.1:{port}") as client:
        try:
            for _ in range(40):
                assert client.place(segments).num_tokens == 3
            with pytest.raises(ServiceOverloadedError, match="too many calls from one address"):
                all(client.place(segments) for _ in range(40))
            assert client.healthy()
        finally:
            proxy.kill()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_valid_and_sandboxed(tmp_path: Path) -> None:
    service = (DEPLOY / "mmpos.service").read_text().replace("/opt/mmpos/bin/python", sys.executable)
    (tmp_path / "mmpos.service").write_text(service)
    for command in (["verify"], ["security", "--offline=yes", "--threshold=20"]):
        checked = [*command, str(tmp_path / "mmpos.service")]
        completed = subprocess.run(["systemd-analyze", *checked], capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        assert command != ["verify"] or completed.stderr == ""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_service_notifies_systemd_when_it_starts_and_stops(
    torchless: dict[str, str], tmp_path: Path, workers: str
) -> None:
    notified = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(notified)
        manager.settimeout(60)
        environment = {**torchless, "NOTIFY_SOCKET": notified}
        command = [sys.executable, "-m", "mmpos_server", "--port", "0", "--workers", workers]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            assert manager.recv(100) == b"READY=1"
            server.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            assert server.wait(60) == 0


# systemd runs in its own namespaces, from which it can neither see nor change this machine.
SYSTEM = """
set -e
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /opt
mkdir /opt/python /opt/packages /opt/source /opt/torchless
mount --bind {python} /opt/python
mount --bind {packages} /opt/packages
mount --bind {source} /opt/source
echo "import sys; sys.modules['torch'] = sys.modules['torchvision'] = None" > /opt/torchless/sitecustomize.py
exec env -i PATH="$PATH" container=test SYSTEMD_UNIT_PATH={units} {systemd} --system --unit=test.target
"""
SYSTEMD = next((path for path in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd") if Path(path).exists()), None)
NAMESPACES = ["unshare", "--fork", "--kill-child", "--pid", "--mount", "--uts", "--ipc", "--cgroup"]


def can_run_systemd() -> bool:
    """Return whether systemd is installed and is allowed to run in its own namespaces."""
    if SYSTEMD is None or shutil.which("nsenter") is None or os.geteuid() != 0:
        return False
    mount = [*NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[tuple[list[str], int, int]]:
    """Start the unit in systemd; yield the command prefix for systemctl, the gRPC port and the metrics page's port."""
    if not can_run_systemd():
        pytest.skip("systemd requires root and namespaces")
    port, page, units = free_port(), free_port(), tmp_path / "units"
    units.mkdir()
    # Only the targets that a service requires exist; none of this machine's units is loaded.
    for target in ("sysinit", "basic", "sockets", "shutdown", "network-online"):
        (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    (units / "test.target").write_text("[Unit]\nDefaultDependencies=no\nRequires=mmpos.service\n")
    path = "PYTHONPATH=/opt/torchless:/opt/source/server:/opt/source:/opt/packages LD_LIBRARY_PATH=/opt/python/lib"
    python = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    service = (DEPLOY / "mmpos.service").read_text()
    for old, new in (
        ("/opt/mmpos/bin/python", python),
        ("--config /etc/mmpos/mmpos.toml", f"--port {port}"),
        ("--metrics-port 9090", f"--metrics-port {page}"),
        ("[Install]", f"Environment={path}\n[Install]"),
    ):
        assert service.count(old) == 1
        service = service.replace(old, new)
    (units / "mmpos.service").write_text(service)
    start = SYSTEM.format(
        python=sys.base_prefix, packages=sysconfig.get_path("purelib"), source=ROOT, units=units, systemd=SYSTEMD
    )
    with subprocess.Popen([*NAMESPACES, "sh", "-c", start], stdout=subprocess.DEVNULL) as outside:
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
        assert eventually(lambda: bool(children.read_text()))
        inside = ["nsenter", "--target", children.read_text().strip(), "--mount", "--pid", "--uts", "--ipc", "--cgroup"]
        yield inside, port, page
        outside.kill()


@pytest.mark.systemd
def test_systemd_runs_and_restarts_the_unit(systemd: tuple[list[str], int, int]) -> None:
    inside, port, page = systemd

    def systemctl(*words: str) -> str:
        completed = subprocess.run([*inside, "systemctl", *words], capture_output=True, text=True, check=False)
        return completed.stdout.strip()

    assert eventually(lambda: systemctl("is-active", "mmpos") == "active")
    with Client(f"127.0.0.1:{port}", timeout=120) as client:
        for restarted in (False, True):
            if restarted:
                systemctl("restart", "mmpos")
            with closing(http.client.HTTPConnection("127.0.0.1", page, timeout=60)) as connection:
                connection.request("GET", "/readyz")
                with connection.getresponse() as response:
                    assert response.status == 200
            assert [profile.name for profile in client.info().profiles] == ["default"]
    systemctl("stop", "mmpos")
    assert systemctl("show", "mmpos", "-p", "Result", "-p", "ExecMainStatus") == "Result=success\nExecMainStatus=0"
