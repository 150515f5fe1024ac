"""Base of both clients: addresses, options, and channels that stay with their process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mmpos.client.channel import ProcessChannels, Reach, channel_options, target, traced
from mmpos.client.options import CallOptions, Destination, Metadata
from mmpos.client.shared_memory import ProcessPools

if TYPE_CHECKING:
    from typing import Self

    from mmpos.client.options import Tls

C = TypeVar("C")

_KEEP: Any = object()


class BaseClient(Generic[C]):
    """A client of a service of mmpos.

    The channel opens at the first call, one in each process (and event loop), so a client may be pickled, and may be
    used by the workers of a DataLoader. One that has called before a fork is refused in the child, unless
    GRPC_ENABLE_FORK_SUPPORT=1 was in the environment before grpc was imported, since gRPC would hang there; no call
    may be under way in another thread while a process forks. Start methods other than "fork" need none of this.

    A call that no server answers (UNAVAILABLE, a connection that breaks under way included) is tried again after 0.1,
    0.3, 0.9 … seconds: no call changes anything on the server. A server that has answered this client before, and is
    gone, is being started again: calls wait for it within their timeout. One that never has answered, or that TLS does
    not let be reached, is an error after a second or two, which says why.

    Args:
        addresses: "host:port", "unix:path", "dns:///host:port" for all replicas behind a name, or a list of
            "host:port". Several servers take turns, and those whose health check fails take none. Names in a list
            are looked up once, when the channel opens.
        profile: name of the model's settings on the server; None: its default profile.
        timeout: seconds that a call may take, its retries included; for a stream, that each answer may take.
        attempts: most times that a call is sent in a row, 1 to 5; with 1, none is sent again, nor waits for a server.
        tls: certificates; None: no transport security.
        token: the bearer token, sent with every call, or the path of a file that holds it, which is read again when it
            changes. Without tls only to servers on this machine.
        metadata: pairs of name and value sent with every call.
        window: most requests of a stream that wait for an answer.
        shared_memory: most bytes of shared memory that all calls at work in a process may use for their tensors, and
            that are kept for the next ones; a server on this machine must have been started with --shared-memory, and
            any other is refused at the first call (UnsupportedError). 0: tensors travel in messages, as those of
            streams, cos_sin and angles always do.

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
        metadata: Sequence[tuple[str, str | bytes]] = (),
        window: int = 8,
        shared_memory: int = 0,
    ) -> None:
        destination = Destination.checked(addresses, attempts, tls, token, shared_memory)
        options = CallOptions(profile, timeout, metadata, window)
        destination.check_metadata(options)
        self.__setstate__((destination, options))

    def with_options(
        self,
        *,
        profile: str | None = _KEEP,
        timeout: float = _KEEP,
        metadata: Sequence[tuple[str, str | bytes]] = _KEEP,
        window: int = _KEEP,
    ) -> Self:
        """Make a client with other options on the same channel; closing either closes it for both.

        Raises:
            InvalidInputError: an option is of the wrong type or out of range.
        """
        changes: dict[str, Any] = {"profile": profile, "timeout": timeout, "metadata": metadata, "window": window}
        options = replace(self._options, **{name: value for name, value in changes.items() if value is not _KEEP})
        self._destination.check_metadata(options)
        client = type(self).__new__(type(self))
        vars(client).update(vars(self), _options=options)
        return client

    def _connect(self, secure: Callable[..., C], insecure: Callable[..., C]) -> C:
        destination = self._destination
        address, options = target(destination.addresses), channel_options(destination)
        if destination.tls is None:
            return insecure(address, options=options)
        return secure(address, destination.tls.credentials(), options=options)

    def _metadata(self) -> Metadata:
        return traced(self._destination.metadata(self._options))

    def __getstate__(self) -> tuple[Destination, CallOptions]:
        return self._destination, self._options

    def __setstate__(self, state: tuple[Destination, CallOptions]) -> None:
        self._destination, self._options = state
        self._channels: ProcessChannels[C] = ProcessChannels()
        self._pools = ProcessPools(self._destination.shared_memory)
        self._reach = Reach(self._destination)

    def __repr__(self) -> str:
        options = self._options
        addresses = self._destination.addresses
        shown = repr(addresses[0]) if len(addresses) == 1 else repr(list(addresses))
        return f"{type(self).__name__}({shown}, profile={options.profile!r}, timeout={options.timeout:g})"
