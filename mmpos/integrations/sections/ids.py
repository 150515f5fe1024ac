"""Ids of requests, windows and drafts as engines take them: three rows of int64, and the delta of what follows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.integrations.sections.layout import Sections
from mmpos.positions.rows import FIRST_TOKEN
from mmpos.positions.table import PositionTable
from mmpos.support.checks import INT32_MAX, IntArray, counted, first_bad, int_array, integer, per_document

__all__ = ["batch_positions", "draft_positions", "request_positions", "window_positions"]


def request_positions(
    positions: PositionTable, sections: Sections, *, max_new_tokens: int = 0, computed: int = 0
) -> tuple[Tensor, int]:
    """The ids of a prompt, and the delta by which the engine places what it generates.

    The engine gives token i of the request, counted from 0, the id i + delta once i is beyond the prompt.

    Args:
        positions: one document: the prompt, or what is left of it after a cached prefix, placed with ``start`` at the
            cursor of the prefix.
        sections: how the engine carries the rotation.
        max_new_tokens: tokens that it may generate, drafts included.
        computed: tokens of the request before this document.

    Returns:
        (3, tokens) int64 ids, a new tensor, and delta.

    Raises:
        InvalidInputError: other than one document; padding; a negative id; axes other than those of the rotary.
        UnsupportedError: ids that may be fractions, or a scheme without a next position.
        LimitExceededError: ids, or the cursor and max_new_tokens, reach beyond the cache.
    """
    if isinstance(positions, PositionTable) and positions.num_documents != 1:
        raise InvalidInputError(
            f"positions: got {counted(positions.num_documents, 'document')}, want 1; see batch_positions"
        )
    (found,) = batch_positions(positions, sections, max_new_tokens=max_new_tokens, computed=computed)
    return found


def batch_positions(
    positions: PositionTable, sections: Sections, *, max_new_tokens: npt.ArrayLike = 0, computed: npt.ArrayLike = 0
) -> list[tuple[Tensor, int]]:
    """``request_positions`` of every document.

    Args:
        positions: one document per request.
        sections: how the engine carries the rotation.
        max_new_tokens: tokens that may be generated, one number for all or (documents,).
        computed: tokens of each request before its document, likewise.

    Returns:
        (3, tokens) int64 ids, views of one new tensor, and delta, of each document.
    """
    _check_table(positions, sections)
    documents = positions.num_documents
    new = per_document("max_new_tokens", max_new_tokens, documents, minimum=0)
    before = per_document("computed", computed, documents, minimum=0)
    cursors, lengths = positions.next_positions, positions.lengths
    ids = _checked_ids(positions, sections, np.arange(documents))
    beyond = cursors + new > sections.max_position
    if beyond.any():
        d = int(beyond.argmax())
        raise LimitExceededError(
            f"documents[{d}]: got cursor {cursors[d]} and max_new_tokens {new[d]}, want at most max_position "
            f"{sections.max_position} in all, the rows of the cos/sin cache"
        )
    deltas = (cursors - lengths - before).tolist()
    return list(zip(torch.from_numpy(ids).split(lengths.tolist(), dim=1), deltas, strict=True))


def window_positions(
    positions: PositionTable,
    sections: Sections,
    documents: npt.ArrayLike,
    starts: npt.ArrayLike,
    lengths: npt.ArrayLike,
) -> Tensor:
    """The ids of one step: of each entry a window of a request, as for chunked prefill, a cached prefix or drafts.

    Args:
        positions: one document per request, from its first token.
        sections: how the engine carries the rotation.
        documents: (windows,) the request of each window, in any order.
        starts: (windows,) tokens of the request that are computed already.
        lengths: (windows,) tokens scheduled; those past the prompt are generated, or drafts one after the other.

    Returns:
        (3, sum of lengths) int64 ids, the windows one after the other; a new tensor.
    """
    _check_table(positions, sections)
    documents = int_array("documents", documents, (None,))
    window = positions.window(documents, starts, lengths)
    return torch.from_numpy(_checked_ids(window, sections, documents))


def draft_positions(
    positions: PositionTable, sections: Sections, start: int, depths: npt.ArrayLike, document: int = 0
) -> Tensor:
    """The ids of a tree of drafts after a request: those of one depth share one id.

    Args:
        positions: one document per request, from its first token.
        sections: how the engine carries the rotation.
        start: tokens of the request before the root of the tree; at least those of the prompt.
        depths: (drafts,) depth of each draft; 0 for the root.
        document: the request.

    Returns:
        (3, drafts) int64 ids; a new tensor.
    """
    _check_table(positions, sections)
    document = integer("document", document, minimum=0, maximum=positions.num_documents - 1)
    length = int(positions.lengths[document])
    start = integer("start", start, minimum=length, maximum=INT32_MAX)
    depths = int_array("depths", depths, (None,))
    first_bad("depths", depths, minimum=0, maximum=INT32_MAX)
    ids = int(positions.next_positions[document]) + (start - length) + depths
    _check_ids(ids[None], np.array([document]), np.array([0]), sections)
    return torch.from_numpy(ids).repeat(3, 1)


def _check_table(positions: PositionTable, sections: Sections) -> None:
    if not isinstance(positions, PositionTable):
        raise InvalidInputError(f"positions: got {type(positions).__name__}, want a PositionTable")
    if not isinstance(sections, Sections):
        raise InvalidInputError(f"sections: got {type(sections).__name__}, want Sections")
    if positions.axes != sections.rotary.axes:
        raise InvalidInputError(
            f"positions: got {counted(positions.axes, 'axis')}, want {sections.rotary.axes} as in rotary"
        )
    if positions.fractional:
        raise UnsupportedError(
            f"positions: got scheme {positions.scheme!r}, whose ids may be fractions, want integers: an id is a row of "
            "the engine's cos/sin cache, and each generated token is one row further"
        )
    if positions.is_padding.any():
        raise InvalidInputError("positions: got padding, want a table without: engines pack requests")


def _checked_ids(positions: PositionTable, sections: Sections, owners: IntArray) -> IntArray:
    ids = positions.dense(dtype=np.int64, axes=sections.rows)
    full = np.flatnonzero(positions.lengths)
    _check_ids(ids, owners[full], positions.documents[FIRST_TOKEN][full], sections)
    return ids


def _check_ids(ids: IntArray, owners: IntArray, firsts: IntArray, sections: Sections) -> None:
    """Raise unless all ids are rows of the cache; each owner has the tokens from its first to the next one's."""
    if not ids.size or (ids.min() >= 0 and ids.max() < sections.max_position):
        return
    low = np.minimum.reduceat(ids, firsts, axis=1).min(axis=0)
    high = np.maximum.reduceat(ids, firsts, axis=1).max(axis=0)
    if low.min() < 0:
        w = int((low < 0).argmax())
        raise InvalidInputError(
            f"documents[{owners[w]}]: got id {low[w]}, want >= 0: ids are rows of the cos/sin cache"
        )
    w = int((high >= sections.max_position).argmax())
    raise LimitExceededError(
        f"documents[{owners[w]}]: got id {high[w]}, want < max_position {sections.max_position}, the rows of the "
        "cos/sin cache"
    )
