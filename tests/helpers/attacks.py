"""Attacks on a server in random rounds: messages, streams and metadata."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

import grpc
from h2.exceptions import H2Error
from http2 import Connection, message
from message_strategies import REQUESTS, STREAMS, corpus
from mutations import mutate

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
    """Outcomes of attacks.

    Args:
        statuses: count of each status; for a stream without a status, how the connection ended.
        bad: first occurrence of each bad status by kind of request, as ATTACK:NUMBER and the details.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    bad: dict[str, str] = field(default_factory=dict)

    def add(self, status: str, kind: str = "", detail: str = "") -> None:
        """Count a request under its status and kind."""
        if detail.startswith(CORE):
            status = "refused by the transport"
        self.statuses[status] += 1
        if status in BAD:
            self.bad.setdefault(f"{status} of {kind}", detail)

    def merge(self, other: Tally, where: str = "") -> None:
        """Add the outcomes of another tally; ``where`` precedes the details of its bad statuses."""
        self.statuses.update(other.statuses)
        self.bad = {**{kind: where + detail for kind, detail in other.bad.items()}, **self.bad}


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


ATTACKS: dict[str, Attack] = {one.__name__: one for one in (messages, streams, metadata)}


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
            tally.merge(own, f"{name}:{number} ")
            number += 1

    await asyncio.gather(*map(repeat, names))
    return tally


def attacker(*arguments: Any) -> Tally:
    """Attack from a separate process; see ``rounds``."""
    return asyncio.run(rounds(*arguments))
