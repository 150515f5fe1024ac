"""Base class of the two clients: addresses, options, and the channels of each process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mmpos.client.channel import ProcessChannels, Reach, channel_options, target, traced
from mmpos.client.options import CallOptions, Destination, Pair

if TYPE_CHECKING:
    from typing import Self

    from mmpos.client.options import Tls

C = TypeVar("C")

_KEEP: Any = object()


class BaseClient(Generic[C]):
    """Client for an mmpos service.

    The first call opens the channel, one per process (and event loop), so a client can be pickled and used by the
    workers of a DataLoader. If a client made a call before a fork, it raises an error in the child, because gRPC would
    hang there, unless GRPC_ENABLE_FORK_SUPPORT=1 was set in the environment before grpc was imported. No call may run
    in another thread while a process forks. Start methods other than "fork" have no such limits.

    A call that no server answers (UNAVAILABLE, including a broken connection) is retried after 0.1, 0.3, 0.9 …
    seconds; retries are safe because no call changes anything on the server. If a server that has answered this client
    before disappears, it is assumed to be restarting, and calls wait for it within their timeout. If no server has ever
    answered, or TLS fails, the call fails after a second or two with an error that names the cause.

    Args:
        addresses: "host:port", "unix:path", "dns:///host:port" for all replicas behind a name, or a list of
            "host:port". If there are several servers, calls rotate over those that pass their health checks. Names in a
            list are resolved once, when the channel opens.
        profile: name of the model's settings on the server; None selects the server's default profile.
        timeout: maximum seconds per call, retries included; for a stream, maximum seconds per answer.
        attempts: maximum number of attempts per call, 1 to 5; with 1, a call is not retried and does not wait for a
            server.
        tls: certificates; None disables TLS.
        token: bearer token sent with every call, or the path of a file that holds only the token and is reread when it
            changes. Without tls, a token is sent only to servers on this machine.

    Raises:
        InvalidInputError: an argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "localhost:50051",
        *,
        profile: str | None = None,
        timeout: float = 30.0,
        attempts: int = 4,
        tls: Tls | None = None,
        token: str | os.PathLike[str] | None = None,
    ) -> None:
        destination = Destination.checked(addresses, attempts, tls, token)
        self.__setstate__((destination, CallOptions(profile, timeout)))

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

    def _connect(self, secure: Callable[..., C], insecure: Callable[..., C]) -> C:
        destination = self._destination
        address, options = target(destination.addresses), channel_options(destination)
        if destination.tls is None:
            return insecure(address, options=options)
        return secure(address, destination.tls.credentials(), options=options)

    def _metadata(self) -> tuple[Pair, ...]:
        return traced(self._destination.metadata())

    def __getstate__(self) -> tuple[Destination, CallOptions]:
        return self._destination, self._options

    def __setstate__(self, state: tuple[Destination, CallOptions]) -> None:
        self._destination, self._options = state
        self._channels: ProcessChannels[C] = ProcessChannels()
        self._reach = Reach(self._destination)

    def __repr__(self) -> str:
        options = self._options
        addresses = self._destination.addresses
        shown = repr(addresses[0]) if len(addresses) == 1 else repr(list(addresses))
        return f"{type(self).__name__}({shown}, profile={options.profile!r}, timeout={options.timeout:g})"
