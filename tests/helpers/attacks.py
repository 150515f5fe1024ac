"""Attacks on a server, each in rounds of its own chance: messages, images, streams, metadata, frames, silence."""

from __future__ import annotations

import asyncio
import io
import random
import struct
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

import grpc
import hostile_images as hostile
from h2.exceptions import H2Error
from http2 import Connection, message
from message_strategies import INFER, REQUESTS, STREAMS, corpus
from mutations import image_files, mutate
from PIL import Image

from mmpos.rpc.v1 import positions_pb2, sequences_pb2

BAD = ("INTERNAL", "UNKNOWN")
CORE = ("Error parsing '", "Compression bit set but no encoding configured")
"""Beginnings of the transport's own errors, for wrong metadata such as grpc-encoding: always with INTERNAL, which the
protocol asks for, and before a server knows of the call. It costs nothing and leaves no trace, so it is counted as a
refusal."""

HEALTH = "/grpc.health.v1.Health/Check"
PLACE = "/mmpos.rpc.v1.PositionService/Place"
OTHERS = [
    HEALTH,
    "/mmpos.rpc.v1.InfoService/GetInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    *(
        f"/inference.GRPCInferenceService/{name}"
        for name in ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig")
    ),
    *(
        f"/inference.GRPCInferenceService/{kind}SharedMemory{verb}"
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    ),
]
UNARY = {
    **{f"/mmpos.rpc.v1.{method}": method for method in REQUESTS},
    f"/inference.GRPCInferenceService/{INFER}": INFER,
}
"""Methods with messages, and what their corpus is called."""


@dataclass
class Tally:
    """Counts of the requests of attacks, and of how they ended.

    Args:
        requests: that were sent.
        statuses: how often each came; of HTTP/2 frames that got no status, how the connection ended.
        bad: how often each bad status came of each kind of request.
        samples: of each of these, where it came first: ATTACK:NUMBER and what it said.
    """

    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    samples: dict[str, str] = field(default_factory=dict)

    def add(self, status: str, kind: str = "", detail: str = "") -> None:
        """Count a request of a kind."""
        if detail.startswith(CORE):
            status = "refused by the transport"
        self.requests += 1
        self.statuses[status] += 1
        if status in BAD:
            self.bad[f"{status} of {kind}"] += 1
            self.samples.setdefault(f"{status} of {kind}", detail)

    def merge(self, other: Tally) -> None:
        """Add another."""
        self.requests += other.requests
        self.statuses.update(other.statuses)
        self.bad.update(other.bad)
        self.samples = {**other.samples, **self.samples}


Attack = Callable[[str, random.Random, Tally], Awaitable[None]]
"""A round on the server of an address."""


# Messages by the client of gRPC.


@lru_cache
def right(path: str) -> list[bytes]:
    """Messages of a method that are right."""
    return corpus(UNARY[path], 50)


def mutant(path: str, chance: random.Random) -> bytes:
    """A message of a method, broken a little; now and then only bytes."""
    if path not in UNARY or chance.random() < 0.05:
        return chance.randbytes(chance.choice([0, 1, 2, 5, 50, 500]))
    return mutate(chance.choice(right(path)), chance, right(path))


async def unary(channel: Any, path: str, raw: bytes, tally: Tally, **options: Any) -> None:
    """One call."""
    try:
        await channel.unary_unary(path)(raw, timeout=options.pop("timeout", 60), **options)
        tally.add("OK")
    except grpc.aio.AioRpcError as error:
        tally.add(error.code().name, path, f"{raw[:200].hex()}: {error.details()}")


async def messages(address: str, chance: random.Random, tally: Tally) -> None:
    """Send broken messages to every method, some at a time; a few are given up at once."""
    async with grpc.aio.insecure_channel(address) as channel:
        for _ in range(12):
            paths = [chance.choice([*UNARY, *UNARY, *OTHERS]) for _ in range(16)]
            timeouts = [chance.choice([0.001, *[60] * 15]) for _ in paths]
            await asyncio.gather(
                *(
                    unary(channel, path, mutant(path, chance), tally, timeout=timeout)
                    for path, timeout in zip(paths, timeouts, strict=True)
                )
            )


async def pictures(address: str, chance: random.Random, tally: Tally) -> None:
    """Send broken and hostile image files."""
    raw = image_files()
    async with grpc.aio.insecure_channel(address) as channel:
        for _ in range(6):
            requests = []
            for _ in range(4):
                image = hostile_image(chance) if chance.random() < 0.2 else mutate(chance.choice(raw), chance, raw)
                request = sequences_pb2.BuildRequest()
                request.query.patches = chance.random() < 0.9
                request.query.documents.add().parts.add(image=image)
                requests.append(request.SerializeToString())
            path = "/mmpos.rpc.v1.SequenceService/Build"
            await asyncio.gather(*(unary(channel, path, request, tally) for request in requests))


def large_webp(side: int) -> bytes:
    """A WebP of few bytes and many pixels."""
    target = io.BytesIO()
    Image.new("RGB", (side, side), (200, 10, 30)).save(target, "WEBP", lossless=True)
    return target.getvalue()


HOSTILE: Sequence[tuple[Callable[[int], bytes], int, int]] = (
    (hostile.padded_jpeg, 2**18, 2**20),
    (hostile.jpeg_of_scans, 100, 1000),
    (hostile.png_of_chunks, 10_000, 80_000),
    (hostile.deep_png, 500, 2000),
    (hostile.gif_of_blocks, 10_000, 500_000),
    (large_webp, 500, 2000),
)
"""Makers of image files, and the least and the most of what each has too much of."""


def hostile_image(chance: random.Random) -> bytes:
    """An image file that costs more to read than to send."""
    make, least, most = chance.choice(HOSTILE)
    return make(chance.randrange(least, most))


# Frames of HTTP/2, which connections write that wait: each round in a thread.


def in_thread(round_: Callable[[str, random.Random, Tally], None]) -> Attack:
    """Make an attack of a function that waits."""

    @wraps(round_)
    async def attack(address: str, chance: random.Random, tally: Tally) -> None:
        await asyncio.to_thread(round_, address, chance, tally)

    return attack


@in_thread
def streams(address: str, chance: random.Random, tally: Tally) -> None:
    """Open streams of broken items, and leave some in the middle; of some the first item is no message."""
    paths = [f"/mmpos.rpc.v1.{method}" for method in STREAMS]
    for _ in range(6):
        path = chance.choice([*paths, "/inference.GRPCInferenceService/ModelStreamInfer"])
        base = "/inference.GRPCInferenceService/ModelInfer" if "Infer" in path else path.replace("/Stream", "/")
        left = 0
        try:
            with Connection(address) as connection:
                for _ in range(10):
                    stream = connection.call(path)
                    items = b"".join(message(mutant(base, chance)) for _ in range(10))
                    connection.send(stream, items, wait=False)
                    if chance.random() < 0.2:
                        connection.h2.reset_stream(stream)
                        left += 1
                connection.flush()
                found = connection.statuses(10 - left if chance.random() < 0.8 else 1)
        except (ConnectionError, H2Error) as error:
            found = [(type(error).__name__, b"")]
        for status, said in found:
            tally.add(status, path, said.decode(errors="replace"))


def odd_bytes(chance: random.Random) -> bytes:
    """A value of metadata that is none."""
    some = [b"\xff\xfe", b"Bearer \xc3\x28", b"", b" ", b"a" * 4000, b"\x80" * 300, b"1" * 30, b"999999999H", b"-1n"]
    return chance.choice([*some, chance.randbytes(20).replace(b"\0", b"").replace(b"\n", b"").replace(b"\r", b"")])


NAMES = [b"authorization", b"x-request-id", b"grpc-timeout", b"grpc-encoding", b"content-type", b"te", b"user-agent"]
NAMES += [b"x-odd", b"x-odd-bin", b"grpc-previous-rpc-attempts", b"grpc-accept-encoding", b"traceparent"]


@in_thread
def metadata(address: str, chance: random.Random, tally: Tally) -> None:
    """Calls whose headers are odd, double, missing or very many."""
    raw = right(PLACE)[0]
    for _ in range(20):
        odd = [(chance.choice(NAMES), odd_bytes(chance)) for _ in range(chance.choice([1, 1, 2, 3, 100]))]
        left_out = chance.choice(["", "", "", ":path", ":method", ":scheme", ":authority", "content-type", "te"])
        path = chance.choice([PLACE, PLACE, HEALTH, "/", "", "/a/b", "/\xff"])
        with suppress(ConnectionError, H2Error), Connection(address) as connection:
            stream = connection.call(path, *odd, left_out=left_out)
            connection.send(stream, message(raw if path == PLACE else b""), wait=False)
            [(status, said)] = connection.statuses(1)
            words = said.decode(errors="replace")
            tally.add(status, "metadata", f"{words}, of {odd!r}, without {left_out!r}, path {path!r}"[:600])


@in_thread
def frames(address: str, chance: random.Random, tally: Tally) -> None:
    """Floods and halves of frames."""
    kind, calls = chance.choice(FLOODS), 1
    try:
        with Connection(address) as connection:
            calls = kind(connection, chance)
            connection.flush()
            found = connection.statuses(min(calls, 20))
    except (ConnectionError, H2Error) as error:
        found = [(type(error).__name__, b"")]
    for status, said in found:
        tally.add(status, kind.__name__, said.decode(errors="replace"))
    tally.requests += max(0, calls - len(found))


def rapid_reset(connection: Connection, chance: random.Random) -> int:
    """Begin calls and cancel each at once."""
    for _ in range(500):
        stream = connection.call(PLACE)
        if chance.random() < 0.5:
            connection.send(stream, message(right(PLACE)[0]), wait=False)
        connection.h2.reset_stream(stream)
    return 500


def half_messages(connection: Connection, chance: random.Random) -> int:
    """Send messages that do not end."""
    for _ in range(50):
        connection.send(connection.call(PLACE), message(bytes(chance.randrange(100, 1000)))[:-1], end=False, wait=False)
    return 50


def pings(connection: Connection, chance: random.Random) -> int:
    """Ask for many answers to pings and settings."""
    for _ in range(2000):
        connection.h2.ping(chance.randbytes(8))
    connection.send(connection.call(PLACE), message(right(PLACE)[0]))
    return 1


def settings(connection: Connection, chance: random.Random) -> int:
    """Change the settings again and again, windows among them."""
    for _ in range(500):
        connection.h2.update_settings({4: chance.randrange(2**31), 3: chance.randrange(1000)})
    connection.send(connection.call(PLACE), message(right(PLACE)[0]), wait=False)
    return 1


def continuations(connection: Connection, chance: random.Random) -> int:
    """Send headers that do not end."""
    frame = struct.pack(">I", 1000)[1:] + b"\x09\0" + struct.pack(">I", 1) + chance.randbytes(1000)
    connection.flush(b"\0\0\0\x01\0" + struct.pack(">I", 1) + frame * chance.choice([1, 1000]))
    return 1


def random_frames(connection: Connection, chance: random.Random) -> int:
    """Send frames of any kind with anything in them."""
    for _ in range(50):
        body = chance.randbytes(chance.randrange(64))
        head = struct.pack(">I", len(body))[1:] + bytes([chance.randrange(12), chance.randrange(256)])
        connection.flush(head + struct.pack(">I", chance.choice([0, 1, 2, 3, 2**31 - 1])) + body)
    return 50


def small_windows(connection: Connection, chance: random.Random) -> int:
    """Ask for large answers and read nothing of them."""
    connection.h2.update_settings({4: 0})
    query = positions_pb2.PlaceRequest()
    query.query.spans.lengths.append(2**19)
    query.query.dense.SetInParent()
    for _ in range(20):
        connection.send(connection.call(PLACE), message(query.SerializeToString()), wait=False)
    return 20


def bombs(connection: Connection, chance: random.Random) -> int:
    """Send little that unpacks to much, and what only says that it is packed."""
    empty = sequences_pb2.BuildRequest()
    empty.query.documents.add().parts.add()
    raw = chance.choice([empty.SerializeToString(), b"\x0a\0"]) * chance.randrange(1000, 2**20)
    squeeze = zlib.compressobj(9, wbits=31)
    packed = squeeze.compress(raw) + squeeze.flush()
    for data in (packed, packed[:-4], b"no gzip"):
        encoding = chance.choice([b"gzip", b"deflate", b"identity", b"br"])
        stream = connection.call("/mmpos.rpc.v1.SequenceService/Build", (b"grpc-encoding", encoding))
        connection.send(stream, message(data, compressed=True), wait=False)
    return 3


FLOODS: Sequence[Callable[[Connection, random.Random], int]] = (
    rapid_reset,
    half_messages,
    pings,
    settings,
    continuations,
    random_frames,
    small_windows,
    bombs,
)


# Bytes.


async def idle(address: str, chance: random.Random, tally: Tally) -> None:
    """Hold connections that say nothing, half of a preface, or anything, and watch health that never changes."""
    host, _, port = address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    some = [b"", preface[: chance.randrange(24)], preface, preface + b"\0\0\0\4\0\0\0\0\0", chance.randbytes(200)]
    writers = []
    for _ in range(50):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(chance.choice(some))
            writers.append(writer)
            tally.add("held")
    async with grpc.aio.insecure_channel(address) as channel:
        watch_of: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watches = [watch_of(mutant(HEALTH, chance)) for _ in range(20)]
        await asyncio.sleep(0.5)
        for watch in watches:
            watch.cancel()
            code = await watch.code()
            tally.add(code.name, "Watch", await watch.details())
    for writer in writers:
        writer.transport.abort()


ATTACKS: dict[str, Attack] = {one.__name__: one for one in (messages, pictures, streams, metadata, frames, idle)}
