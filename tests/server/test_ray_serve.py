"""The services behind the ingress of Ray Serve, on a real local Ray: answers and errors are those of the server."""

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

# Ray warns of its own defaults.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),  # two of them starting at once are more than two cores can do in their time
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
        for check in ("READY", "HEALTH"):  # by which a proxy that starts on a busy machine is killed
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
    """Make the call of a client, of any content."""
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
    """Return the bytes of the answer; or status, details and the id of the request, which is sent along."""
    method: Any = channel.unary_unary(path)
    try:
        return method(request, metadata=[("x-request-id", "mine")], timeout=60)
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code(), failed.details(), dict(failed.trailing_metadata())["x-request-id"]


def stream(channel: grpc.Channel) -> Any:
    return channel.stream_stream(STREAM)


@pytest.mark.parametrize("kind", ["Place", "Build", "CosSin", "Rotate", "GetInfo"])
def test_answers_and_refusals_are_those_of_the_server_byte_by_byte(kind: str, pair: Pair) -> None:
    with grpc.insecure_channel(pair.ingress) as ingress, grpc.insecure_channel(pair.server) as server:
        rng = random.Random(kind)
        for _ in range(20):
            call = request(kind, rng)
            path, data = call.method.path, call.request().data
            assert path.endswith(f"/{kind}")
            assert outcome(ingress, path, data) == outcome(server, path, data)


def test_a_broken_request_and_one_that_is_too_large_are_refused(pair: Pair) -> None:
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


def test_a_client_asks_whether_it_serves(pair: Pair) -> None:
    with Client(pair.ingress, timeout=60) as client:
        assert (client.healthy(), client.healthy("no.such.Service")) == (True, False)


def test_a_stream_is_answered_in_order_and_an_item_fails_alone(pair: Pair) -> None:
    tables = [documents(random.Random(seed)) for seed in range(30)]
    queries = [PositionsQuery(table, "none" if i == 7 else "rope-tie") for i, table in enumerate(tables)]
    with Client(pair.ingress, timeout=60) as client:
        answers = list(client.stream(queries, errors="return"))
    assert [isinstance(each, MmposError) for each in answers] == [i == 7 for i in range(30)]
    results: list[Any] = [each for i, each in enumerate(answers) if i != 7]
    wanted = [place(table) for i, table in enumerate(tables) if i != 7]
    assert all(np.array_equal(g.table.dense(), w.dense()) for g, w in zip(results, wanted, strict=True))


def test_a_stream_that_breaks_has_its_status_and_one_that_is_left_gives_its_place_back(pair: Pair) -> None:
    with grpc.insecure_channel(pair.ingress) as channel:
        for wrong, status, said in (
            (b"\xff", "INVALID_ARGUMENT", "request: the bytes are not a protobuf message of this method"),
            (bytes(1_000_001), "RESOURCE_EXHAUSTED", "request: got 1000001 bytes, want <= 1000000"),
        ):
            broken = stream(channel)(iter([b"", wrong]), timeout=60)
            assert len(next(broken)) > 0
            with pytest.raises(grpc.RpcError) as raised:
                next(broken)
            failed: Any = raised.value
            assert (failed.code().name, failed.details()) == (status, said)
            assert eventually(lambda: _answers(channel))
        left = threading.Event()
        held = stream(channel)(_held(left), timeout=60)
        next(held)
        # The only place is taken; the ingress sends no metadata of a stream that fails, so no time to come back.
        second = stream(channel)(iter([b""]), timeout=60)
        with pytest.raises(grpc.RpcError) as raised:
            next(second)
        failed = raised.value
        assert (failed.code(), failed.details()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "max_streams: got 1 taken of 1",
        )
        held.cancel()
        left.set()
        assert eventually(lambda: _answers(channel))


def _held(left: threading.Event) -> Iterator[bytes]:
    yield b""
    left.wait()


def _answers(channel: grpc.Channel) -> bool:
    try:
        return len(list(stream(channel)(iter([b""]), timeout=60))) == 1
    except grpc.RpcError:
        return False


def test_a_refused_call_learns_when_to_retry(pair: Pair) -> None:
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
        for asking in [pool.submit(ask) for _ in range(8)]:
            asking.result(timeout=120)
    assert str(refused[0]) == "max_in_flight: got 1 taken of 1"
    assert 0 < refused[0].retry_after <= 30


def test_the_ingress_has_every_method_of_the_server_and_health() -> None:
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
    # Serve routes by the last part of the path alone.
    names = [name for result in added.values() for name in result]
    assert len(set(names)) == len(names)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError) as raised:
        application()
    want = 'want pip install "multimodal-positions[serve]" (in a clone: pip install ".[serve]")'
    assert str(raised.value) == f"mmpos_server.ray_serve: ray is not installed, {want}"


def test_the_file_in_the_documents_is_one_of_serve() -> None:
    from ray.serve.schema import ServeDeploySchema

    yaml: Any = pytest.importorskip("yaml")
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    schema = ServeDeploySchema.model_validate(yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0]))
    (made,), (deployment,) = schema.applications, schema.applications[0].deployments
    assert schema.grpc_options.grpc_servicer_functions == [SERVICER]
    assert made.import_path == f"{app.__module__}:{app.__name__}"
    assert deployment.name == application()._bound_deployment.name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"replicas": 2}, "replicas: got an unknown argument, want one of config, num_replicas, log_level"),
        ({"num_replicas": "none"}, "num_replicas: got 'none', want a number >= 1 or \"auto\""),
        ({"log_level": "loud"}, "log_level: got 'loud', want one of debug, info, warning, error"),
        ({"config": "/none.toml"}, "/none.toml: got No such file or directory, want a file that can be read"),
    ],
)
def test_wrong_arguments_are_refused_before_any_replica(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        app(arguments)
    assert str(raised.value) == said


def test_a_replica_takes_one_call_more_than_its_gates(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(SETTINGS)
    config = load(tmp_path / FILE)
    deployment = application(config, num_replicas=3)._bound_deployment
    assert (deployment.name, deployment.num_replicas) == ("mmpos", 3)
    assert deployment.max_ongoing_requests == 1 + 1 + 1
    assert application(config, max_ongoing_requests=5)._bound_deployment.max_ongoing_requests == 5
