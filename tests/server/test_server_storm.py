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
from open_inference import config
from serving import Serving
from shared_objects import PREFIX, shared
from waiting import eventually

from mmpos_server.app import Server
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.methods import SERVICE
from mmpos_server.shared_memory import SharedMemory

PHOTO = (Path(__file__).parents[2] / "mmpos" / "photos" / "coffee.jpg").read_bytes()
LIMITS: dict[str, object] = {
    "concurrency": {
        "max_in_flight": 40,
        "max_in_flight_images": 8,
        "max_streams": 4,
        "max_in_flight_bytes": 160_000_000,
    },
    "clients": {"requests_per_second": 5000.0},
}

WANTED = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}


def infer_request(model: str, *inputs: tuple[str, str, list[int], bytes]) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model)
    for name, datatype, shape, raw in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(raw)
    return request


def requests(key: str) -> list[tuple[str, bytes]]:
    """Return methods with requests of every kind: handled in the loop, in each pool or in shared memory, or refused."""
    lengths = np.full(4000, 500, np.int64).tobytes()
    picture = infer_request("sequences", ("parts", "BYTES", [1], len(PHOTO).to_bytes(4, "little") + PHOTO))
    picture.inputs.add(name="kinds", datatype="BYTES", shape=[1])
    picture.raw_input_contents.append(b"\5\0\0\0image")
    tokens = 100_000
    rotation = infer_request(
        "rotate",
        ("q", "FP32", [tokens, 2, 16], bytes(tokens * 128)),
        ("position_ids", "INT32", [2, tokens], bytes(tokens * 8)),
    )
    in_region = pb.ModelInferRequest(model_name="positions")
    tensors: list[Any] = [in_region.inputs.add(name="lengths", datatype="INT64", shape=[4000])]
    tensors.append(in_region.outputs.add(name="position_ids"))
    for tensor, size in zip(tensors, (32_000, 1 << 19), strict=True):
        tensor.parameters["shared_memory_region"].string_param = "r"
        tensor.parameters["shared_memory_byte_size"].int64_param = size
    region = pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=1 << 20)
    infer = [
        infer_request("positions", ("lengths", "INT64", [4000], lengths)),
        picture,
        rotation,
        in_region,
        infer_request("nothing"),
    ]
    return [
        *(("ModelInfer", message.SerializeToString()) for message in infer),
        ("SystemSharedMemoryRegister", region.SerializeToString()),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="r").SerializeToString()),
        ("ModelStatistics", b""),
    ]


async def call(channel: Any, choices: list[tuple[str, bytes]], chance: random.Random) -> str:
    """Make a random call, which may be cancelled, late or malformed, and return its status."""
    method, raw = chance.choice(choices)
    kind = chance.choice(["valid", "cancelled", "late", "malformed"])
    raw = b"\xff" + raw if kind == "malformed" else raw
    pending = channel.unary_unary(f"/{SERVICE}/{method}")(raw, timeout=chance.random() / 50 if kind == "late" else 30)
    if kind == "cancelled":
        await asyncio.sleep(chance.random() / 20)
        pending.cancel()
    try:
        return str((await pending.code()).name)
    except asyncio.CancelledError:
        return "CANCELLED"


async def stream(channel: Any, choices: list[tuple[str, bytes]], chance: random.Random) -> str:
    """Make a random stream, which may be cancelled early, and return its status."""

    async def items() -> AsyncIterator[bytes]:
        for _ in range(chance.randrange(20)):
            yield chance.choice(
                [raw for method, raw in choices if method == "ModelInfer"] + [b"\xff"] * chance.randrange(2)
            )

    pending = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(items(), timeout=chance.choice([0.02, 30]))
    try:
        async for _ in pending:
            if chance.random() < 0.1:
                pending.cancel()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return str((await pending.code()).name)


@pytest.mark.slow
def test_a_storm_of_calls_leaves_no_slot_taken() -> None:
    async def storm(address: str, key: str) -> set[str]:
        chance, choices, seen = random.Random(7), requests(key), set[str]()
        async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
            start = time.monotonic()
            while (passed := time.monotonic() - start) < 3 or (passed < 60 and not seen >= WANTED):
                calls = [call(channel, choices, chance) for _ in range(50)]
                seen |= set(await asyncio.gather(*calls, *(stream(channel, choices, chance) for _ in range(8))))
        return seen

    server = Server(config(**LIMITS), shared_memory=SharedMemory(PREFIX))
    (address,) = server.start()
    try:
        with shared(bytes(1 << 20)) as key:
            seen = asyncio.run(storm(address, key))
            assert seen >= WANTED
            assert "UNKNOWN" not in seen
            serving = Serving(server, address, grpc.insecure_channel(address))
            assert eventually(lambda: not serving.taken()), serving.taken()
            assert serving.metric("in_flight") == serving.metric("streams") == 0
    finally:
        server.stop(5.0)
