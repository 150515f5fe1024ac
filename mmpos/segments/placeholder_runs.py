"""Token ids as the documents that they are, and the runs of placeholder tokens in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.support import native
from mmpos.support.checks import IntArray, host_array, int_array, shown

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """All tokens in one row: which belong to documents, and where each document's own tokens lie."""

    ids: IntArray
    starts: IntArray
    stops: IntArray
    padding: tuple[IntArray, IntArray] | None

    def runs(self, token_ids: Sequence[int]) -> list[Runs]:
        """The runs of each of one or two placeholders."""
        if native.core is not None and min(token_ids) >= 0:  # the extension takes -1 for no second one
            found = native.core.runs(self.ids, self.starts, self.stops, *token_ids, *[-1] * (2 - len(token_ids)))
            if found is not None:
                document, first, tokens, kind = native.int64(found).reshape(-1, 4).T
                if len(token_ids) == 1:
                    return [Runs(document, first, tokens)]
                return [Runs(document[kind == i], first[kind == i], tokens[kind == i]) for i in (0, 1)]
        return [self._runs(token_id) for token_id in token_ids]

    def _runs(self, token_id: int) -> Runs:
        at = np.flatnonzero(self.ids == token_id)
        document = np.searchsorted(self.starts, at, side="right") - 1
        inside = (document >= 0) & (at < self.stops[document])  # and not under padding
        at, document = at[inside], document[inside]
        begins = np.ones(at.size, np.bool_)
        begins[1:] = (np.diff(at) > 1) | (np.diff(document) > 0)
        first = np.flatnonzero(begins)
        return Runs(document[first], at[first], np.diff(np.append(first, at.size)))

    def name(self, document: int, token: int) -> str:
        """A token of the batch, for people."""
        return f"document {document}, token {token - int(self.starts[document])}"


class Runs:
    """Runs of a placeholder, none of which passes the end of a document; its tokens are ranked in order.

    Args:
        document: (runs,) document of each run.
        first: (runs,) its first token in the batch.
        tokens: (runs,) how many there are.
    """

    def __init__(self, document: IntArray, first: IntArray, tokens: IntArray) -> None:
        self.document, self.first = document, first
        self.stops = tokens.cumsum()  # one past the rank of each run's last token
        self.shift = first + tokens - self.stops  # from a rank to a token
        self.total = int(self.stops[-1]) if self.stops.size else 0

    def of(self, rank: IntArray) -> IntArray:
        """The run of a placeholder; the last for ranks beyond all."""
        run = self.stops.searchsorted(rank, side="right")
        return np.minimum(run, self.stops.size - 1, out=run)


def read_batch(input_ids: Any, cu_seqlens: Any, attention_mask: Any) -> Batch:
    """Tell the documents of a batch, packed or padded, by at most one of the two ways."""
    ids = host_array("input_ids", input_ids)
    if ids.ndim not in (1, 2) or (ids.dtype.kind not in "iu" and ids.size):
        raise InvalidInputError(
            f"input_ids: got {ids.dtype} of shape {ids.shape}, want integers (tokens,) or (batch, seq)"
        )
    if attention_mask is not None and cu_seqlens is not None:
        raise InvalidInputError("cu_seqlens: got both cu_seqlens and attention_mask, want at most one")
    if cu_seqlens is not None:
        cu = _cu_seqlens(cu_seqlens, ids)
        return Batch(ids.ravel(), cu[:-1], cu[1:], None)
    rows = ids if ids.ndim == 2 else ids[None]
    starts = np.arange(len(rows)) * rows.shape[1]
    if len(rows) and rows.shape[1] == 0:
        raise InvalidInputError(f"input_ids: got shape {ids.shape}, want at least one token in each document")
    if attention_mask is None or not len(rows):
        return Batch(ids.ravel(), starts, starts + rows.shape[1], None)
    mask = host_array("attention_mask", attention_mask)
    left, right = np.empty((2, len(rows)), np.int64)
    core = native.core if mask.shape == ids.shape else None
    if core is None or not core.ones(np.atleast_2d(mask), left, right):
        real = _mask(mask, ids).reshape(rows.shape)
        left = real.argmax(axis=1)
        right = rows.shape[1] - left - real.sum(axis=1)
    return Batch(ids.ravel(), starts + left, starts + rows.shape[1] - right, (left, right))


def _cu_seqlens(cu_seqlens: Any, ids: npt.NDArray[Any]) -> IntArray:
    cu = int_array("cu_seqlens", cu_seqlens, (None,))
    if cu.size == 0 or cu[0] != 0 or cu[-1] != ids.size:
        raise InvalidInputError(f"cu_seqlens: got {shown(cu)}, want 0 first and {ids.size} tokens last")
    if (np.diff(cu) < 1).any():
        d = int((np.diff(cu) < 1).argmax())
        raise InvalidInputError(f"cu_seqlens[{d + 1}]: got {cu[d + 1]} after {cu[d]}, want at least one token")
    return cu


def _mask(mask: npt.NDArray[Any], ids: npt.NDArray[Any]) -> BoolArray:
    if mask.shape != ids.shape or mask.dtype.kind not in "biu":
        raise InvalidInputError(
            f"attention_mask: got {mask.dtype} of shape {mask.shape}, want 0 and 1 of shape {ids.shape}"
        )
    if mask.size and (mask.min() < 0 or mask.max() > 1):
        raise InvalidInputError(f"attention_mask: got values {mask.min()} to {mask.max()}, want 0 and 1")
    real = np.atleast_2d(mask != 0)
    edges = (real[:, 1:] & ~real[:, :-1]).sum(axis=1) + real[:, 0]
    if (edges != 1).any():
        d = int((edges != 1).argmax())
        what = "no tokens" if edges[d] == 0 else "a hole"
        raise InvalidInputError(f"attention_mask[{d}]: got {what}, want ones in one run, padded left or right")
    return real
