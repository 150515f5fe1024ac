"""Test health and reflection from bytes to bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from waiting import bounded

from mmpos.errors import InvalidInputError
from mmpos.rpc.v1 import positions_pb2
from mmpos_server.health import Health, describe

NAME = positions_pb2.DESCRIPTOR.services_by_name["PositionService"].full_name
SERVING, STOPPED, UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"


def asked(service: str) -> bytes:
    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


@bounded
async def test_checks_and_watchers_see_the_stop_and_one_that_leaves_takes_no_other_along() -> None:
    own = Health([NAME])

    async def seen(name: str) -> list[bytes]:
        return [answer async for answer in own.watch(asked(name))]

    watches = [asyncio.create_task(seen(name)) for name in ("", NAME, "unknown")]
    await asyncio.sleep(0)
    leaves = own.watch(asked(NAME))
    assert await anext(leaves) == SERVING
    await leaves.aclose()
    assert [own.check(asked(name)) for name in ("", NAME)] == [SERVING, SERVING]
    own.stop()
    assert [own.check(asked(name)) for name in ("", NAME)] == [STOPPED, STOPPED]
    assert await asyncio.gather(*watches) == [[SERVING, STOPPED], [SERVING, STOPPED], [UNKNOWN]]
    assert await seen(NAME) == [STOPPED]


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
