"""Client for the service, with the same arguments, results and exceptions as calls in process."""

from mmpos.support.extras import needed_for

with needed_for("mmpos.client", extra="client"):
    from mmpos.client.aio import AsyncClient
    from mmpos.client.options import Tls
    from mmpos.client.sync import Client
    from mmpos.rpc.queries import (
        Decode,
        Dense,
        InputIds,
        Pad,
        PositionsQuery,
        PositionsResult,
        Shard,
        Spans,
        Take,
        View,
        Window,
    )

__all__ = [
    "AsyncClient",
    "Client",
    "Decode",
    "Dense",
    "InputIds",
    "Pad",
    "PositionsQuery",
    "PositionsResult",
    "Shard",
    "Spans",
    "Take",
    "Tls",
    "View",
    "Window",
]
