"""Options of a client: addresses, TLS certificates, token and timeout; frozen, checked and picklable."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


class Token:
    """A client's bearer token, which is never shown.

    Args:
        source: token, or the path of a file that holds only the token.

    Raises:
        InvalidInputError: the source is neither a token nor a path; the error does not quote it.
    """

    def __init__(self, source: object) -> None:
        if not isinstance(source, str | os.PathLike):
            got = type(source).__name__
            raise InvalidInputError(f"token: got {got}, want a token, the path of a token file, or None")
        if isinstance(source, str) and not is_token(source):
            raise InvalidInputError(f"token must consist of {TOKEN_CHARACTERS}")
        self._source = source if isinstance(source, str) else Path(source)
        # Version of the file and its token, in one object so that threads cannot mix two versions.
        self._latest: tuple[object, Pair] | None = (None, put_token(source)) if isinstance(source, str) else None

    def pair(self) -> Pair:
        """Return the metadata pair for a call that begins now.

        Raises:
            InvalidInputError: no readable token was found in the file, now or earlier.
        """
        latest = self._latest
        if isinstance(self._source, str) and latest is not None:
            return latest[1]
        try:
            # The version is taken before reading, so that one written meanwhile is read at the next call.
            version = file_version(os.stat(self._source))
            if latest is None or version != latest[0]:
                text = Path(self._source).read_text(encoding="ascii", errors="replace").strip()
                if not is_token(text):
                    raise ValueError(_fault(text))
                self._latest = latest = version, put_token(text)
        except (OSError, ValueError) as error:
            # A file that is being replaced may be missing or empty for a moment.
            if latest is None:
                got = f"{self._source} ({error.strerror if isinstance(error, OSError) else error})"
                raise InvalidInputError(f"token: got {got}, want a file that holds only the token") from None
        return latest[1]

    def __reduce__(self) -> tuple[type[Token], tuple[str | Path]]:
        return Token, (self._source,)


def _fault(text: str) -> str:
    """Describe what is wrong with a token file; its text is not quoted, since any word of it may be a token."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    pairs = any(len(words) == 2 for words in lines)
    return "names and tokens: this looks like the token file of a server" if pairs else "no token in it"


_MAX_ATTEMPTS = 5
"""Maximum number of attempts that gRPC allows in any configuration."""

_HOST = r"\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:/\[\],]+)"
_ADDRESS = re.compile(
    rf"(?:dns:(?://[^/]*/)?)?(?:{_HOST}):(?P<port>[0-9]{{1,5}})|(?:unix|unix-abstract|ipv4|ipv6):\S.*"
)
_WANT = '"host:port", "unix:path", "dns:///host:port" or "ipv4:ip:port,ip:port"'


@dataclass(frozen=True)
class Options:
    """The arguments of a client, checked; see BaseClient."""

    address: str
    profile: str | None
    timeout: float
    attempts: int
    tls: Tls | None
    token: Token | None

    def __post_init__(self) -> None:
        match = _ADDRESS.fullmatch(self.address) if isinstance(self.address, str) else None
        if match is None or (match["port"] and not 1 <= int(match["port"]) <= 65535):
            raise InvalidInputError(f"address: got {self.address!r}, want {_WANT}")
        if not isinstance(self.tls, Tls | None):
            raise InvalidInputError(f"tls: got {type(self.tls).__name__}, want Tls or None")
        token = self.token if isinstance(self.token, Token | None) else Token(self.token)
        here = is_loopback(match["six"] or match["host"] or "") or self.address.startswith("unix")
        if token is not None and self.tls is None and not here:
            raise InvalidInputError(f"token requires tls for {self.address!r}; others could read the token")
        if not isinstance(self.profile, str | None):
            raise InvalidInputError(f"profile: got {self.profile!r}, want a name or None")
        seconds: Any = self.timeout
        if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < float(seconds) < math.inf:
            raise InvalidInputError(f"timeout: got {seconds!r}, want seconds above 0")
        attempts = integer("attempts", self.attempts, minimum=1, maximum=_MAX_ATTEMPTS)
        for name, value in (("token", token), ("attempts", attempts), ("timeout", float(seconds))):
            object.__setattr__(self, name, value)
