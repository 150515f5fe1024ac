"""Answer plain queries: C parses and places documents of text and grids in one pass, from bytes to bytes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from mmpos.errors import MmposError
from mmpos.positions.plan import Plan, plan_of
from mmpos.rpc.positions import get_scheme
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.schemes import get_scheme as named_scheme
from mmpos.support import native

if TYPE_CHECKING:
    from mmpos_server.config import Limits, Profiles
    from mmpos_server.methods import Plain

__all__ = ["SMALL_ANSWER", "SMALL_BYTES", "SMALL_SEGMENTS", "PlainQueries"]

SMALL_BYTES, SMALL_SEGMENTS, SMALL_ANSWER = 2**18, 2**14, 2**21
"""Bounds for small work: bytes of the request, segments, bytes of the dense answer. The call's own thread does small
work; larger work waits for a thread from a pool.
"""

_MOST_SETTINGS = 64
"""Maximum number of cached settings, one for each combination of scheme and profile in requests."""

_Settings = tuple[Plan, bool, bool, bytes]
"""Settings that csrc/served.c reads: plan, whether grids must not touch, whether ids may be fractions, and label."""


class PlainQueries:
    """Answers to plain queries, equal byte for byte to the answers made through messages.

    Args:
        profiles: settings for the models.
        limits: limits for one request.
    """

    def __init__(self, profiles: Profiles, limits: Limits) -> None:
        self._profiles, self._most_bytes = profiles, min(SMALL_BYTES, limits.message_bytes, limits.request_bytes)
        self._known: dict[bytes, _Settings | None] = {}
        segments = min(limits.segments, SMALL_SEGMENTS)
        most = limits.documents, segments, limits.tokens, limits.images, SMALL_ANSWER, limits.response_bytes
        self._most = np.array(most, np.int64)
        self._core: Any = native.core if sys.byteorder == "little" else None

    def answer(self, raw: bytes, item: bool = False) -> Plain | None:
        """Answer a Place request, or a StreamPlace request if ``item`` is true.

        Returns:
            the answer, or None for a query that is not plain, not small, above a limit, or wrong; the path through
            messages then answers it or raises the error.
        """
        if self._core is None or len(raw) > self._most_bytes:
            return None
        served = self._core.served(raw, item, self._known, self._most)
        if isinstance(served, bytes):
            self._learn(served)
            served = self._core.served(raw, item, self._known, self._most)
        return None if served is None or isinstance(served, bytes) else served

    def _learn(self, key: bytes) -> None:
        """Cache the settings of a query whose bytes contain only a profile and a scheme.

        This is repeated when a shape is unknown: the plan may have been dropped from its cache and built again.
        """
        if len(self._known) >= _MOST_SETTINGS:
            self._known = {}
        try:
            self._known[key] = self._settings(pb.PositionsQuery.FromString(key))
        except (DecodeError, MmposError):
            return

    def _settings(self, query: pb.PositionsQuery) -> _Settings | None:
        profile = self._profiles.get(query.profile if query.HasField("profile") else None)
        named = (
            get_scheme("", query.scheme, self._profiles.schemes) if query.HasField("scheme") else profile.builder.scheme
        )
        scheme = named_scheme(named)
        plan = plan_of(scheme) if scheme.resumable and scheme.audio else None
        return None if plan is None else (plan, scheme.strict, scheme.fractional, scheme.label.encode())
