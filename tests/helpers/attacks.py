"""Attacks on a server, each in rounds of its own chance: messages, images, streams, metadata, frames, silence."""

from __future__ import annotations

import asyncio
import io
import random
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hostile_images as hostile
from message_strategies import REQUESTS, STREAMS, corpus
from mutations import broken, files
from PIL import Image
from test_service_mutations import inferences

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
    "/inference.GRPCInferenceService/ModelInfer": "",
}
"""Methods with messages, and what their corpus is called; none is that of the Open Inference Protocol."""


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
    method = UNARY[path]
    return corpus(method, 50) if method else inferences()


def mutant(path: str, chance: random.Random) -> bytes:
    """A message of a method, broken a little; now and then only bytes."""
    if path not in UNARY or chance.random() < 0.05:
        return chance.randbytes(chance.choice([0, 1, 2, 5, 50, 500]))
    return broken(chance.choice(right(path)), chance, right(path))


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
    raw = files()
    async with grpc.aio.insecure_channel(address) as channel:
        for _ in range(6):
            requests = []
            for _ in range(4):
                image = hostile_image(chance) if chance.random() < 0.2 else broken(chance.choice(raw), chance, raw)
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


# Frames of HTTP/2.


class Wire:
    """A connection that says what no client would.

    Args:
        reader: from the server.
        writer: to it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self.said = reader, writer, ""
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
            )
        )
        self.h2.initiate_connection()

    async def flush(self) -> None:
        """Send what is to be sent."""
        self._writer.write(self.h2.data_to_send())
        await self._writer.drain()

    async def raw(self, data: bytes) -> None:
        """Send bytes after it."""
        await self.flush()
        self._writer.write(data)
        await self._writer.drain()

    def call(self, path: str = PLACE, *metadata: tuple[bytes, bytes], left_out: str = "") -> int:
        """Begin a call; gives its stream."""
        stream = self.h2.get_next_available_stream_id()
        head = {
            ":method": b"POST",
            ":scheme": b"http",
            ":path": path.encode(),
            ":authority": b"localhost",
            "content-type": b"application/grpc",
            "te": b"trailers",
        }
        pairs = [(name.encode(), value) for name, value in head.items() if name != left_out]
        self.h2.send_headers(stream, [*pairs, *metadata])
        return stream

    def send(self, stream: int, raw: bytes, *, missing: int = 0, compressed: bool = False, end: bool = True) -> None:
        """Send a message, without its last bytes, as far as the window allows."""
        framed = struct.pack(">BI", compressed, len(raw)) + raw
        framed = framed[: len(framed) - missing]
        room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
        self.h2.send_data(stream, framed[:room], end_stream=end and not missing and len(framed) <= room)

    async def statuses(self, calls: int, seconds: float = 1.0) -> list[str]:
        """Wait for the ends of these calls, as far as they come in time."""
        found: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(found) < calls:
                    data = await self._reader.read(65_536)
                    if not data:
                        return [*found, *["closed"] * (calls - len(found))]
                    for event in self.h2.receive_data(data):
                        if (ended := _ended(event)) is not None:
                            status, self.said = ended
                            found.append(status)
                        if isinstance(event, h2.events.DataReceived):
                            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    await self.flush()
        return found + ["open"] * (calls - len(found))


def _ended(event: Any) -> tuple[str, str] | None:
    """Status and words of a call, if it has ended."""
    if isinstance(event, h2.events.StreamReset):
        return "reset", ""
    if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
        headers = dict(event.headers)
        if b"grpc-status" in headers:
            number = int(headers[b"grpc-status"])
            name = next((code.name for code in grpc.StatusCode if code.value[0] == number), str(number))
            return name, headers.get(b"grpc-message", b"").decode(errors="replace")
        if headers.get(b":status", b"200") != b"200":
            return f"HTTP {headers[b':status'].decode()}", ""
    return None


@asynccontextmanager
async def wire(address: str) -> AsyncIterator[Wire]:
    """A connection of frames."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def streams(address: str, chance: random.Random, tally: Tally) -> None:
    """Open streams of broken items, and leave some in the middle; of some the first item is no message."""
    paths = [f"/mmpos.rpc.v1.{method}" for method in STREAMS]
    for _ in range(6):
        async with wire(address) as connection:
            path = chance.choice([*paths, "/inference.GRPCInferenceService/ModelStreamInfer"])
            base = "/inference.GRPCInferenceService/ModelInfer" if "Infer" in path else path.replace("/Stream", "/")
            left = 0
            try:
                for _ in range(10):
                    stream = connection.call(path)
                    items = [mutant(base, chance) for _ in range(10)]
                    for item in items:
                        connection.send(stream, item, end=item is items[-1])
                    if chance.random() < 0.2:
                        connection.h2.reset_stream(stream)
                        left += 1
                await connection.flush()
                found = await connection.statuses(10 - left if chance.random() < 0.8 else 1)
            except (ConnectionError, h2.exceptions.H2Error) as error:
                found = [type(error).__name__]
            for status in found:
                tally.add(status, path, connection.said)


def odd_bytes(chance: random.Random) -> bytes:
    """A value of metadata that is none."""
    some = [b"\xff\xfe", b"Bearer \xc3\x28", b"", b" ", b"a" * 4000, b"\x80" * 300, b"1" * 30, b"999999999H", b"-1n"]
    return chance.choice([*some, chance.randbytes(20).replace(b"\0", b"").replace(b"\n", b"").replace(b"\r", b"")])


async def metadata(address: str, chance: random.Random, tally: Tally) -> None:
    """Calls whose headers are odd, double, missing or very many."""
    names = [
        b"authorization",
        b"x-request-id",
        b"grpc-timeout",
        b"grpc-encoding",
        b"content-type",
        b"te",
        b"user-agent",
    ]
    names += [b"x-odd", b"x-odd-bin", b"grpc-previous-rpc-attempts", b"grpc-accept-encoding", b"traceparent"]
    raw = right(PLACE)[0]
    for _ in range(20):
        async with wire(address) as connection:
            odd = [(chance.choice(names), odd_bytes(chance)) for _ in range(chance.choice([1, 1, 2, 3, 100]))]
            left_out = chance.choice(["", "", "", ":path", ":method", ":scheme", ":authority", "content-type", "te"])
            path = chance.choice([PLACE, PLACE, HEALTH, "/", "", "/a/b", "/\xff"])
            stream = connection.call(path, *odd, left_out=left_out)
            connection.send(stream, raw if path == PLACE else b"")
            with suppress(ConnectionError, h2.exceptions.H2Error):
                await connection.flush()
                for status in await connection.statuses(1):
                    tally.add(
                        status, "metadata", f"{connection.said}, of {odd!r}, without {left_out!r}, path {path!r}"[:600]
                    )


async def frames(address: str, chance: random.Random, tally: Tally) -> None:
    """Floods and halves of frames."""
    kind = chance.choice(FLOODS)
    async with wire(address) as connection:
        try:
            calls = await kind(connection, chance)
            await connection.flush()
            found = await connection.statuses(min(calls, 20))
        except (ConnectionError, h2.exceptions.H2Error) as error:
            found, calls = [type(error).__name__], 1
        for status in found:
            tally.add(status, kind.__name__, connection.said)
        tally.requests += max(0, calls - len(found))


async def rapid_reset(connection: Wire, chance: random.Random) -> int:
    """Begin calls and cancel each at once."""
    for _ in range(500):
        stream = connection.call()
        if chance.random() < 0.5:
            connection.send(stream, right(PLACE)[0])
        connection.h2.reset_stream(stream)
    return 500


async def half_messages(connection: Wire, chance: random.Random) -> int:
    """Send messages that do not end."""
    for _ in range(50):
        connection.send(connection.call(), bytes(chance.randrange(100, 1000)), missing=1)
    return 50


async def pings(connection: Wire, chance: random.Random) -> int:
    """Ask for many answers to pings and settings."""
    for _ in range(2000):
        connection.h2.ping(chance.randbytes(8))
    connection.send(connection.call(), right(PLACE)[0])
    return 1


async def settings(connection: Wire, chance: random.Random) -> int:
    """Change the settings again and again, windows among them."""
    for _ in range(500):
        connection.h2.update_settings({4: chance.randrange(2**31), 3: chance.randrange(1000)})
    connection.send(connection.call(), right(PLACE)[0])
    return 1


async def continuations(connection: Wire, chance: random.Random) -> int:
    """Send headers that do not end."""
    frame = struct.pack(">I", 1000)[1:] + b"\x09\0" + struct.pack(">I", 1) + chance.randbytes(1000)
    await connection.raw(b"\0\0\0\x01\0" + struct.pack(">I", 1) + frame * chance.choice([1, 1000]))
    return 1


async def random_frames(connection: Wire, chance: random.Random) -> int:
    """Send frames of any kind with anything in them."""
    for _ in range(50):
        body = chance.randbytes(chance.randrange(64))
        head = struct.pack(">I", len(body))[1:] + bytes([chance.randrange(12), chance.randrange(256)])
        await connection.raw(head + struct.pack(">I", chance.choice([0, 1, 2, 3, 2**31 - 1])) + body)
    return 50


async def small_windows(connection: Wire, chance: random.Random) -> int:
    """Ask for large answers and read nothing of them."""
    connection.h2.update_settings({4: 0})
    query = positions_pb2.PlaceRequest()
    query.query.spans.lengths.append(2**19)
    query.query.dense.SetInParent()
    for _ in range(20):
        connection.send(connection.call(), query.SerializeToString())
    return 20


async def bombs(connection: Wire, chance: random.Random) -> int:
    """Send little that unpacks to much, and what only says that it is packed."""
    empty = sequences_pb2.BuildRequest()
    empty.query.documents.add().parts.add()
    part = empty.SerializeToString()
    raw = chance.choice([part, b"\x0a\0"]) * chance.randrange(1000, 2**20)
    squeeze = zlib.compressobj(9, wbits=31)
    packed = squeeze.compress(raw) + squeeze.flush()
    encodings = [b"gzip", b"deflate", b"identity", b"br"]
    for data in (packed, packed[:-4], b"no gzip"):
        stream = connection.call("/mmpos.rpc.v1.SequenceService/Build", (b"grpc-encoding", chance.choice(encodings)))
        connection.send(stream, data, compressed=True)
    return 3


FLOODS: Sequence[Callable[[Wire, random.Random], Awaitable[int]]] = (
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
