"""Test both clients: arguments, requests, retries and statuses, channels and processes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from clients import failure, open_client
from fake_server import UNAVAILABLE, Fake, Place, echo, serving
from refusals import assert_refused
from results import assert_equal
from waiting import eventually

import mmpos.rotary
from mmpos import Grid, SegmentTable, Text, place
from mmpos.client import AsyncClient, Client, PositionsQuery, Tls
from mmpos.client.calls import build, build_batch, settings
from mmpos.client.channel import OpenChannel
from mmpos.errors import (
    InvalidInputError,
    LimitExceededError,
    MmposError,
    ServiceError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    UnsupportedError,
)
from mmpos.rotary import DevicePositions, Rotary, apply_rotary
from mmpos.rpc.v1 import positions_pb2 as pb

SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]])


def aborting(*outcomes: Any) -> tuple[Place, list[int]]:
    """Return a handler that aborts once with each of these outcomes before it answers, and its call count."""
    remaining, count = list(outcomes), [0]

    def handler(request: pb.PlaceRequest, context: grpc.ServicerContext) -> pb.PlaceResponse:
        count[0] += 1
        if remaining:
            code, details, metadata = remaining.pop(0)
            context.set_trailing_metadata(metadata)
            context.abort(code, details)
        return echo(request, context)

    return handler, count


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": ["a:1", "b:2"]}, "address: got ['a:1', 'b:2'], want"),
        ({"address": "localhost"}, 'address: got \'localhost\', want "host:port", "unix:path", "dns:///host:port" or'),
        ({"address": "localhost:0"}, "address: got 'localhost:0'"),
        ({"address": "localhost:65536"}, "address: got 'localhost:65536'"),
        ({"address": "::1:50051"}, "address: got '::1:50051'"),
        ({"address": "dns:///replicas"}, "address: got 'dns:///replicas'"),
        ({"timeout": None}, "timeout: got None, want seconds above 0"),
        ({"timeout": 0}, "timeout: got 0, want"),
        ({"timeout": float("nan")}, "timeout: got nan, want"),
        ({"timeout": float("inf")}, "timeout: got inf, want"),
        ({"timeout": True}, "timeout: got True, want"),
        ({"attempts": 0}, "attempts: got 0, want >= 1"),
        ({"attempts": 6}, "attempts: got 6, want <= 5"),
        ({"profile": 3}, "profile: got 3, want a name or None"),
        ({"tls": True}, "tls: got bool, want Tls or None"),
        ({"root_certificates": 1}, "tls.root_certificates: got int, want PEM bytes or a path"),
        ({"certificate": b"x"}, "tls.certificate requires tls.key"),
        ({"key": b"x"}, "tls.key requires tls.certificate"),
        ({"server_name": 1}, "tls.server_name: got 1, want a name or None"),
    ],
)
def test_invalid_arguments_are_refused_before_any_connection(arguments: Any, message: str) -> None:
    assert_refused(message, lambda: (Tls if message.startswith("tls.") else Client)(**arguments))


def test_a_missing_certificate_file_is_reported_and_a_private_key_not_shown(tmp_path: Path) -> None:
    client = Client("localhost:1", tls=Tls(tmp_path / "none.pem"))
    with pytest.raises(InvalidInputError, match=r"^tls.root_certificates: got '.*none.pem', want a file that can"):
        client.info()
    assert "secret" not in repr(Tls(certificate=b"public", key=b"secret"))


def test_with_options_reuses_the_channel_and_checks_its_arguments() -> None:
    handler, count = aborting(*[UNAVAILABLE] * 9)
    with serving(Fake(handler)) as address, Client(address, attempts=1) as client:
        other = client.with_options(profile="p", timeout=5)
        assert repr(other) == f"Client({address!r}, profile='p', timeout=5)"
        assert failure(lambda: client.with_options(timeout=-1))[0] is InvalidInputError
        for variant in (client, other):
            failure(variant.place, SEGMENTS)
    assert count == [2]
    assert other._channels is client._channels


# Requests


def test_parts_after_a_refused_part_are_not_sent() -> None:
    documents: list[list[Any]] = [["b", 3.5, b"x" * 1000], [3.5, b"x" * 1000], ["a"]]
    query = settings(None, None, 0, True)
    sizes = [len(build_batch(query, documents, errors).data) for errors in ("raise", "return")]
    assert sizes[0] < sizes[1] < 100  # no document follows the one whose error is raised
    with pytest.raises(InvalidInputError, match=r"^parts\[0\]: image: got float"):  # before the call
        build(query, documents[1])


def test_rotations_that_a_service_cannot_compute_are_refused(server: str) -> None:
    rotary, positions, q = Rotary(head_dim=8), place(SEGMENTS), torch.randn(15, 2, 8)
    gradients = "q: got a tensor that requires gradients, want a detached one; a service returns no gradients"
    with Client(server) as client:
        for x, k, options in (([1], None, {}), (q, q.double(), {}), (q, None, {"layout": "x"}), (q[:3], None, {})):
            local = failure(apply_rotary, x, k, positions, rotary, **options)
            assert failure(client.apply_rotary, x, k, positions, rotary, **options) == local
        for x, k, other, error in (
            (q.clone().requires_grad_(), None, rotary, (UnsupportedError, gradients)),
            (q, q.to("meta"), rotary, (InvalidInputError, "k must be on the device of q, cpu, got meta")),
            (q, None, "x", (InvalidInputError, "rotary: got str, want a Rotary or None")),
        ):
            assert failure(client.apply_rotary, x, k, positions, other) == error
        device = DevicePositions.from_table(positions, "cpu")
        assert failure(client.angles, rotary, device)[0] is InvalidInputError
        assert failure(client.cos_sin, rotary, positions, "x") == failure(mmpos.rotary.cos_sin, rotary, positions, "x")


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    names = [name for name in dir(Client) if not name.startswith("_")]
    assert names == [name for name in dir(AsyncClient) if not name.startswith("_")]
    for name in set(names) - {"stream", "stream_build"}:  # AsyncClient also accepts an async iterable
        one, other = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
        assert one == other, name


# Retries, deadlines and gRPC statuses


def pushback(milliseconds: int) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    return grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", (("grpc-retry-pushback-ms", str(milliseconds)),)


CANCELLED = (grpc.StatusCode.CANCELLED, "bye", ())


@pytest.mark.parametrize(
    ("outcome", "times", "attempts", "error", "count"),
    [
        # The server is stopping or overloaded: the call is sent again.
        (UNAVAILABLE, 3, 4, None, 4),
        (CANCELLED, 3, 4, None, 4),
        (pushback(1), 3, 4, None, 4),
        (UNAVAILABLE, 9, 1, ServiceUnavailableError, 1),
        (UNAVAILABLE, 9, 2, ServiceUnavailableError, 2),
        # The server says when.
        (pushback(250), 9, 2, ServiceOverloadedError, 2),
        (pushback(-1), 9, 2, LimitExceededError, 1),
        # No other attempt would succeed.
        ((grpc.StatusCode.INVALID_ARGUMENT, "no", ()), 9, 4, InvalidInputError, 1),
        ((grpc.StatusCode.UNIMPLEMENTED, "no", ()), 9, 4, UnsupportedError, 1),
        ((grpc.StatusCode.DEADLINE_EXCEEDED, "no", ()), 9, 4, ServiceTimeoutError, 1),
        ((grpc.StatusCode.INTERNAL, "no", ()), 9, 4, ServiceError, 1),
        ((grpc.StatusCode.ABORTED, "no", ()), 9, 4, ServiceError, 1),
    ],
)
def test_a_failed_call_is_sent_again_or_raises_an_error_of_mmpos(
    kind: str, outcome: Any, times: int, attempts: int, error: type[MmposError] | None, count: int
) -> None:
    handler, calls = aborting(*[outcome] * times)
    with serving(Fake(handler)) as address, open_client(kind, address, attempts=attempts) as client:
        if error is None:
            assert_equal(client.place(SEGMENTS), place(SEGMENTS))
        else:
            with pytest.raises(error, match=outcome[1]) as caught:
                client.place(SEGMENTS)
            assert (type(caught.value), getattr(caught.value, "retry_after", 0.25)) == (error, 0.25)
    assert calls == [count]


def test_a_retry_time_beyond_the_timeout_is_not_awaited() -> None:
    handler, _ = aborting(pushback(60_000))
    with serving(Fake(handler)) as address, Client(address, timeout=1) as client:
        assert failure(client.place, SEGMENTS)[0] is ServiceTimeoutError


def test_no_call_takes_longer_than_its_timeout(kind: str) -> None:
    over = threading.Event()

    def slow(request: pb.PlaceRequest, context: grpc.ServicerContext) -> pb.PlaceResponse:
        assert over.wait(300)
        return echo(request, context)

    with serving(Fake(slow)) as address, open_client(kind, address, timeout=0.2) as client:
        message = f"timeout: Place got no answer from {address} within 0.2 s"
        assert failure(client.place, SEGMENTS) == (ServiceTimeoutError, message)
        over.set()


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        (b"\xff", ["INTERNAL: Exception deserializing response!"] * 2),
        (b"", ["answer: positions.table.axes: got 0, want 1 to 16", "answer: got 0 results, want 1"]),
    ],
)
def test_a_malformed_answer_is_a_service_error(kind: str, raw: bytes, messages: list[str]) -> None:
    class Malformed(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: raw)

    with serving(Malformed()) as address, open_client(kind, address, timeout=300) as client:
        errors = [failure(client.place, SEGMENTS), failure(client.build, ["a"])]
        assert errors == [(ServiceError, message) for message in messages]


# Channels


def test_calls_are_spread_over_healthy_servers() -> None:
    fakes = [Fake(), Fake(), Fake()]
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(fake, serving=i < 2)) for i, fake in enumerate(fakes)]
        client = stack.enter_context(Client(f"ipv4:{','.join(addresses)}"))
        # Call until both healthy servers are connected.
        assert eventually(lambda: bool(client.place(SEGMENTS)) and all(fake.calls for fake in fakes[:2]))
        counts = [fake.calls for fake in fakes]
        for _ in range(30):
            client.place(SEGMENTS)
        first, second, third = (fake.calls - before for fake, before in zip(fakes, counts, strict=True))
        # A turn may end early: when the client learns late that the third server is not healthy.
        assert (first + second, min(first, second) >= 10, third) == (30, True, 0)
        unhealthy = stack.enter_context(Client(f"ipv4:{addresses[2]},127.0.0.1:1", attempts=1))
        assert failure(lambda: unhealthy.place(SEGMENTS))[0] is ServiceUnavailableError


def test_a_large_call_is_retried_and_its_large_answer_is_received() -> None:
    many = SegmentTable.from_documents([[Text(1)] * 100_000])
    handler, count = aborting(UNAVAILABLE)
    with serving(Fake(handler)) as address, Client(address) as client:
        table = client.place(many)  # by default, gRPC retries no call above 256 KiB
    assert (count, table.table.nbytes > 4 * 2**20) == ([2], True)  # by default, it receives no larger answer
    assert_equal(table, place(many))


def test_threads_share_one_channel(server: str) -> None:
    with Client(server) as client, ThreadPoolExecutor(8) as pool:
        for table in pool.map(lambda _: client.place(SEGMENTS), range(40)):
            assert_equal(table, place(SEGMENTS))
        assert len(client._channels._open) == 1


def test_a_closed_client_refuses_calls(server: str) -> None:
    async def aio() -> tuple[type, str]:
        async with AsyncClient(server) as client:
            assert_equal(await client.place(SEGMENTS), place(SEGMENTS))
        assert await client.healthy() is False
        with pytest.raises(ServiceError) as caught:
            await client.place(SEGMENTS)
        return type(caught.value), str(caught.value)

    with Client(server) as client:
        other = client.with_options(timeout=9)
        assert client.healthy()
    refused = ServiceError, "client: got a call after close(), want an open client"
    assert failure(client.place, SEGMENTS) == failure(other.place, SEGMENTS) == asyncio.run(aio()) == refused
    assert failure(lambda: list(client.stream([PositionsQuery(SEGMENTS)]))) == refused
    assert client.healthy() is False
    assert pickle.loads(pickle.dumps(client)).healthy()
    assert client._channels._open == {}


def test_closing_a_client_cancels_its_calls(kind: str) -> None:
    arrived, over = threading.Event(), threading.Event()

    def slow(request: pb.PlaceRequest, context: grpc.ServicerContext) -> pb.PlaceResponse:
        arrived.set()
        over.wait(300)
        return echo(request, context)

    async def main(address: str) -> None:
        client = AsyncClient(address)
        calls = [asyncio.ensure_future(client.place(SEGMENTS)) for _ in range(2)]
        assert await asyncio.to_thread(arrived.wait, 300)
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        assert calls[0].cancelled()
        await client.close()
        with pytest.raises(ServiceError, match=r"^CANCELLED: "):
            await calls[1]

    with serving(Fake(slow)) as address:
        if kind == "async":
            asyncio.run(main(address))
        else:
            client = Client(address)
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(client.place, SEGMENTS)
                assert arrived.wait(300)
                client.close()
                with pytest.raises(ServiceError, match=r"^CANCELLED: "):
                    call.result()
        over.set()


def test_a_call_during_a_close_by_another_thread_is_cancelled(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(server) as client, grpc.insecure_channel(server) as channel:
        channel.close()
        monkeypatch.setattr(client, "_opened", lambda: OpenChannel(channel))
        for call in (lambda: client.place(SEGMENTS), lambda: list(client.stream([PositionsQuery(SEGMENTS)]))):
            assert failure(call) == (ServiceError, "CANCELLED: the client was closed")
        assert client.healthy() is False


def test_an_async_client_works_in_successive_event_loops(server: str) -> None:
    client = AsyncClient(server)
    for _ in range(2):  # the first loop leaves its channel open
        assert_equal(asyncio.run(client.place(SEGMENTS)), place(SEGMENTS))
    assert len(client._channels._open) == 1

    async def last() -> None:
        assert_equal(await client.place(SEGMENTS), place(SEGMENTS))
        await client.close()

    asyncio.run(last())
    assert client._channels._open == {}
    gc.collect()


# Processes


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_pickled_client_keeps_its_options_and_has_no_channel(kind: Any) -> None:
    client = kind("ipv4:[::1]:1,[::1]:2", profile="p", timeout=3, attempts=2, tls=Tls(b"x"))
    other = pickle.loads(pickle.dumps(client))
    assert (type(other), other._options) == (kind, client._options)
    assert other._channels is not client._channels
    assert repr(other) == repr(client) == f"{kind.__name__}('ipv4:[::1]:1,[::1]:2', profile='p', timeout=3)"


FORKED = """
import os, sys
from mmpos import UnsupportedError
from mmpos.client import Client

client = Client(sys.argv[1], timeout=300)
client.build(["before"])
if os.fork() == 0:
    try:
        print(client.build(["after"]).input_ids.tolist(), flush=True)
    except UnsupportedError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
client.build(["before"])
"""


@pytest.mark.parametrize(
    ("support", "want"),
    [("1", "[97, 102, 116, 101, 114]\n"), ("0", "fork: the client made a call before the fork; set GRPC_ENABLE_FORK")],
)
def test_a_forked_client_opens_its_own_channel_or_refuses_a_call(support: str, want: str, server: str) -> None:
    command, environment = [sys.executable, "-c", FORKED, server], {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": support}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert completed.stdout.startswith(want), completed.stderr


def test_importing_without_grpc_names_the_pip_command() -> None:
    command = [sys.executable, "-c", "import sys; sys.modules['grpc'] = None; import mmpos.client"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    want = 'install it with: pip install "multimodal-positions[client]" (in a clone: pip install ".[client]")\n'
    assert completed.stderr.endswith(f"\nImportError: mmpos.client: grpc is not installed; {want}")
