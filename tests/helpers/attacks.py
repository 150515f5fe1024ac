"""Attacks on a server in random rounds: messages, streams and metadata."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
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

Outcome = tuple[str, str, str]
"""The status of a request, its kind, and the details."""


@lru_cache
def valid_messages(path: str) -> list[bytes]:
    """Return valid messages for a method."""
    return corpus(UNARY[path], 50)


def mutant(path: str, chance: random.Random) -> bytes:
    """Return a method's message with a few changes, or sometimes random bytes."""
    if path not in UNARY or chance.random() < 0.05:
        return chance.randbytes(chance.choice([0, 1, 2, 5, 50, 500]))
    return mutate(chance.choice(valid_messages(path)), chance, valid_messages(path))


def messages(address: str, chance: random.Random) -> Iterator[Outcome]:
    """Send malformed messages to every method, several at a time, and cancel some calls immediately."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        for _ in range(12):
            sent: list[tuple[str, bytes, Any]] = []
            for _ in range(16):
                path = chance.choice([*UNARY, *UNARY, *OTHERS])
                raw = mutant(path, chance)
                ask: Any = channel.unary_unary(path)
                sent.append((path, raw, ask.future(raw, timeout=chance.choice([0.001, *[60] * 15]))))
            for path, raw, call in sent:
                yield call.code().name, path, f"{raw[:200].hex()}: {call.details()}"


def streams(address: str, chance: random.Random) -> Iterator[Outcome]:
    """Open streams of malformed items, some beginning with an invalid message, and reset some of the streams."""
    for _ in range(6):
        path = f"/mmpos.rpc.v1.{chance.choice([*STREAMS])}"
        left = 0
        try:
            with Connection(address) as connection:
                for _ in range(10):
                    stream = connection.call(path)
                    items = b"".join(message(mutant(path.replace("/Stream", "/"), chance)) for _ in range(10))
                    connection.send(stream, items, wait=False)
                    if chance.random() < 0.2:
                        connection.h2.reset_stream(stream)
                        left += 1
                connection.flush()
                outcomes = connection.statuses(10 - left if chance.random() < 0.8 else 1)
        except (ConnectionError, H2Error) as error:
            outcomes = [(type(error).__name__, b"")]
        yield from ((status, path, details.decode(errors="replace")) for status, details in outcomes)


def odd_bytes(chance: random.Random) -> bytes:
    """Draw an unusual or invalid metadata value."""
    values = [b"\xff\xfe", b"Bearer \xc3\x28", b"", b" ", b"a" * 4000, b"\x80" * 300, b"1" * 30, b"999999999H", b"-1n"]
    return chance.choice([*values, chance.randbytes(20).replace(b"\0", b"").replace(b"\n", b"").replace(b"\r", b"")])


NAMES = [b"authorization", b"x-request-id", b"grpc-timeout", b"grpc-encoding", b"content-type", b"te", b"user-agent"]
NAMES += [b"x-odd", b"x-odd-bin", b"grpc-previous-rpc-attempts", b"grpc-accept-encoding", b"traceparent"]


def metadata(address: str, chance: random.Random) -> Iterator[Outcome]:
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
            yield status, "metadata", f"{text}, of {odd!r}, without {left_out!r}, path {path!r}"[:600]


ATTACKS: dict[str, Callable[[str, random.Random], Iterator[Outcome]]] = {
    attack.__name__: attack for attack in (messages, streams, metadata)
}


def attacked(address: str, seed: str, names: Sequence[str], end: float, first: int) -> tuple[Counter[str], list[str]]:
    """Run rounds of these attacks side by side until the end, with at least one round of each attack.

    A round depends only on the seed, the attack's name and the round's number.

    Returns:
        The count of each status, and the bad ones, each with its attack and round.
    """

    def repeat(name: str) -> list[Outcome]:
        number, outcomes = first, list[Outcome]()
        while time.time() < end or number == first:
            with suppress(OSError):
                for status, kind, detail in ATTACKS[name](address, random.Random(f"{seed}/{name}/{number}")):
                    bad = status in BAD and not detail.startswith(CORE)
                    outcomes.append((status, kind, f"{name}:{number} {detail}" if bad else ""))
            number += 1
        return outcomes

    with ThreadPoolExecutor(len(ATTACKS)) as threads:
        outcomes = [outcome for several in threads.map(repeat, names) for outcome in several]
    bad = [f"{status} of {kind}: {detail}" for status, kind, detail in outcomes if detail]
    return Counter(status for status, _, _ in outcomes), bad
