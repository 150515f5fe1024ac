"""Base class of the two clients: their arguments, and the channels of each process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmpos.client.channel import OpenChannel, ProcessChannels, channel_options
from mmpos.client.options import Options, Pair

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from typing import Self

    from mmpos.client.options import Tls

_KEEP: Any = object()


class BaseClient:
    """Client for an mmpos service.

    The first call opens the channel, one per process (and event loop), so a client can be pickled and used by the
    workers of a DataLoader. If a client made a call before a fork, it raises an error in the child, because gRPC would
    hang there, unless GRPC_ENABLE_FORK_SUPPORT=1 was set in the environment before grpc was imported. No call may run
    in another thread while a process forks. Start methods other than "fork" have no such limits.

    gRPC sends a call again if no server answers it (UNAVAILABLE, including a broken connection), after 0.1, 0.3, 0.9 …
    seconds, or if the server is overloaded, after the time that the server asks for. This is safe because no call
    changes anything on the server. If a server that has answered before disappears, it is assumed to be restarting, and
    calls wait for it within their timeout. If no server has ever answered, the call fails after a second or two with an
    error that names the cause. A stream is sent again only if it fails before its first answer.

    Args:
        address: "host:port", "unix:path", or, for several servers, a target of gRPC: "dns:///host:port" for all
            replicas behind a name, or "ipv4:ip:port,ip:port". Calls rotate over those that pass their health checks.
        profile: name of the model's settings on the server; None selects the server's default profile.
        timeout: maximum seconds per call, with all attempts; for a stream, maximum seconds per answer.
        attempts: maximum number of attempts per call, 1 to 5; with 1, a call is sent once and waits for no server.
        tls: certificates; None disables TLS.
        token: bearer token sent with every call, or the path of a file that holds only the token and is reread when it
            changes. Without tls, a token is sent only to servers on this machine.

    Raises:
        InvalidInputError: an argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        profile: str | None = None,
        timeout: float = 30.0,
        attempts: int = 4,
        tls: Tls | None = None,
        token: str | os.PathLike[str] | None = None,
    ) -> None:
        unchecked: Any = address, profile, timeout, attempts, tls, token
        self.__setstate__(Options(*unchecked))

    def with_options(self, *, profile: str | None = _KEEP, timeout: float = _KEEP) -> Self:
        """Return a client with other options on the same channel; closing either client closes the channel for both.

        Raises:
            InvalidInputError: an option is of the wrong type or out of range.
        """
        changes: dict[str, Any] = {"profile": profile, "timeout": timeout}
        options = replace(self._options, **{name: value for name, value in changes.items() if value is not _KEEP})
        client = type(self).__new__(type(self))
        vars(client).update(vars(self), _options=options)
        return client

    def _open(
        self, secure: Callable[..., Any], insecure: Callable[..., Any], loop: AbstractEventLoop | None = None
    ) -> OpenChannel:
        def connect() -> Any:
            address, tls, options = self._options.address, self._options.tls, channel_options(self._options)
            return insecure(address, options) if tls is None else secure(address, tls.credentials(), options)

        return self._channels.get(connect, loop)

    def _metadata(self) -> tuple[Pair, ...]:
        return () if self._options.token is None else (self._options.token.pair(),)

    def __getstate__(self) -> Options:
        return self._options

    def __setstate__(self, options: Options) -> None:
        self._options = options
        self._channels = ProcessChannels()

    def __repr__(self) -> str:
        options = self._options
        name = type(self).__name__
        return f"{name}({options.address!r}, profile={options.profile!r}, timeout={options.timeout:g})"
