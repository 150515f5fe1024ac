"""Attacks on a server in random rounds: messages, images, streams, metadata, HTTP/2 frames and idle connections."""

from __future__ import annotations

import asyncio
import random
import struct
import time
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
from message_strategies import REQUESTS, STREAMS, corpus
from mutations import image_files, mutate
from PIL import Image

from mmpos.rpc.v1 import positions_pb2, sequences_pb2

BAD = ("INTERNAL", "UNKNOWN")
CORE = ("Error parsing '", "Compression bit set but no encoding configured")
"""Beginnings of the transport's own errors, for wrong metadata such as grpc-encoding.

Their status is always INTERNAL, as the protocol requires, and the server never sees the call. They cost nothing and
leave no trace, so they count as refusals.
"""

HEALTH = "/grpc.health.v1.Health/Check"
PLACE = "/mmpos.rpc.v1.PositionService/Place"
OTHERS = [HEALTH, "/mmpos.rpc.v1.InfoService/GetInfo", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
UNARY = {f"/mmpos.rpc.v1.{method}": method for method in REQUESTS}
"""Methods with messages, and the names of their corpora."""


@dataclass
class Tally:
    """Counts of attack requests and their outcomes.

    Args:
        requests: number of requests sent.
        statuses: count of each status; for HTTP/2 frames without a status, how the connection ended.
        bad: count of each bad status by kind of request.
        samples: first occurrence of each bad status, as ATTACK:NUMBER and the details.
    """

    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    samples: dict[str, str] = field(default_factory=dict)

    def add(self, status: str, kind: str = "", detail: str = "") -> None:
        """Count a request under its status and kind."""
        if detail.startswith(CORE):
            status = "refused by the transport"
        self.requests += 1
        self.statuses[status] += 1
        if status in BAD:
            self.bad[f"{status} of {kind}"] += 1
            self.samples.setdefault(f"{status} of {kind}", detail)

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.requests += other.requests
        self.statuses.update(other.statuses)
        self.bad.update(other.bad)
        self.samples = {**other.samples, **self.samples}


Attack = Callable[[str, random.Random, Tally], Awaitable[None]]
"""One round of an attack on the server at an address."""


# Messages sent by a gRPC client.


@lru_cache
def valid_messages(path: str) -> list[bytes]:
    """Return valid messages for a method."""
    return corpus(UNARY[path], 50)


def mutant(path: str, chance: random.Random) -> bytes:
    """Return a method's message with a few changes, or sometimes random bytes."""
    if path not in UNARY or chance.random() < 0.05:
        return chance.randbytes(chance.choice([0, 1, 2, 5, 50, 500]))
    return mutate(chance.choice(valid_messages(path)), chance, valid_messages(path))


async def unary(channel: Any, path: str, raw: bytes, tally: Tally, **options: Any) -> None:
    """Make one call and count its outcome."""
    try:
        await channel.unary_unary(path)(raw, timeout=options.pop("timeout", 60), **options)
        tally.add("OK")
    except grpc.aio.AioRpcError as error:
        tally.add(error.code().name, path, f"{raw[:200].hex()}: {error.details()}")


async def messages(address: str, chance: random.Random, tally: Tally) -> None:
    """Send malformed messages to every method, several at a time, and cancel some calls immediately."""
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
    """Send broken image files, and files that are costly to decode."""
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
    """Encode a WebP that has few bytes but many pixels."""
    return hostile.encoded(Image.new("RGB", (side, side), (200, 10, 30)), "WEBP", lossless=True)


HOSTILE: Sequence[tuple[Callable[[int], bytes], int, int]] = (
    (hostile.padded_jpeg, 2**18, 2**20),
    (hostile.jpeg_of_scans, 100, 1000),
    (hostile.png_of_chunks, 10_000, 80_000),
    (hostile.deep_png, 500, 2000),
    (hostile.gif_of_blocks, 10_000, 500_000),
    (large_webp, 500, 2000),
)
"""Functions that encode costly image files, and the range of their argument."""


def hostile_image(chance: random.Random) -> bytes:
    """Draw an image file that costs more to decode than to send."""
    make, least, most = chance.choice(HOSTILE)
    return make(chance.randrange(least, most))


# HTTP/2 frames, from blocking connections: each round runs in a thread.


def in_thread(round_: Callable[[str, random.Random, Tally], None]) -> Attack:
    """Turn a blocking function into an attack."""

    @wraps(round_)
    async def attack(address: str, chance: random.Random, tally: Tally) -> None:
        await asyncio.to_thread(round_, address, chance, tally)

    return attack


@in_thread
def streams(address: str, chance: random.Random, tally: Tally) -> None:
    """Open streams of malformed items, some beginning with an invalid message, and reset some of the streams."""
    paths = [f"/mmpos.rpc.v1.{method}" for method in STREAMS]
    for _ in range(6):
        path = chance.choice(paths)
        base = path.replace("/Stream", "/")
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
                outcomes = connection.statuses(10 - left if chance.random() < 0.8 else 1)
        except (ConnectionError, H2Error) as error:
            outcomes = [(type(error).__name__, b"")]
        for status, details in outcomes:
            tally.add(status, path, details.decode(errors="replace"))


def odd_bytes(chance: random.Random) -> bytes:
    """Draw an unusual or invalid metadata value."""
    values = [b"\xff\xfe", b"Bearer \xc3\x28", b"", b" ", b"a" * 4000, b"\x80" * 300, b"1" * 30, b"999999999H", b"-1n"]
    return chance.choice([*values, chance.randbytes(20).replace(b"\0", b"").replace(b"\n", b"").replace(b"\r", b"")])


NAMES = [b"authorization", b"x-request-id", b"grpc-timeout", b"grpc-encoding", b"content-type", b"te", b"user-agent"]
NAMES += [b"x-odd", b"x-odd-bin", b"grpc-previous-rpc-attempts", b"grpc-accept-encoding", b"traceparent"]


@in_thread
def metadata(address: str, chance: random.Random, tally: Tally) -> None:
    """Make calls whose headers are odd, duplicated, missing or very numerous."""
    raw = valid_messages(PLACE)[0]
    for _ in range(20):
        odd = [(chance.choice(NAMES), odd_bytes(chance)) for _ in range(chance.choice([1, 1, 2, 3, 100]))]
        left_out = chance.choice(["", "", "", ":path", ":method", ":scheme", ":authority", "content-type", "te"])
        path = chance.choice([PLACE, PLACE, HEALTH, "/", "", "/a/b", "/\xff"])
        with suppress(ConnectionError, H2Error), Connection(address) as connection:
            stream = connection.call(path, *odd, left_out=left_out)
            connection.send(stream, message(raw if path == PLACE else b""), wait=False)
            [(status, details)] = connection.statuses(1)
            text = details.decode(errors="replace")
            tally.add(status, "metadata", f"{text}, of {odd!r}, without {left_out!r}, path {path!r}"[:600])


@in_thread
def frames(address: str, chance: random.Random, tally: Tally) -> None:
    """Send floods of frames and incomplete frames."""
    kind, calls = chance.choice(FLOODS), 1
    try:
        with Connection(address) as connection:
            calls = kind(connection, chance)
            connection.flush()
            outcomes = connection.statuses(min(calls, 20))
    except (ConnectionError, H2Error) as error:
        outcomes = [(type(error).__name__, b"")]
    for status, details in outcomes:
        tally.add(status, kind.__name__, details.decode(errors="replace"))
    tally.requests += max(0, calls - len(outcomes))


def rapid_reset(connection: Connection, chance: random.Random) -> int:
    """Begin calls and cancel each of them immediately."""
    for _ in range(500):
        stream = connection.call(PLACE)
        if chance.random() < 0.5:
            connection.send(stream, message(valid_messages(PLACE)[0]), wait=False)
        connection.h2.reset_stream(stream)
    return 500


def half_messages(connection: Connection, chance: random.Random) -> int:
    """Send messages that lack their last byte."""
    for _ in range(50):
        connection.send(connection.call(PLACE), message(bytes(chance.randrange(100, 1000)))[:-1], end=False, wait=False)
    return 50


def pings(connection: Connection, chance: random.Random) -> int:
    """Send many pings."""
    for _ in range(2000):
        connection.h2.ping(chance.randbytes(8))
    connection.send(connection.call(PLACE), message(valid_messages(PLACE)[0]))
    return 1


def settings(connection: Connection, chance: random.Random) -> int:
    """Change the settings many times, including the window size."""
    for _ in range(500):
        connection.h2.update_settings({4: chance.randrange(2**31), 3: chance.randrange(1000)})
    connection.send(connection.call(PLACE), message(valid_messages(PLACE)[0]), wait=False)
    return 1


def continuations(connection: Connection, chance: random.Random) -> int:
    """Send headers that never end."""
    frame = struct.pack(">I", 1000)[1:] + b"\x09\0" + struct.pack(">I", 1) + chance.randbytes(1000)
    connection.flush(b"\0\0\0\x01\0" + struct.pack(">I", 1) + frame * chance.choice([1, 1000]))
    return 1


def random_frames(connection: Connection, chance: random.Random) -> int:
    """Send frames of random types with random bodies."""
    for _ in range(50):
        body = chance.randbytes(chance.randrange(64))
        head = struct.pack(">I", len(body))[1:] + bytes([chance.randrange(12), chance.randrange(256)])
        connection.flush(head + struct.pack(">I", chance.choice([0, 1, 2, 3, 2**31 - 1])) + body)
    return 50


def small_windows(connection: Connection, chance: random.Random) -> int:
    """Request large answers without reading any of their bytes."""
    connection.h2.update_settings({4: 0})
    query = positions_pb2.PlaceRequest()
    query.query.spans.lengths.append(2**19)
    query.query.dense.SetInParent()
    for _ in range(20):
        connection.send(connection.call(PLACE), message(query.SerializeToString()), wait=False)
    return 20


def bombs(connection: Connection, chance: random.Random) -> int:
    """Send small messages that decompress to large ones, and messages that only claim to be compressed."""
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
    """Hold connections that send nothing, part of a preface, or random bytes, and watch an unchanging health status."""
    host, _, port = address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    openings = [b"", preface[: chance.randrange(24)], preface, preface + b"\0\0\0\4\0\0\0\0\0", chance.randbytes(200)]
    writers = []
    for _ in range(50):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(chance.choice(openings))
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


async def rounds(address: str, seed: str, names: Sequence[str], end: float, first: int) -> Tally:
    """Run rounds of these attacks concurrently until the deadline, with at least one round of each attack.

    A round depends only on the seed, the attack's name and the round's number, and may take a minute.
    """
    tally = Tally()

    async def repeat(name: str) -> None:
        number = first
        while time.time() < end or number == first:
            own = Tally()
            try:
                async with asyncio.timeout(60):
                    await ATTACKS[name](address, random.Random(f"{seed}/{name}/{number}"), own)
            except (TimeoutError, OSError) as error:
                own.add(type(error).__name__)
            own.samples = {bad: f"{name}:{number} {sample}" for bad, sample in own.samples.items()}
            tally.merge(own)
            number += 1

    await asyncio.gather(*map(repeat, names))
    return tally


def attacker(*arguments: Any) -> Tally:
    """Attack from a separate process; see ``rounds``."""
    return asyncio.run(rounds(*arguments))
