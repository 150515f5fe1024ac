"""Rows of tokens in the order of a transformer's attention, with their rotation and attention mask.

A PositionTable holds documents in sequence. A transformer keeps texts and images separate and joins them in every
attention: all texts of a row, then all images of the row, or the reverse. ``Streams`` arranges the table in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos import PositionTable
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import DevicePositions, Rotary, apply_rotary

__all__ = ["IMAGE", "TEXT", "Attention", "PackedDocuments", "Rows", "Streams"]

TEXT, IMAGE = "encoder_hidden_states", "hidden_states"
"""Names of the token streams, which are also the names of their arguments."""

Attention = Callable[..., Tensor]
"""Function that takes q, k and v (batch, seq, heads, head_dim) and options such as attn_mask; its result has the shape
of q.
"""

IntArray = npt.NDArray[np.int64]


class PackedDocuments(NamedTuple):
    """Index of documents packed in one row; it converts to and from a padded batch in which documents are separate.

    Args:
        tokens: (documents, longest) index, in the row, of each token in the batch; arbitrary for padding.
        mask: (documents, 1, 1, longest) True for tokens, False for padding; None if all documents have the same length.
        slots: (seq,) index, in the flattened batch, of each token in the row; arbitrary for padding.
    """

    tokens: Tensor
    mask: Tensor | None
    slots: Tensor

    @classmethod
    def from_owner(cls, owner: IntArray, count: int) -> PackedDocuments:
        """Index ``count`` documents; ``owner`` (seq,) is the document of each token, −1 for padding."""
        order = np.argsort(owner, kind="stable")
        order = order[np.count_nonzero(owner < 0) :]
        counts = np.bincount(owner[order], minlength=count)
        real = np.arange(max(1, int(counts.max()))) < counts[:, None]
        (slots,) = real.ravel().nonzero()
        tokens, slot_of = np.zeros(real.size, np.int64), np.zeros(owner.size, np.int64)
        tokens[slots], slot_of[order] = order, slots
        mask = None if real.all() else torch.from_numpy(real[:, None, None])
        return cls(torch.from_numpy(tokens.reshape(real.shape)), mask, torch.from_numpy(slot_of))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedDocuments:
        """Return a copy on another device."""
        return PackedDocuments(*(_moved(x, device, non_blocking) for x in self))

    def split(self, x: Tensor) -> Tensor:
        """Copy (1, seq, …) to (documents, longest, …)."""
        return x[0, self.tokens]

    def join(self, x: Tensor) -> Tensor:
        """Copy (documents, longest, …) back to (1, seq, …)."""
        return x.flatten(0, 1)[self.slots].unsqueeze(0)


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens in attention order; they replace the transformer's own cos and sin in the arguments of blocks.

    Args:
        positions: positions of (batch, seq) tokens, including padding.
        rotary: rotation of q and k.
        mask: (batch, 1, 1, seq) False for padding; None if there is no padding or documents are packed.
        documents: documents of a packed row; None if every row is one document.
        text_mask: (documents, 1, 1, tokens) text mask for cross-attention of packed documents; None if there is no
            padding.
        reached: list to which each attention that rotates by these rows appends an entry.
    """

    positions: DevicePositions
    rotary: Rotary
    mask: Tensor | None
    documents: PackedDocuments | None
    text_mask: Tensor | None
    reached: list[None]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Rows:
        """Return a copy on another device; libraries that split a model across devices call this for its arguments."""
        if self.positions.device == torch.device(device):
            return self
        names = ("positions", "mask", "documents", "text_mask")
        return replace(self, **{name: _moved(getattr(self, name), device, non_blocking) for name in names})

    def attend(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """Rotate q and k and compute self-attention within each document.

        Args:
            attention: attention function.
            query: q before rotation.
            key: k before rotation.
            value: v.
            options: other arguments for the attention function; attn_mask is replaced.
        """
        if options.get("parallel_config") is not None:
            want = "a rank that splits tokens itself and passes positions.shard"
            raise UnsupportedError(f"positions: got diffusers' enable_parallelism, want {want}")
        query, key = apply_rotary(query, key, self.positions, self.rotary, layout="bshd")  # type: ignore[assignment]
        self.reached.append(None)
        if self.documents is None:
            return attention(query, key, value, **{**options, "attn_mask": self.mask})
        query, key, value = (self.documents.split(x) for x in (query, key, value))
        out = attention(query, key, value, **{**options, "attn_mask": self.documents.mask})
        return self.documents.join(out)

    def attend_to_text(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """Compute cross-attention of documents to their texts; k and v have a row per text or one row for all."""
        if self.documents is None:
            return attention(query, key, value, **options)
        count = self.documents.tokens.shape[0]
        key, value = (x.reshape(count, -1, *x.shape[2:]) for x in (key, value))
        query = self.documents.split(query)
        return self.documents.join(attention(query, key, value, **{**options, "attn_mask": self.text_mask}))


class _Stream(NamedTuple):
    """Segments of all rows, in row order.

    Args:
        column: (segments,) column of each segment in the table, −1 for padding that is not in the table.
        length: (segments,) number of tokens.
        row: (segments,) row of each segment, ascending.
        document: (segments,) document of each segment, −1 for padding.
    """

    column: IntArray
    length: IntArray
    row: IntArray
    document: IntArray

    def sorted_by_row(self) -> _Stream:
        """Return the segments, sorted stably by row."""
        by_row = np.argsort(self.row, kind="stable")
        return _Stream(*(values[by_row] for values in self))


class Streams:
    """Texts and images of a table, arranged in rows.

    Args:
        positions: table with one document per row, or with all documents in one row.
        rotary: rotation of q and k.
        batch: number of rows.
        lengths: number of tokens per row of each stream; None uses the number of tokens in positions. A stream that
            this mapping omits must have no tokens in positions.
        text_mask: (documents, tokens) text mask for cross-attention, or None.
        device: device of q and k.
    """

    def __init__(
        self,
        positions: PositionTable,
        rotary: Rotary,
        batch: int,
        lengths: Mapping[str, int | None],
        text_mask: Tensor | None,
        device: torch.device,
    ) -> None:
        documents = positions.num_documents
        if not documents or batch not in (1, documents):
            want = f"{batch}, one per row, or all in one row"
            raise InvalidInputError(f"positions.num_documents: got {documents}, want {want}")
        empty = positions.lengths == 0
        if empty.any():
            raise InvalidInputError(f"positions: got document {empty.argmax()} without tokens, want at least one")
        self.positions, self.rotary, self.batch, self.device = positions, rotary, batch, device
        self.packed = documents > batch
        self.text_mask = None if text_mask is None else text_mask.to(device).bool()[:, None, None]
        self.reached: list[None] = []
        is_image = positions.is_grid | positions.is_padding  # a document's padding follows its images
        selected = {TEXT: ~is_image, IMAGE: is_image}
        self._streams = {name: self._stream(selected[name], length, name) for name, length in lengths.items()}

    def rows(self, order: tuple[str, ...]) -> Rows:
        """Return the rows for an attention; ``order`` names its streams in token order."""
        stream = _Stream(*map(np.concatenate, zip(*(self._streams[name] for name in order), strict=True)))
        stream = stream.sorted_by_row()
        owner = self._owners(stream)
        padding = np.zeros((len(self.positions.table), 1), np.int64)
        padding[2:5] = 1  # height, width and denominator; row 0 is the first token
        columns = np.append(self.positions.table, padding, axis=1)[:, stream.column]
        columns[0] = stream.length.cumsum() - stream.length
        documents = np.zeros((4, self.batch), np.int64)  # first segment, first token, next position, delta
        documents[0] = stream.row.searchsorted(np.arange(self.batch))
        documents[1] = np.arange(self.batch) * owner.shape[1]
        table = PositionTable(columns, documents, owner.size, self.positions.fractional, self.positions.scheme)
        mask, packed = None, None
        if self.packed:
            packed = PackedDocuments.from_owner(owner[0], self.positions.num_documents).to(self.device)
        elif (owner < 0).any():
            mask = torch.from_numpy(owner[:, None, None] >= 0).to(self.device)
        positions = DevicePositions.from_table(table, self.device)
        return Rows(positions, self.rotary, mask, packed, self.text_mask, self.reached)

    def documents_of(self, name: str) -> IntArray:
        """Return the document of every token of a stream, (batch, tokens), −1 for padding."""
        return self._owners(self._streams[name])

    @property
    def text_lengths(self) -> IntArray:
        """(documents,) number of text tokens in each document, without padding."""
        owner = self.documents_of(TEXT)
        return np.bincount(owner[owner >= 0], minlength=self.positions.num_documents)

    def texts_in_rows(self, x: Tensor) -> Tensor:
        """Arrange texts (documents, tokens, …), padded on the right, in their rows."""
        if not self.packed:
            return x
        texts = PackedDocuments.from_owner(self.documents_of(TEXT)[0], self.positions.num_documents)
        return texts.to(x.device).join(x[:, : texts.tokens.shape[1]])

    def _owners(self, stream: _Stream) -> IntArray:
        return stream.document.repeat(stream.length).reshape(self.batch, -1)

    def _stream(self, selected: npt.NDArray[np.bool_], length: int | None, name: str) -> _Stream:
        """Return the selected segments with every row padded to its length."""
        table = self.positions
        (column,) = selected.nonzero()
        size = table.segment_lengths[column]
        document = table.cu_seqlens.searchsorted(table.offset[column], side="right") - 1
        row = np.zeros_like(document) if self.packed else document
        tokens = np.bincount(row, size, minlength=self.batch).astype(np.int64)
        missing = (tokens.max() if length is None else length) - tokens
        if (missing < 0).any() or (self.packed and missing.any()):
            r = int((missing != 0).argmax() if self.packed else missing.argmin())
            got, want = f"{length} tokens per row", f"{tokens[r]} as in row {r} of positions"
            raise InvalidInputError(f"{name}: got {got}, want {want}")
        document = np.where(table.is_padding[column], -1, document)
        (short,) = missing.nonzero()
        none = np.full(short.size, -1)
        padding = none, missing[short], short, none
        pairs = zip((column, size, row, document), padding, strict=True)
        return _Stream(*(np.concatenate(pair) for pair in pairs)).sorted_by_row()


def _moved(x: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    return None if x is None else x.to(device, non_blocking=non_blocking)
