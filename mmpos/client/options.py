"""Settings of a client: addresses, TLS certificates, token and timeout; frozen, checked and picklable."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmpos.errors import InvalidInputError
from mmpos.rpc.errors import TOKEN_CHARACTERS, file_version, is_loopback, is_token, put_token
from mmpos.support.checks import integer

if TYPE_CHECKING:
    import grpc


Pem = bytes | str | os.PathLike[str]


@dataclass(frozen=True)
class Tls:
    """Certificates for TLS, each as PEM bytes or as the path of a PEM file; files are read when a channel opens.

    Args:
        root_certificates: certificate authorities to trust; None trusts gRPC's defaults.
        certificate: client certificate, if the server requires one.
        key: private key of the client certificate.
        server_name: name that the server's certificate must contain; None means the host of the first address.

    Raises:
        InvalidInputError: a value has the wrong type, or only one of certificate and key is set.
    """

    root_certificates: Pem | None = None
    certificate: Pem | None = None
    key: Pem | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("root_certificates", "certificate", "key"):
            value = getattr(self, name)
            if not isinstance(value, bytes | str | os.PathLike | None):
                raise InvalidInputError(f"tls.{name}: got {type(value).__name__}, want PEM bytes or a path")
        if (self.certificate is None) != (self.key is None):
            one, other = ("key", "certificate") if self.certificate is None else ("certificate", "key")
            raise InvalidInputError(f"tls.{one} requires tls.{other}")
        if not isinstance(self.server_name, str | None):
            raise InvalidInputError(f"tls.server_name: got {self.server_name!r}, want a name or None")

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for a channel.

        Raises:
            InvalidInputError: a file cannot be read.
        """
        import grpc

        names = ("root_certificates", "key", "certificate")
        return grpc.ssl_channel_credentials(*(_read(name, getattr(self, name)) for name in names))


def _read(name: str, pem: Pem | None) -> bytes | None:
    if pem is None or isinstance(pem, bytes):
        return pem
    try:
        return Path(pem).read_bytes()
    except OSError as error:
        raise InvalidInputError(f"tls.{name}: got {os.fspath(pem)!r}, want a file that can be read ({error})") from None


Pair = tuple[str, str]


@dataclass
class _Read:
    """A token file's version and its token, in one object so that threads cannot mix two versions."""

    latest: tuple[tuple[int, ...], Pair] | None = None


@dataclass(frozen=True)
class Token:
    """A client's bearer token; its repr never shows the token.

    Args:
        source: token, or the path of a file that holds only the token.
    """

    source: str | Path = field(repr=False)
    _read: _Read = field(default_factory=_Read, init=False, repr=False, compare=False)

    @classmethod
    def checked(cls, source: object) -> Token | None:
        """Check a token or a path; errors do not quote it.

        Raises:
            InvalidInputError: the source is neither a token nor a path.
        """
        if source is None:
            return None
        if isinstance(source, os.PathLike):
            return cls(Path(source))
        if not isinstance(source, str):
            raise InvalidInputError(
                f"token: got {type(source).__name__}, want a token, the path of a token file, or None"
            )
        if not is_token(source):
            raise InvalidInputError(f"token must consist of {TOKEN_CHARACTERS}")
        return cls(source)

    def pair(self) -> Pair:
        """Return the metadata pair for a call that begins now.

        Raises:
            InvalidInputError: no readable token was found in the file, now or earlier.
        """
        if isinstance(self.source, str):
            return put_token(self.source)
        latest = self._read.latest
        try:
            # The version is taken before reading, so that one written meanwhile is read at the next call.
            version = file_version(os.stat(self.source))
            if latest is None or version != latest[0]:
                text = self.source.read_text(encoding="ascii", errors="replace").strip()
                if not is_token(text):
                    raise ValueError(_fault(text))
                self._read.latest = latest = version, put_token(text)
        except (OSError, ValueError) as error:
            # A file that is being replaced may be missing or empty for a moment.
            if latest is None:
                reason = error.strerror if isinstance(error, OSError) else error
                raise InvalidInputError(
                    f"token: got {self.source} ({reason}), want a file that holds only the token"
                ) from None
        return latest[1]

    def __reduce__(self) -> tuple[type[Token], tuple[str | Path]]:
        return Token, (self.source,)


def _fault(text: str) -> str:
    """Describe what is wrong with a token file; its text is not quoted, since any word of it may be a token."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    pairs = any(len(words) == 2 for words in lines)
    return "names and tokens: this looks like the token file of a server" if pairs else "no token in it"


MAX_ATTEMPTS = 5
"""Maximum number of attempts that gRPC allows in any configuration."""

_HOST_PORT = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:/\[\],]+)):(?P<port>[0-9]{1,5})")
_DNS = re.compile(r"dns:(//[^/]*/)?")


@dataclass(frozen=True)
class Destination:
    """Addresses of servers and how to reach them, which determine a channel."""

    addresses: tuple[str, ...]
    attempts: int
    tls: Tls | None
    token: Token | None = None

    @classmethod
    def checked(
        cls,
        addresses: str | Sequence[str],
        attempts: int,
        tls: Tls | None,
        token: str | os.PathLike[str] | None = None,
    ) -> Destination:
        """Check the arguments of a destination.

        Raises:
            InvalidInputError: an argument is wrong; the message names it.
        """
        if isinstance(addresses, str):
            addresses = [addresses]
        if not isinstance(addresses, list | tuple):
            raise InvalidInputError(f"addresses: got {type(addresses).__name__}, want a host:port or a list of them")
        if not addresses:
            raise InvalidInputError("addresses: got 0 addresses, want at least one")
        for i, address in enumerate(addresses):
            _check_address(f"addresses[{i}]", address, alone=len(addresses) == 1)
        if not isinstance(tls, Tls | None):
            raise InvalidInputError(f"tls: got {type(tls).__name__}, want Tls or None")
        checked_token = Token.checked(token)
        if checked_token is not None and tls is None:
            _check_clear(addresses)
        attempts = integer("attempts", attempts, minimum=1, maximum=MAX_ATTEMPTS)
        return cls(tuple(addresses), attempts, tls, checked_token)

    def metadata(self) -> tuple[Pair, ...]:
        """Return the metadata for a call that begins now.

        Raises:
            InvalidInputError: the token cannot be read.
        """
        return () if self.token is None else (self.token.pair(),)


@dataclass(frozen=True)
class CallOptions:
    """Options for calls; see BaseClient for the arguments.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
    """

    profile: str | None
    timeout: float

    def __post_init__(self) -> None:
        if not isinstance(self.profile, str | None):
            raise InvalidInputError(f"profile: got {self.profile!r}, want a name or None")
        number: Any = self.timeout
        is_number = isinstance(number, Real) and not isinstance(number, bool)
        if not (is_number and math.isfinite(number) and number > 0):
            raise InvalidInputError(f"timeout: got {number!r}, want seconds above 0")
        object.__setattr__(self, "timeout", float(number))


class HostPort(NamedTuple):
    """Host without brackets, and port."""

    host: str
    port: int


def host_and_port(address: str) -> HostPort | None:
    """Split an address into host and port; return None if it does not have this form."""
    match = _HOST_PORT.fullmatch(address)
    return HostPort(match["six"] or match["host"], int(match["port"])) if match else None


def _check_address(name: str, address: object, *, alone: bool) -> None:
    if alone and isinstance(address, str) and re.match(r"(unix|unix-abstract|dns):.", address):
        return
    server = host_and_port(address) if isinstance(address, str) else None
    if server is None or not 1 <= server.port <= 65535:
        want = '"host:port", "unix:path" or "dns:///host:port"' if alone else '"host:port" in a list of addresses'
        raise InvalidInputError(f"{name}: got {address!r}, want {want}")


def _check_clear(addresses: Sequence[str]) -> None:
    """Check that a token sent without TLS to these addresses does not cross a network."""
    for i, address in enumerate(addresses):
        server = host_and_port(_DNS.sub("", address, count=1))
        is_local = server is not None and is_loopback(server.host)
        if not is_local and not address.startswith(("unix:", "unix-abstract:")):
            raise InvalidInputError(f"token requires tls for {address!r} (addresses[{i}]); others could read the token")
