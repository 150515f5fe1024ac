"""Who calls, by name, and how much each may have at once and ask for in a second."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from mmpos.errors import ServiceOverloadedError
from mmpos_server.access import token_name
from mmpos_server.admission import Gate

if TYPE_CHECKING:
    from mmpos_server.config import ClientLimits

__all__ = ["Clients", "Rate", "Visit", "client_name"]

_MOST_IDLE = 10_000  # whose rate is remembered: an attacker with many addresses makes the server no larger


def client_name(context: Any) -> str:
    """Who calls: the name of the token, else that of the certificate, else the address without its port."""
    return token_name() or _certificate_name(context.auth_context()) or _host(context.peer())


def _certificate_name(found: Any) -> str:
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for value in found.get(key, ()):
            if value:
                return str(value.decode(errors="replace"))
    return ""


def _host(peer: str) -> str:
    kind, _, place = peer.partition(":")
    return unquote(place.rpartition(":")[0]).strip("[]") if kind in ("ipv4", "ipv6") else kind


class Rate:
    """So many turns a second on average, and so many at once after a pause.

    Args:
        per_second: turns; 0 is no limit.
        burst: most at once; 0 is those of one second.
        clock: seconds.
    """

    def __init__(self, per_second: float, burst: int = 0, clock: Callable[[], float] = monotonic) -> None:
        self.per_second, self._clock = per_second, clock
        self._most = float(burst or max(per_second, 1.0))
        self._left, self._then = self._most, clock()

    @property
    def wait(self) -> float:
        """Seconds until the next turn; 0 is now."""
        if not self.per_second:
            return 0.0
        now = self._clock()
        self._left = min(self._most, self._left + self.per_second * (now - self._then))
        self._then = now
        return max(0.0, 1.0 - self._left) / self.per_second

    @property
    def rested(self) -> bool:
        """Whether it is as new."""
        return self.wait == 0.0 and self._left >= self._most

    def take(self) -> None:
        """Take a turn, for which there was nothing to wait."""
        if self.per_second:
            self._left -= 1.0


class _Client:
    """What one client has and may have."""

    def __init__(self, name: str, limits: ClientLimits) -> None:
        self.name, self.visits = name, 0
        self.rate = Rate(limits.requests_per_second, limits.burst)
        self.calls = self._gate("max_in_flight", limits)
        self.bytes = self._gate("max_in_flight_bytes", limits)
        self.unsent = self._gate("max_unsent_bytes", limits)
        self.streams = self._gate("max_streams", limits)
        self.watches = self._gate("max_watches", limits)
        self._max_share = limits.max_share
        self._shares: dict[str, Gate] = {}

    def share(self, gate: Gate) -> Gate | None:
        """The places of the client among those of a gate."""
        if not self._max_share:
            return None
        if gate.name not in self._shares:
            most = max(1, int(gate.limit * self._max_share))
            self._shares[gate.name] = Gate(f"clients.max_share of {gate.name} of {self.name!r}", most)
        return self._shares[gate.name]

    def _gate(self, field: str, limits: ClientLimits) -> Gate | None:
        limit = getattr(limits, field)
        return Gate(f"clients.{field} of {self.name!r}", limit) if limit else None


class Visit:
    """One call or stream of a client. Used from the event loop only.

    Args:
        name: whose.
        clients: what is known of clients; None where there is no limit.
    """

    __slots__ = ("_client", "_clients", "_taken", "name")

    def __init__(self, name: str, clients: Clients | None) -> None:
        self.name, self._clients = name, clients
        self._client: _Client | None = None
        self._taken: list[tuple[Gate, int]] = []

    def begin_call(self, size: int) -> None:
        """Take what a call with a request of so many bytes takes.

        Raises:
            ServiceOverloadedError: the client has or asked for too much.
        """
        client = self._enter()
        if client is None:
            return
        rate = client.rate
        if wait := rate.wait:
            want = f"want <= {rate.per_second:g} on average"
            raise ServiceOverloadedError(f"clients.requests_per_second of {self.name!r}: got more, {want}", wait)
        self._take(client.calls)
        self._take(client.bytes, size)
        rate.take()

    def weigh(self, size: int) -> None:
        """Take so many bytes besides those of the request.

        Raises:
            ServiceOverloadedError: the client has too many.
        """
        if self._client is not None:
            gate = self._client.bytes
            self._take(gate, size, sum(count for taken, count in self._taken if taken is gate))

    def answer(self, size: int) -> None:
        """Take so many bytes of an answer.

        Raises:
            ServiceOverloadedError: the client has not taken too many.
        """
        if self._client is not None:
            self._take(self._client.unsent, size)

    def share(self, gate: Gate) -> Gate | None:
        """The places of the client among those of a gate, for whoever enters both; None is no limit."""
        return None if self._client is None else self._client.share(gate)

    def begin_watch(self) -> None:
        """Take what an open stream of health or of reflection takes.

        Raises:
            ServiceOverloadedError: the client has too many.
        """
        client = self._enter()
        if client is not None:
            self._take(client.watches)

    def begin_stream(self) -> None:
        """Take what an open stream takes.

        Raises:
            ServiceOverloadedError: the client has too many.
        """
        client = self._enter()
        if client is not None:
            self._take(client.streams)

    async def turn(self) -> None:
        """Wait until an item of the stream may be worked on, and take that turn."""
        if self._client is not None:
            rate = self._client.rate
            while seconds := rate.wait:
                await asyncio.sleep(seconds)
            rate.take()

    def end(self, seconds: float) -> None:
        """Give back what was taken, after so many seconds."""
        for gate, count in self._taken:
            gate.leave(seconds, count)
        self._taken.clear()
        if self._clients is not None and self._client is not None:
            self._clients.leave(self._client)
        self._client = None

    def _enter(self) -> _Client | None:
        if self._clients is not None:
            self._client = self._clients.enter(self.name)
        return self._client

    def _take(self, gate: Gate | None, count: int = 1, held: int = 0) -> None:
        if gate is not None:
            gate.enter(count, held)
            self._taken.append((gate, count))


class Clients:
    """The clients of a server: those that are there, and those whose rate has not rested since.

    Args:
        limits: of each.
    """

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._limited = any(limits.model_dump(exclude={"burst"}).values())
        self._here: dict[str, _Client] = {}
        self._idle: OrderedDict[str, _Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._here) + len(self._idle)

    def visit(self, name: str) -> Visit:
        """A call or stream of the client of this name."""
        return Visit(name, self if self._limited else None)

    def enter(self, name: str) -> _Client:
        """The client, one visit of which begins."""
        client = self._here.get(name) or self._idle.pop(name, None) or _Client(name, self._limits)
        self._here[name] = client
        client.visits += 1
        return client

    def leave(self, client: _Client) -> None:
        """A visit of the client ends; after the last one it is forgotten as soon as that makes no difference."""
        client.visits -= 1
        if client.visits:
            return
        self._idle[client.name] = self._here.pop(client.name)
        while self._idle:
            oldest = next(iter(self._idle.values()))
            if len(self._idle) <= _MOST_IDLE and not oldest.rate.rested:
                break
            del self._idle[oldest.name]
