"""Rows of tokens in the order of a transformer's attention, with their rotation and attention mask.

A PositionTable holds documents in sequence. A transformer keeps texts and images separate and joins them in every
attention: all texts of a row, then all images of the row, or the reverse. ``Streams`` arranges the table in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_SEGMENT, NO_POSITION, OFFSET, WIDTH, assemble, padding_column
from mmpos.rotary.apply import apply_rotary
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions
from mmpos.support.checks import IntArray, counted

__all__ = ["IMAGE", "TEXT", "PackedDocuments", "Rows", "Streams"]

TEXT, IMAGE = "encoder_hidden_states", "hidden_states"
"""Names of the token streams, which are also the names of their arguments."""

Attention = Callable[..., Tensor]
"""Function that takes q, k and v (batch, seq, heads, head_dim) and options such as attn_mask; its result has the shape
of q.
"""


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

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedDocuments:
        """Return a copy on another device."""
        tokens, slots = (x.to(device, non_blocking=non_blocking) for x in (self.tokens, self.slots))
        return PackedDocuments(tokens, _moved(self.mask, device, non_blocking), slots)

    def split(self, x: Tensor) -> Tensor:
        """Copy (1, seq, …) to (documents, longest, …)."""
        return x[0, self.tokens]

    def join(self, x: Tensor) -> Tensor:
        """Copy (documents, longest, …) back to (1, seq, …)."""
        return x.flatten(0, 1)[self.slots].unsqueeze(0)


class WholeRows:
    """All tokens of rows that diffusers splits among ranks.

    Args:
        owner: (batch, seq) document of every token, −1 for padding.
        lengths: number of tokens in a row, per stream.
        packed: whether a row holds several documents.
    """

    def __init__(self, owner: IntArray, lengths: Sequence[int], packed: bool) -> None:
        self.owner = owner
        self.lengths = lengths
        self.packed = packed
        self._mask: Tensor | None = None

    def mask(self, parallel: Any, device: torch.device) -> Tensor | None:
        """Return the attention mask in the order in which Ulysses gathers tokens; None if no token is masked.

        Args:
            parallel: the ContextParallelConfig.
            device: device of q and k.

        Raises:
            UnsupportedError: a mask is needed, but ring attention does not support masks.
        """
        if not self.packed and (self.owner >= 0).all():
            return None
        if parallel.ring_degree > 1:
            raise UnsupportedError(
                "positions: got padding or packed documents with ring attention, want one whole document per row, or "
                "ulysses_degree only"
            )
        if self._mask is None:
            ranks, stops = parallel.ulysses_degree, np.cumsum(self.lengths)
            streams = [np.array_split(np.arange(b - n, b), ranks) for n, b in zip(self.lengths, stops, strict=True)]
            order = np.concatenate([stream[rank] for rank in range(ranks) for stream in streams])
            owner = torch.from_numpy(self.owner[:, None, order]).to(device)
            self._mask = (owner.mT == owner if self.packed else owner >= 0)[:, None]
        return self._mask


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens in attention order; they replace the transformer's own cos and sin in the arguments of blocks.

    Args:
        positions: positions of (batch, seq) tokens, including padding.
        rotaries: rotations of q and k; the second, if any, rotates the second channel of every pair.
        mask: (batch, 1, 1, seq) False for padding; None if there is no padding or documents are packed.
        documents: documents of a packed row; None if every row is one document.
        text_mask: (documents, 1, 1, tokens) text mask for cross-attention of packed documents; None if there is no
            padding.
        reached: list to which each attention that rotates by these rows appends an entry.
        whole: the whole rows if these rows hold only the tokens of one rank, else None.
    """

    positions: DevicePositions
    rotaries: Sequence[Rotary]
    mask: Tensor | None
    documents: PackedDocuments | None
    text_mask: Tensor | None
    reached: list[None]
    whole: WholeRows | None = None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Rows:
        """Return a copy on another device; libraries that split a model across devices call this for its arguments."""
        if self.positions.device == torch.device(device):
            return self
        return replace(
            self,
            positions=self.positions.to(device, non_blocking),
            mask=_moved(self.mask, device, non_blocking),
            documents=None if self.documents is None else self.documents.to(device, non_blocking),
            text_mask=_moved(self.text_mask, device, non_blocking),
        )

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
        query, key = self._rotated(query, key)
        self.reached.append(None)
        parallel = options.get("parallel_config")
        if self.whole is not None and parallel is not None:
            mask = self.whole.mask(parallel.context_parallel_config, query.device)
            return attention(query, key, value, **{**options, "attn_mask": mask})
        if parallel is not None and (self.mask is not None or self.documents is not None):
            want = "one whole document per row, because a rank has only the mask of its own tokens"
            raise UnsupportedError(f"positions: got padding or packed documents with context parallelism, want {want}")
        if self.documents is None:
            return attention(query, key, value, **{**options, "attn_mask": self.mask})
        query, key, value = (self.documents.split(x) for x in (query, key, value))
        out = attention(query, key, value, **{**options, "attn_mask": self.documents.mask})
        return self.documents.join(out)

    def _rotated(self, query: Tensor, key: Tensor) -> Sequence[Tensor]:
        rotated: Any = [apply_rotary(query, key, self.positions, rotary, layout="bshd") for rotary in self.rotaries]
        if len(rotated) == 1:
            return rotated[0]
        return [torch.cat((a.chunk(2, -1)[0], b.chunk(2, -1)[1]), -1) for a, b in zip(*rotated, strict=True)]

    def attend_to_text(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """Compute cross-attention of documents to their texts; k and v have a row per text or one row for all."""
        if self.documents is None:
            return attention(query, key, value, **options)
        if options.get("parallel_config") is not None:
            want = "one document per row, because diffusers splits the texts of packed documents"
            raise UnsupportedError(f"positions: got packed documents with context parallelism, want {want}")
        count = self.documents.tokens.shape[0]
        key, value = (x.reshape(count, -1, *x.shape[2:]) for x in (key, value))
        query = self.documents.split(query)
        return self.documents.join(attention(query, key, value, **{**options, "attn_mask": self.text_mask}))


class _Stream(NamedTuple):
    """Segments of all rows, in row order.

    Args:
        columns: (5 + 4·axes, segments) columns of a table with lengths in the OFFSET row.
        row: (segments,) row of each segment, ascending.
        document: (segments,) document of each segment, −1 for padding.
    """

    columns: IntArray
    row: IntArray
    document: IntArray

    def sorted_by_row(self) -> _Stream:
        """Return the segments, sorted stably by row."""
        by_row = np.argsort(self.row, kind="stable")
        return _Stream(self.columns[:, by_row], self.row[by_row], self.document[by_row])


class Streams:
    """Texts and images of a table, arranged in rows.

    Args:
        positions: table with one document per row, or with all documents in one row.
        rotaries: rotations of q and k; see Rows.
        batch: number of rows.
        lengths: number of tokens per row of each stream; None uses the number of tokens in positions. A stream that
            this mapping omits must have no tokens in positions.
        text_mask: (documents, tokens) text mask for cross-attention, or None.
        device: device of q and k.
    """

    def __init__(
        self,
        positions: PositionTable,
        rotaries: Sequence[Rotary],
        batch: int,
        lengths: Mapping[str, int | None],
        text_mask: Tensor | None,
        device: torch.device,
    ) -> None:
        documents = positions.num_documents
        if not documents or batch not in (1, documents):
            got, rows = counted(documents, "document"), counted(batch, "row")
            raise InvalidInputError(f"positions: got {got} for {rows}, want one per row, or all in one row")
        empty = positions.lengths == 0
        if empty.any():
            raise InvalidInputError(f"positions: got document {empty.argmax()} without tokens, want at least one")
        self.positions, self.rotaries, self.batch, self.device = positions, rotaries, batch, device
        self.packed = documents > batch
        self.text_mask = None if text_mask is None else text_mask.to(device).bool()[:, None, None]
        self.reached: list[None] = []
        self.received: list[IntArray] = []
        self.deferred: list[Rows] = []
        is_image = positions.is_grid | positions.is_padding  # a document's padding follows its images
        self._streams = {
            name: self._stream(selected, lengths[name], name)
            for name, selected in ((TEXT, ~is_image), (IMAGE, is_image))
            if name in lengths or self._check_none(selected, name)
        }

    def numbers(self, order: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the token numbers in a row for each stream; diffusers splits them among ranks like tokens."""
        lengths = [self._owners(self._streams[name]).shape[1] for name in order]
        return dict(zip(order, torch.arange(sum(lengths)).split(lengths), strict=True))

    def rows(self, order: tuple[str, ...], tokens: IntArray | None = None) -> Rows:
        """Return the rows for an attention.

        Args:
            order: streams of the attention, in token order.
            tokens: ascending indices of this rank's tokens in each row; None for all.
        """
        parts = [self._streams[name] for name in order]
        columns = np.concatenate([part.columns for part in parts], axis=1)
        row, document = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        stream = _Stream(columns, row, document).sorted_by_row()
        owner = self._owners(stream)
        header = np.full((2, self.batch), NO_POSITION, np.int64)
        fields = assemble(stream.columns, stream.row, header)
        table, whole = PositionTable(*fields, self.positions.fractional, self.positions.scheme), None
        if tokens is not None and tokens.size < owner.shape[1]:
            whole = WholeRows(owner, [self._owners(part).shape[1] for part in parts], self.packed)
            first = np.arange(0, owner.size, owner.shape[1])[:, None] + tokens
            runs = np.flatnonzero(np.diff(tokens, prepend=-2) != 1)
            table = table.take(first[:, runs].ravel(), 1 + first[:, np.append(runs[1:], tokens.size) - 1].ravel())
            owner = owner[:, tokens]
        real = owner >= 0
        mask = None if self.packed or real.all() else torch.from_numpy(real[:, None, None]).to(self.device)
        documents = _packed(owner[0], self.positions.num_documents).to(self.device) if self.packed else None
        positions = DevicePositions.from_table(table, self.device)
        return Rows(positions, self.rotaries, mask, documents, self.text_mask, self.reached, whole)

    @property
    def image_documents(self) -> IntArray:
        """(batch, tokens) document of every image token, −1 for padding."""
        return self._owners(self._streams[IMAGE])

    @property
    def text_lengths(self) -> IntArray:
        """(documents,) number of text tokens in each document, without padding."""
        owner = self._owners(self._streams[TEXT])
        return np.bincount(owner[owner >= 0], minlength=self.positions.num_documents)

    def texts_in_rows(self, x: Tensor) -> Tensor:
        """Arrange texts (documents, tokens, …), padded on the right, in their rows."""
        if not self.packed:
            return x
        texts = _packed(self._owners(self._streams[TEXT])[0], self.positions.num_documents)
        return texts.to(x.device).join(x[:, : texts.tokens.shape[1]])

    def _owners(self, stream: _Stream) -> IntArray:
        """Return the document of every token, (batch, seq), −1 for padding."""
        return stream.document.repeat(stream.columns[OFFSET]).reshape(self.batch, -1)

    def _check_none(self, selected: npt.NDArray[np.bool_], name: str) -> bool:
        if selected.any():
            raise InvalidInputError(f"positions: got text, want none, because {name} is used in cross-attention")
        return False

    def _stream(self, selected: npt.NDArray[np.bool_], length: int | None, name: str) -> _Stream:
        """Return the selected segments with every row padded to its length."""
        table = self.positions
        columns = table.table[:, selected]
        columns[OFFSET] = table.segment_lengths[selected]
        segments = np.diff(table.documents[FIRST_SEGMENT], append=table.num_segments)
        document = np.arange(table.num_documents).repeat(segments)[selected]
        row = np.zeros_like(document) if self.packed else document
        tokens = np.bincount(row, columns[OFFSET], minlength=self.batch).astype(np.int64)
        missing = (tokens.max() if length is None else length) - tokens
        if (missing < 0).any() or (self.packed and missing.any()):
            r = int((missing != 0).argmax() if self.packed else missing.argmin())
            got, want = f"{length} tokens per row", f"{tokens[r]} as in row {r} of positions"
            raise InvalidInputError(f"{name}: got {got}, want {want}")
        document = np.where(table.is_padding[selected], -1, document)
        (short,) = missing.nonzero()
        padding = padding_column(table.axes)[:, None].repeat(short.size, axis=1)
        padding[OFFSET] = padding[WIDTH] = missing[short]
        columns = np.concatenate([columns, padding], axis=1)
        row, document = np.append(row, short), np.append(document, np.full(short.size, -1))
        return _Stream(columns, row, document).sorted_by_row()


def _moved(x: Tensor | None, device: torch.device | str | int, non_blocking: bool) -> Tensor | None:
    return None if x is None else x.to(device, non_blocking=non_blocking)


def _packed(owner: IntArray, count: int) -> PackedDocuments:
    """Index the documents of a packed row; ``owner`` (seq,) is the document of each token, −1 for padding."""
    order = np.argsort(owner, kind="stable")
    order = order[np.count_nonzero(owner < 0) :]
    counts = np.bincount(owner[order], minlength=count)
    longest = max(1, int(counts.max()))
    real = np.arange(longest) < counts[:, None]
    (slots,) = real.ravel().nonzero()
    tokens, slot_of = np.zeros(real.size, np.int64), np.zeros(owner.size, np.int64)
    tokens[slots], slot_of[order] = order, slots
    mask = None if real.all() else torch.from_numpy(real[:, None, None])
    return PackedDocuments(torch.from_numpy(tokens.reshape(real.shape)), mask, torch.from_numpy(slot_of))
