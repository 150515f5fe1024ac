"""Test health and reflection from bytes to bytes, and why health is not grpcio-health-checking's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from mmpos.errors import InvalidInputError
from mmpos.rpc.v1 import positions_pb2
from mmpos_server.health import Health, describe
from mmpos_server.methods import NotFoundError

NAME = positions_pb2.DESCRIPTOR.services_by_name["PositionService"].full_name
SERVING, STOPPED, UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"


def asked(service: str) -> bytes:
    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


def test_a_check_answers_for_the_server_and_each_service_until_the_server_stops() -> None:
    health = Health([NAME])
    assert [health.check(asked(name)) for name in ("", NAME)] == [SERVING, SERVING]
    health.stop()
    assert [health.check(asked(name)) for name in ("", NAME)] == [STOPPED, STOPPED]
    with pytest.raises(NotFoundError) as unknown:
        health.check(asked("x" * 10_000))
    assert str(unknown.value) == f"service: got {'x' * 300!r}, want a service of this server"
    with pytest.raises(DecodeError):
        health.check(b"\xff")


Opened = tuple[Callable[[], AsyncGenerator[bytes, None]], Callable[[], Any]]


def ours() -> Opened:
    own = Health([NAME])

    async def stop() -> None:
        own.stop()

    return lambda: own.watch(asked(NAME)), stop


def theirs() -> Opened:
    servicer = health.aio.HealthServicer()

    async def watch() -> AsyncGenerator[bytes, None]:
        answers: asyncio.Queue[bytes] = asyncio.Queue()

        class Context:
            async def write(self, answer: Any) -> None:
                await answers.put(answer.SerializeToString())

        serving = asyncio.create_task(servicer.Watch(health_pb2.HealthCheckRequest(), Context()))
        try:
            while True:
                yield await answers.get()
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    return watch, servicer.enter_graceful_shutdown


@pytest.mark.parametrize(
    "opened",
    [
        ours,
        pytest.param(
            theirs,
            marks=pytest.mark.xfail(raises=asyncio.InvalidStateError, strict=True, reason="use theirs when it passes"),
        ),
    ],
)
def test_a_watcher_that_leaves_does_not_take_the_others_along(opened: Callable[[], Opened]) -> None:
    async def run() -> list[bytes]:
        watch, stop = opened()
        stays, leaves = watch(), watch()
        seen = [await anext(stays), await anext(leaves)]
        following = asyncio.create_task(anext(stays))
        await leaves.aclose()
        await stop()
        for _ in range(100):
            await asyncio.sleep(0)
        return [*seen, following.result()]

    assert asyncio.run(run()) == [SERVING, SERVING, STOPPED]


def test_watches_end_when_the_server_stops() -> None:
    async def run() -> list[list[bytes]]:
        health = Health([NAME])

        async def seen(name: str) -> list[bytes]:
            return [answer async for answer in health.watch(asked(name))]

        watches = [asyncio.create_task(seen(name)) for name in ("", NAME, "unknown")]
        await asyncio.sleep(0)
        health.stop()
        return [*await asyncio.gather(*watches), await seen(NAME)]

    assert asyncio.run(run()) == [[SERVING, STOPPED], [SERVING, STOPPED], [UNKNOWN], [STOPPED]]


def test_reflection_lists_the_services_and_describes_them() -> None:
    answer = describe([NAME, "grpc.health.v1.Health"])

    def answered(**query: str) -> Any:
        (raw,) = answer(reflection_pb2.ServerReflectionRequest(**query).SerializeToString())
        return reflection_pb2.ServerReflectionResponse.FromString(raw)

    listed = answered(list_services="").list_services_response.service
    assert [service.name for service in listed] == ["grpc.health.v1.Health", NAME]
    files = answered(file_containing_symbol=NAME).file_descriptor_response.file_descriptor_proto
    assert positions_pb2.DESCRIPTOR.serialized_pb in files
    assert answered(file_by_filename="no such file").error_response.error_code == 5  # NOT_FOUND
    with pytest.raises(InvalidInputError, match=r"^request: got 1027 bytes, want <= 1024$"):
        answered(file_by_filename="x" * 1024)
    with pytest.raises(DecodeError):
        answer(b"\xff")
