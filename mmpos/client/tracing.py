"""The trace that a caller is in, handed on to the server with each call."""

from __future__ import annotations

import sys

from mmpos.client.options import Metadata

__all__ = ["traced"]


def traced(metadata: Metadata) -> Metadata:
    """The metadata of a call; inside a span of OpenTelemetry with what tells the server of it.

    Which names that takes is what the process has set up: those of W3C, unless OTEL_PROPAGATORS says otherwise.
    """
    # Who has a span has imported this: for all others there is nothing to import, and nothing to do.
    if "opentelemetry.trace" not in sys.modules:
        return metadata
    from opentelemetry import trace

    if not trace.get_current_span().get_span_context().is_valid:
        return metadata
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return (*metadata, *carrier.items())
