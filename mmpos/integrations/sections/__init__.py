"""Contiguous M-RoPE sections for serving engines: three rows of ids, a cos/sin cache and permuted weights.

Shapes used throughout:

    ids            (3, tokens) int64, one row per section of pairs
    delta          id of a token after the prompt − its index in the request
    cos_sin_cache  (max_position, rotary_dim), cos of all pairs, then sin
"""

from mmpos.support.extras import needed_for

with needed_for("mmpos.integrations.sections", extra="all"):
    from mmpos.integrations.sections.layout import (
        Sections,
        draft_positions,
        qk_channels,
        request_positions,
        window_positions,
    )
    from mmpos.integrations.sections.weights import install_cache, permute_qk

__all__ = [
    "Sections",
    "draft_positions",
    "install_cache",
    "permute_qk",
    "qk_channels",
    "request_positions",
    "window_positions",
]
