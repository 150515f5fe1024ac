"""What a client is told: where servers are, and how its calls are made; frozen, checked, and picklable."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from mmpos.client.tls import Tls
from mmpos.client.token import Token
from mmpos.errors import InvalidInputError
from mmpos.rpc.errors import AUTHORIZATION, is_loopback
from mmpos.support.checks import integer

if TYPE_CHECKING:
    from mmpos.client.shared_memory import Lease

MAX_ATTEMPTS = 5
"""Most attempts that gRPC makes, whatever it is told."""

_HOST_PORT = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:/\[\],]+)):(?P<port>[0-9]{1,5})")
_KEY = re.compile(r"[0-9a-z_.-]+")
_DNS = re.compile(r"dns:(//[^/]*/)?")

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Endpoint:
    """Where the servers are and how to reach them; all that makes a channel."""

    addresses: tuple[str, ...]
    attempts: int
    tls: Tls | None
    token: Token | None = None
    shared_memory: int = 0

    @classmethod
    def checked(
        cls,
        addresses: str | Sequence[str],
        attempts: int,
        tls: Tls | None,
        token: Any = None,
        shared_memory: int = 0,
    ) -> Endpoint:
        """The endpoint, or what is wrong with it.

        Raises:
            InvalidInputError: naming the argument.
        """
        if isinstance(addresses, str):
            addresses = [addresses]
        if not isinstance(addresses, list | tuple):
            raise InvalidInputError(f"addresses: got {type(addresses).__name__}, want a host:port or a list of them")
        if not addresses:
            raise InvalidInputError("addresses: got none, want at least one")
        for i, address in enumerate(addresses):
            _check_address(f"addresses[{i}]", address, alone=len(addresses) == 1)
        if not isinstance(tls, Tls | None):
            raise InvalidInputError(f"tls: got {type(tls).__name__}, want Tls or None")
        checked_token = Token.checked(token)
        if checked_token is not None and tls is None:
            _check_clear(addresses)
        attempts = integer("attempts", attempts, minimum=1, maximum=MAX_ATTEMPTS)
        most = integer("shared_memory", shared_memory, minimum=0)
        return cls(tuple(addresses), attempts, tls, checked_token, most)

    def metadata(self, options: Options) -> Metadata:
        """What is sent with a call that begins now.

        Raises:
            InvalidInputError: a token that cannot be read.
        """
        return options.metadata if self.token is None else (*options.metadata, self.token.pair())

    def check_metadata(self, options: Options) -> None:
        """See that the token is told once.

        Raises:
            InvalidInputError: metadata has a credential of its own.
        """
        if self.token is not None:
            for i, (key, _) in enumerate(options.metadata):
                if key == AUTHORIZATION:
                    raise InvalidInputError(f"metadata[{i}]: got {key!r} beside a token, want one of the two")


@dataclass(frozen=True)
class Options:
    """How calls are made; memory is the shared memory of the one call that is about to be made, if there is any."""

    profile: str | None
    timeout: float
    metadata: Metadata
    window: int
    memory: Lease | None = None

    @classmethod
    def checked(cls, profile: str | None, timeout: float, metadata: Any, window: int) -> Options:
        """The options, or what is wrong with them.

        Raises:
            InvalidInputError: naming the argument.
        """
        if not isinstance(profile, str | None):
            raise InvalidInputError(f"profile: got {profile!r}, want a name or None")
        number: Any = timeout
        is_number = isinstance(number, Real) and not isinstance(number, bool)
        if not (is_number and math.isfinite(number) and number > 0):
            raise InvalidInputError(f"timeout: got {timeout!r}, want seconds above 0")
        return cls(profile, float(timeout), _metadata(metadata), integer("window", window, minimum=1))


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host, without brackets, and port; None if the address is not of that form."""
    match = _HOST_PORT.fullmatch(address)
    return (match["six"] or match["host"], int(match["port"])) if match else None


def _check_address(name: str, address: Any, *, alone: bool) -> None:
    if alone and isinstance(address, str) and re.match(r"(unix|unix-abstract|dns):.", address):
        return
    found = host_and_port(address) if isinstance(address, str) else None
    if found is None or not 1 <= found[1] <= 65535:
        want = '"host:port", "unix:path" or "dns:///host:port"' if alone else '"host:port" for each of several'
        raise InvalidInputError(f"{name}: got {address!r}, want {want}")


def _check_clear(addresses: Sequence[str]) -> None:
    """See that a token reaches these addresses without TLS and without crossing a network."""
    for i, address in enumerate(addresses):
        found = host_and_port(_DNS.sub("", address, count=1))
        here = found is not None and is_loopback(found[0])
        if not here and not address.startswith(("unix:", "unix-abstract:")):
            want = "tls=Tls(...), or a server on this machine: others could read the token on its way"
            raise InvalidInputError(f"token: got one for {address!r} (addresses[{i}]) without tls, want {want}")


def _metadata(metadata: Any) -> Metadata:
    if not isinstance(metadata, list | tuple):
        raise InvalidInputError(f"metadata: got {type(metadata).__name__}, want a list of pairs of name and value")
    for i, pair in enumerate(metadata):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidInputError(f"metadata[{i}]: got {pair!r}, want a pair of name and value")
        key, value = pair
        if not isinstance(key, str) or not _KEY.fullmatch(key) or key.startswith("grpc-"):
            raise InvalidInputError(f"metadata[{i}]: got name {key!r}, want a-z, 0-9, '_', '-', '.', not 'grpc-…'")
        fits = isinstance(value, bytes) if key.endswith("-bin") else _is_ascii(value)
        if not fits:
            want = "bytes" if key.endswith("-bin") else "printable ASCII text"
            raise InvalidInputError(f"metadata[{i}]: got value {value!r} of {key!r}, want {want}")
    return tuple((key, value) for key, value in metadata)


def _is_ascii(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable()
