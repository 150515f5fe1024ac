"""Test that no slot stays taken after a storm of answered, refused, malformed, late and cancelled calls."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from message_strategies import tensor
from serving import Serving
from waiting import eventually

from mmpos.rpc.v1 import positions_pb2, rotary_pb2, sequences_pb2
from mmpos_server.app import Server
from mmpos_server.config import ServerConfig

PHOTO = (Path(__file__).parents[2] / "mmpos" / "photos" / "coffee.jpg").read_bytes()
CONFIG = ServerConfig.model_validate(
    {
        "concurrency": {
            "max_in_flight": 32,
            "max_streams": 4,
            "max_in_flight_bytes": 160_000_000,
        },
        "profiles": {"default": {"rotary": {"head_dim": 16}}},
    }
)
WANTED = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
PLACE, ROTATE = "PositionService/Place", "RotaryService/Rotate"
BUILD = "SequenceService/Build"


def requests() -> list[tuple[str, bytes]]:
    """Return methods with requests of every kind: handled in the call's thread or in each pool, or refused."""
    small = positions_pb2.PositionsQuery(spans={"lengths": [500] * 4})  # type: ignore[arg-type]
    large = positions_pb2.PositionsQuery(spans={"lengths": [500] * 4000}, dense={})  # type: ignore[arg-type]
    wrong = positions_pb2.PositionsQuery(profile="nothing")
    part = sequences_pb2.Part(image=PHOTO)
    document = sequences_pb2.Document(parts=[part])
    picture = sequences_pb2.SequencesQuery(documents=[document], patches=True)
    rotation = rotary_pb2.RotateRequest(q=tensor(np.zeros((100_000, 2, 16), np.float32), "float32"))
    rotation.positions.ids.CopyFrom(tensor(np.zeros((2, 100_000), np.int32), "int32"))
    return [
        *((PLACE, positions_pb2.PlaceRequest(query=query).SerializeToString()) for query in (small, large, wrong)),
        (BUILD, sequences_pb2.BuildRequest(query=picture).SerializeToString()),
        (ROTATE, rotation.SerializeToString()),
    ]


async def call(channel: Any, choices: list[tuple[str, bytes]], chance: random.Random) -> str:
    """Make a random call, which may be cancelled, late or malformed, and return its status."""
    method, raw = chance.choice(choices)
    kind = chance.choice(["valid", "cancelled", "late", "malformed"])
    raw = b"\xff" + raw if kind == "malformed" else raw
    pending = channel.unary_unary(f"/mmpos.rpc.v1.{method}")(
        raw, timeout=chance.random() / 50 if kind == "late" else 30
    )
    if kind == "cancelled":
        await asyncio.sleep(chance.random() / 20)
        pending.cancel()
    try:
        return str((await pending.code()).name)
    except asyncio.CancelledError:
        return "CANCELLED"


async def stream(channel: Any, choices: list[tuple[str, bytes]], chance: random.Random) -> str:
    """Make a random stream, which may be cancelled early, and return its status."""
    kind, path = chance.choice(
        [(PLACE, "PositionService/StreamPlace"), (BUILD, "SequenceService/StreamBuild")],
    )

    async def items() -> AsyncIterator[bytes]:
        for _ in range(chance.randrange(20)):
            # An item has its query in the second field; a request has it in the first.
            yield chance.choice(
                [b"\x12" + raw[1:] for method, raw in choices if method == kind] + [b"\xff"] * chance.randrange(2)
            )

    pending = channel.stream_stream(f"/mmpos.rpc.v1.{path}")(items(), timeout=chance.choice([0.02, 30]))
    try:
        async for _ in pending:
            if chance.random() < 0.1:
                pending.cancel()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return str((await pending.code()).name)


@pytest.mark.slow
def test_a_storm_of_calls_leaves_no_slot_taken() -> None:
    async def storm(address: str) -> set[str]:
        chance, choices, seen = random.Random(7), requests(), set[str]()
        async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
            start = time.monotonic()
            while (passed := time.monotonic() - start) < 3 or (passed < 60 and not seen >= WANTED):
                calls = [call(channel, choices, chance) for _ in range(50)]
                seen |= set(await asyncio.gather(*calls, *(stream(channel, choices, chance) for _ in range(8))))
        return seen

    server = Server(CONFIG)
    (address,) = server.start()
    try:
        seen = asyncio.run(storm(address))
        assert seen >= WANTED
        assert "UNKNOWN" not in seen
        serving = Serving(server, address, grpc.insecure_channel(address))
        assert eventually(lambda: not serving.taken()), serving.taken()
        assert serving.metric("in_flight") == serving.metric("streams") == 0
    finally:
        server.stop(5.0)
