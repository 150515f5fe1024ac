"""From input ids to placeholder spans: runs of placeholder tokens are matched with the grids in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.checks import INT32_MAX, IntArray, first_bad, host_array, int_array, integer, shown
from mmpos.errors import InvalidInputError
from mmpos.spans import span_tokens

BoolArray = npt.NDArray[np.bool_]


class Modality(NamedTuple):
    """One kind of placeholder: the argument's name, its grids before merging and its token id."""

    name: str
    grid_thw: Any
    token_id: int | None
    frames_apart: bool = False


@dataclass(frozen=True)
class Found:
    """Placeholder spans of a batch in token order, as SegmentTable.from_spans takes them.

    ``videos`` is the index of the video of each span, -1 for images; ``padding`` the tokens left and
    right of each document, or None when the batch has no mask.
    """

    lengths: IntArray
    offsets: IntArray
    grid_thw: IntArray
    documents: IntArray
    videos: IntArray
    num_videos: int
    padding: tuple[IntArray, IntArray] | None

    def per_span(self, name: str, values: Sequence[Fraction | None]) -> list[Fraction | None]:
        """A value per video, handed to the spans of that video."""
        if len(values) != self.num_videos:
            raise InvalidInputError(f"{name}: got {len(values)} values, want {self.num_videos}, one per video")
        return [None if video < 0 else values[video] for video in self.videos]


@dataclass(frozen=True)
class _Batch:
    """All tokens in one row: which belong to documents, and where each document's own tokens lie."""

    ids: IntArray
    real: BoolArray | None
    starts: IntArray
    stops: IntArray
    padding: tuple[IntArray, IntArray] | None

    def document(self, token: IntArray) -> IntArray:
        return np.searchsorted(self.starts, token, side="right") - 1

    def where(self, token_id: int) -> IntArray:
        hit = self.ids == token_id
        return np.flatnonzero(hit if self.real is None else hit & self.real)

    def name(self, token: int) -> str:
        document = int(self.document(np.asarray(token)))
        return f"document {document}, token {token - self.starts[document]}"


def find(input_ids: Any, *modalities: Modality, spatial_merge_size: int, cu_seqlens: Any, attention_mask: Any) -> Found:
    """Match every run of placeholders of a batch with its grids; see SegmentTable.from_input_ids."""
    merge = integer("spatial_merge_size", spatial_merge_size, minimum=1, maximum=INT32_MAX)
    batch = _batch(input_ids, cu_seqlens, attention_mask)
    wanted = [modality for modality in modalities if _wanted(modality)]
    if len({_token_id(modality) for modality in wanted}) < len(wanted):
        raise InvalidInputError(f"video_token_id: got {wanted[-1].token_id}, want another than image_token_id")
    spans = [_match(batch, modality, merge) for modality in wanted]
    first = np.concatenate([np.zeros(0, np.int64), *(s.first for s in spans)])
    order = np.argsort(first, kind="stable")
    first = first[order]
    documents = batch.document(first)
    videos = [s.owner if s.name == "video_grid_thw" else np.full_like(s.owner, -1) for s in spans]
    return Found(
        lengths=batch.stops - batch.starts,
        offsets=first - batch.starts[documents],
        grid_thw=np.concatenate([np.zeros((0, 3), np.int64), *(s.grid_thw for s in spans)])[order],
        documents=documents,
        videos=np.concatenate([np.zeros(0, np.int64), *videos])[order],
        num_videos=sum(s.given for s in spans if s.name == "video_grid_thw"),
        padding=batch.padding,
    )


@dataclass(frozen=True)
class _Spans:
    name: str
    given: int
    first: IntArray
    grid_thw: IntArray
    owner: IntArray = field(repr=False)


def _wanted(modality: Modality) -> bool:
    if modality.token_id is None:
        if modality.grid_thw is not None:
            token = modality.name.replace("grid_thw", "token_id")
            raise InvalidInputError(f"{token}: got None, want the placeholder id of {modality.name}")
        return False
    return True


def _token_id(modality: Modality) -> int:
    return integer(modality.name.replace("grid_thw", "token_id"), modality.token_id)


def _match(batch: _Batch, modality: Modality, merge: int) -> _Spans:
    name = modality.name
    raw = int_array(name, () if modality.grid_thw is None else modality.grid_thw, (None, 3))
    first_bad(name, raw, minimum=1, maximum=INT32_MAX)
    at = batch.where(_token_id(modality))
    grids, owner = raw, np.arange(len(raw))
    if modality.frames_apart:
        if raw[:, 0].sum() > at.size:
            raise InvalidInputError(f"{name}: got {raw[:, 0].sum()} frames, want at most {at.size}, the placeholders")
        owner = np.repeat(owner, raw[:, 0])
        grids = raw[owner]
        grids[:, 0] = 1
    odd = (grids[:, 1:] % merge).any(axis=1)
    if odd.any():
        g = int(odd.argmax())
        raise InvalidInputError(
            f"{name}[{owner[g]}]: got {tuple(raw[owner[g]].tolist())}, "
            f"want height and width divisible by spatial_merge_size={merge}"
        )
    merged = _merged(grids, merge)
    tokens = span_tokens(name, merged)
    fits, ends = _fits(batch, at, tokens)
    if not fits.all() or (ends[-1] if len(ends) else 0) != at.size:
        raise InvalidInputError(_misfit(batch, at, name, grids, owner, merge))
    return _Spans(name, len(raw), at[ends - tokens], merged, owner)


def _merged(grids: IntArray, merge: int) -> IntArray:
    return grids // np.array([1, merge, merge])


def _fits(batch: _Batch, at: IntArray, tokens: IntArray) -> tuple[BoolArray, IntArray]:
    """Whether each grid covers consecutive placeholders of one document, and where it ends among them."""
    ends = np.cumsum(tokens)
    if at.size == 0:
        return np.zeros(tokens.shape, np.bool_), ends
    first = at[np.minimum(ends - tokens, at.size - 1)]
    last = at[np.minimum(ends - 1, at.size - 1)]
    whole = (ends <= at.size) & (last - first == tokens - 1)
    return whole & (batch.document(first) == batch.document(last)), ends


def _misfit(batch: _Batch, at: IntArray, name: str, grids: IntArray, owner: IntArray, merge: int) -> str:
    merged = _merged(grids, merge)
    tokens = span_tokens(name, merged)
    fits, ends = _fits(batch, at, tokens)
    hint = _merge_hint(batch, at, grids, merge)
    if fits.all():
        left, place = at.size - (int(ends[-1]) if len(ends) else 0), batch.name(int(at[ends[-1] if len(ends) else 0]))
        return f"{name}: got {len(set(owner.tolist()))} grids, want more for {left} placeholders from {place} on{hint}"
    g = int(fits.argmin())
    want = f"want {tokens[g]} for {'x'.join(map(str, merged[g]))} after merging"
    begin = int(ends[g] - tokens[g])
    if begin >= at.size:
        return f"{name}[{owner[g]}]: got no placeholders left, {want}; a surplus grid?{hint}"
    first = int(at[begin])
    document = batch.document(at[begin:])
    whole = (at[begin:] - first == np.arange(at.size - begin)) & (document == document[0])
    run = whole.size if whole.all() else int(whole.argmin())
    return f"{name}[{owner[g]}]: got a run of {run} placeholders at {batch.name(first)}, {want}{hint}"


def _merge_hint(batch: _Batch, at: IntArray, grids: IntArray, merge: int) -> str:
    for other in (1, 2, 3, 4, 8):
        if other == merge or not len(grids) or (grids[:, 1:] % other).any():
            continue
        tokens = _merged(grids, other).prod(axis=1, dtype=np.float64)
        if tokens.sum() == at.size and _fits(batch, at, tokens.astype(np.int64))[0].all():
            return f" (fits with spatial_merge_size={other})"
    return ""


def _batch(input_ids: Any, cu_seqlens: Any, attention_mask: Any) -> _Batch:
    ids = host_array("input_ids", input_ids)
    if ids.ndim not in (1, 2) or (ids.dtype.kind not in "iu" and ids.size):
        raise InvalidInputError(
            f"input_ids: got {ids.dtype} of shape {ids.shape}, want integers (tokens,) or (batch, seq)"
        )
    if attention_mask is not None and cu_seqlens is not None:
        raise InvalidInputError("cu_seqlens: got both cu_seqlens and attention_mask, want at most one")
    if cu_seqlens is not None:
        cu = _cu_seqlens(cu_seqlens, ids)
        return _Batch(ids.ravel(), None, cu[:-1], cu[1:], None)
    rows = ids if ids.ndim == 2 else ids[None]
    starts = np.arange(len(rows)) * rows.shape[1]
    if len(rows) and rows.shape[1] == 0:
        raise InvalidInputError(f"input_ids: got shape {ids.shape}, want at least one token in each document")
    if attention_mask is None or not len(rows):
        return _Batch(ids.ravel(), None, starts, starts + rows.shape[1], None)
    real = _mask(attention_mask, ids).reshape(rows.shape)
    left = real.argmax(axis=1)
    count = real.sum(axis=1)
    right = rows.shape[1] - left - count
    return _Batch(ids.ravel(), real.ravel(), starts + left, starts + left + count, (left, right))


def _cu_seqlens(cu_seqlens: Any, ids: npt.NDArray[Any]) -> IntArray:
    cu = int_array("cu_seqlens", cu_seqlens, (None,))
    if cu.size == 0 or cu[0] != 0 or cu[-1] != ids.size:
        raise InvalidInputError(f"cu_seqlens: got {shown(cu)}, want 0 first and {ids.size} tokens last")
    if (np.diff(cu) < 1).any():
        d = int((np.diff(cu) < 1).argmax())
        raise InvalidInputError(f"cu_seqlens[{d + 1}]: got {cu[d + 1]} after {cu[d]}, want at least one token")
    return cu


def _mask(attention_mask: Any, ids: npt.NDArray[Any]) -> BoolArray:
    mask = host_array("attention_mask", attention_mask)
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
