"""Compare the services behind Ray Serve's ingress, on a local Ray cluster, with the server."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from waiting import eventually, free_port

from mmpos import Grid, SegmentTable, Text, place
from mmpos.client import Client, PositionsQuery
from mmpos.client import calls as client_calls
from mmpos.errors import InvalidInputError, MmposError, ServiceOverloadedError
from mmpos.rotary import Rotary
from mmpos_server.config import Profiles, load
from mmpos_server.ray_serve import SERVICER, Replica, add_services, app, application
from mmpos_server.services import methods
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.testing import running

ray = pytest.importorskip("ray")

# Ray warns about its own defaults.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group(
        "ray"
    ),  # if two Ray clusters start at the same time on two cores, they exceed their timeouts
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
]

SETTINGS = """
[limits]
request_bytes = 1_000_000

[concurrency]
max_in_flight = 1
max_streams = 1

[clients]
max_share = 1.0
"""
FILE = "settings.toml"
PLACE = "/mmpos.rpc.v1.PositionService/Place"
STREAM = "/mmpos.rpc.v1.PositionService/StreamPlace"


@dataclass(frozen=True)
class Pair:
    """The ingress and a server with the same settings."""

    ingress: str
    server: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    from ray import serve
    from ray.serve.config import gRPCOptions

    path, port = tmp_path_factory.mktemp("settings") / FILE, free_port()
    path.write_text(SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        for check in ("READY", "HEALTH"):  # these checks would kill a proxy that starts slowly on a busy machine
            patch.setenv(f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S", "300")
        patch.chdir(path.parent)
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
        try:
            serve.start(
                http_options={"port": free_port()},
                grpc_options=gRPCOptions(port=port, grpc_servicer_functions=[SERVICER]),
            )
            serve.run(app({"config": FILE, "num_replicas": "1"}))
            with running(load(path)) as server:
                yield Pair(f"localhost:{port}", server)
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


def documents(rng: random.Random) -> SegmentTable:
    parts = [part for _ in range(4) for part in (Text(rng.randint(1, 9)), Grid(rng.randint(1, 9), 4))]
    return SegmentTable.from_documents([[*parts, Text(1)], [Text(rng.randint(1, 99))]])


def request(kind: str, rng: random.Random) -> client_calls.ServiceCall[Any]:
    """Return a random call of this kind, as a client makes it."""
    table, rotary = documents(rng), Rotary(head_dim=8)
    if kind == "Place":
        return client_calls.place(None, table, rng.choice(["rope-tie", "mrope", "none"]))
    if kind == "Build":
        image = np.full((rng.randint(1, 99), 50, 3), 9, np.uint8)
        return client_calls.build_batch(None, [["a" * rng.randint(1, 9), image], [b"no image"]], "return")
    positions = place(table)
    if kind == "CosSin":
        return client_calls.cos_sin(None, rotary, positions)
    if kind == "Rotate":
        q = torch.tensor([rng.random() for _ in range(8 * positions.num_tokens)]).reshape(-1, 1, 8)
        return client_calls.apply_rotary(None, q, None, positions, rotary)
    return client_calls.info(None)


def outcome(channel: grpc.Channel, path: str, request: bytes) -> Any:
    """Return the bytes of the answer, or the status, details and request id of the error."""
    method: Any = channel.unary_unary(path)
    try:
        return method(request, metadata=[("x-request-id", "mine")], timeout=60)
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code(), failed.details(), dict(failed.trailing_metadata())["x-request-id"]


def stream(channel: grpc.Channel) -> Any:
    return channel.stream_stream(STREAM)


@pytest.mark.parametrize("kind", ["Place", "Build", "CosSin", "Rotate", "GetInfo"])
def test_answers_and_refusals_match_those_of_the_server_byte_for_byte(kind: str, pair: Pair) -> None:
    with grpc.insecure_channel(pair.ingress) as ingress, grpc.insecure_channel(pair.server) as server:
        rng = random.Random(kind)
        for _ in range(20):
            call = request(kind, rng)
            path, data = call.method.path, call.request().data
            assert path.endswith(f"/{kind}")
            assert outcome(ingress, path, data) == outcome(server, path, data)


def test_broken_and_oversized_requests_are_refused(pair: Pair) -> None:
    with grpc.insecure_channel(pair.ingress) as channel:
        assert outcome(channel, PLACE, b"\xff") == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "request: the bytes are not a protobuf message of this method",
            "mine",
        )
        assert outcome(channel, PLACE, bytes(1_000_001)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "request: got 1000001 bytes, want <= 1000000",
            "mine",
        )


def test_the_ingress_answers_health_checks(pair: Pair) -> None:
    with Client(pair.ingress, timeout=60) as client:
        assert (client.healthy(), client.healthy("no.such.Service")) == (True, False)


def test_a_stream_is_answered_in_order_and_continues_after_a_failed_item(pair: Pair) -> None:
    tables = [documents(random.Random(seed)) for seed in range(30)]
    queries = [PositionsQuery(table, "none" if i == 7 else "rope-tie") for i, table in enumerate(tables)]
    with Client(pair.ingress, timeout=60) as client:
        answers = list(client.stream(queries, errors="return"))
    assert [isinstance(answer, MmposError) for answer in answers] == [i == 7 for i in range(30)]
    results: list[Any] = [answer for i, answer in enumerate(answers) if i != 7]
    wanted = [place(table) for i, table in enumerate(tables) if i != 7]
    assert all(
        np.array_equal(result.table.dense(), table.dense()) for result, table in zip(results, wanted, strict=True)
    )


def test_a_broken_stream_ends_with_its_status_and_a_cancelled_stream_frees_its_slot(pair: Pair) -> None:
    with grpc.insecure_channel(pair.ingress) as channel:
        for wrong, status, details in (
            (b"\xff", "INVALID_ARGUMENT", "request: the bytes are not a protobuf message of this method"),
            (bytes(1_000_001), "RESOURCE_EXHAUSTED", "request: got 1000001 bytes, want <= 1000000"),
        ):
            broken = stream(channel)(iter([b"", wrong]), timeout=60)
            assert len(next(broken)) > 0
            with pytest.raises(grpc.RpcError) as raised:
                next(broken)
            failed: Any = raised.value
            assert (failed.code().name, failed.details()) == (status, details)
            assert eventually(lambda: _answers_streams(channel))
        left = threading.Event()
        first = stream(channel)(_items_until(left), timeout=60)
        next(first)
        # The only slot is taken. The ingress sends no metadata with a failed stream, and therefore no retry delay.
        second = stream(channel)(iter([b""]), timeout=60)
        with pytest.raises(grpc.RpcError) as raised:
            next(second)
        failed = raised.value
        assert (failed.code(), failed.details()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "max_streams: got 1 of 1 in use",
        )
        first.cancel()
        left.set()
        assert eventually(lambda: _answers_streams(channel))


def _items_until(left: threading.Event) -> Iterator[bytes]:
    yield b""
    left.wait()


def _answers_streams(channel: grpc.Channel) -> bool:
    try:
        return len(list(stream(channel)(iter([b""]), timeout=60))) == 1
    except grpc.RpcError:
        return False


def test_a_refused_call_carries_a_retry_delay(pair: Pair) -> None:
    positions, refused = place(SegmentTable.from_documents([[Text(4000)]])), list[ServiceOverloadedError]()
    q, rotary, enough = torch.randn(4000, 4, 8), Rotary(head_dim=8), threading.Event()

    def ask() -> None:
        while not enough.is_set():
            try:
                client.apply_rotary(q, None, positions, rotary)
            except ServiceOverloadedError as error:
                refused.append(error)
                enough.set()

    with Client(pair.ingress, timeout=60) as client, ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(ask) for _ in range(8)]:
            future.result(timeout=120)
    assert str(refused[0]) == "max_in_flight: got 1 of 1 in use"
    assert 0 < refused[0].retry_after <= 30


def test_the_ingress_offers_every_server_method_and_the_health_check() -> None:
    replica, added = Replica(load(), "error"), dict[str, list[str]]()

    class Server:
        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            (handler,) = handlers
            added[handler.service_name()] = [path.rpartition("/")[2] for path in handler._method_handlers]

    add_services(replica, Server())
    wanted: dict[str, list[str]] = {"grpc.health.v1.Health": ["Check"]}
    for method in methods(Profiles.from_config(load()), load().limits, SharedMemory()):
        names = wanted.setdefault(method.service, [])
        names.extend([method.name, *([method.twin.name] if method.twin else [])])
    assert {name: sorted(result) for name, result in added.items()} == {name: sorted(w) for name, w in wanted.items()}
    # Serve routes only by the last part of the path.
    names = [name for result in added.values() for name in result]
    assert len(set(names)) == len(names)


def test_a_missing_package_is_reported_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError) as raised:
        application()
    want = 'install it with: pip install "multimodal-positions[serve]" (in a clone: pip install ".[serve]")'
    assert str(raised.value) == f"mmpos_server.ray_serve: ray is not installed; {want}"


def test_the_deployment_file_in_the_documentation_is_valid() -> None:
    from ray.serve.schema import ServeDeploySchema

    yaml: Any = pytest.importorskip("yaml")
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    schema = ServeDeploySchema.model_validate(yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0]))
    (described,), (deployment,) = schema.applications, schema.applications[0].deployments
    assert schema.grpc_options.grpc_servicer_functions == [SERVICER]
    assert described.import_path == f"{app.__module__}:{app.__name__}"
    assert deployment.name == application()._bound_deployment.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 2}, "replicas: got an unknown argument, want one of config, num_replicas, log_level"),
        ({"num_replicas": "none"}, "num_replicas: got 'none', want a number >= 1 or \"auto\""),
        ({"log_level": "loud"}, "log_level: got 'loud', want one of debug, info, warning, error"),
        ({"config": "/none.toml"}, "/none.toml: got No such file or directory, want a file that can be read"),
    ],
)
def test_invalid_arguments_are_refused_before_a_replica_starts(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        app(arguments)
    assert str(raised.value) == message


def test_a_replica_accepts_one_more_call_than_its_gates(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(SETTINGS)
    config = load(tmp_path / FILE)
    deployment = application(config, num_replicas=3)._bound_deployment
    assert (deployment.name, deployment.num_replicas) == ("mmpos", 3)
    assert deployment.max_ongoing_requests == 1 + 1 + 1
    assert application(config, max_ongoing_requests=5)._bound_deployment.max_ongoing_requests == 5
