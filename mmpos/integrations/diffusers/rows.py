"""Rows of tokens as the attention of a transformer sees them: their rotation, and which tokens see each other.

A PositionTable lists documents one after the other. A transformer keeps texts and images apart, and joins them in every
attention: all texts of a row, then all its images, or the other way round. ``Streams`` lays out the table so.
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
"""Streams of tokens, named as the arguments that bring them."""

Attention = Callable[..., Tensor]
"""q, k and v of (batch, seq, heads, head_dim), and attn_mask and other options by name, to the same shape."""


class PackedDocuments(NamedTuple):
    """Documents packed in one row, and the same as a padded batch, in which no token sees another document.

    Args:
        tokens: (documents, longest) the token of the row at each place; any where there is none.
        mask: (documents, 1, 1, longest) whether there is one; None where all documents have one length.
        places: (seq,) the place of each token of the row, counted over the flattened batch; any for padding.
    """

    tokens: Tensor
    mask: Tensor | None
    places: Tensor

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedDocuments:
        """Move to another device."""
        tokens, places = (x.to(device, non_blocking=non_blocking) for x in (self.tokens, self.places))
        return PackedDocuments(tokens, _moved(self.mask, device, non_blocking), places)

    def apart(self, x: Tensor) -> Tensor:
        """Copy (1, seq, …) to (documents, longest, …)."""
        return x[0, self.tokens]

    def together(self, x: Tensor) -> Tensor:
        """Copy (documents, longest, …) back to (1, seq, …)."""
        return x.flatten(0, 1)[self.places].unsqueeze(0)


class WholeRows:
    """All tokens of rows that diffusers splits among ranks.

    Args:
        owner: (batch, seq) the document of every token, −1 for padding.
        lengths: tokens of each stream in a row.
        packed: whether a row holds several documents.
    """

    def __init__(self, owner: IntArray, lengths: Sequence[int], packed: bool) -> None:
        self.owner = owner
        self.lengths = lengths
        self.packed = packed
        self._mask: Tensor | None = None

    def mask(self, parallel: Any, device: torch.device) -> Tensor | None:
        """Make the mask of who sees whom, in the order in which Ulysses gathers tokens; None where all see all.

        Args:
            parallel: the ContextParallelConfig.
            device: where q and k are.

        Raises:
            UnsupportedError: there is a mask, and ring attention, which takes none.
        """
        if not self.packed and (self.owner >= 0).all():
            return None
        if parallel.ring_degree > 1:
            got, want = (
                "padding or packed documents under ring attention",
                "ulysses_degree alone, or one whole document",
            )
            raise UnsupportedError(f"positions: got {got}, want {want} in each row")
        if self._mask is None:
            ranks, stops = parallel.ulysses_degree, np.cumsum(self.lengths)
            streams = [np.array_split(np.arange(b - n, b), ranks) for n, b in zip(self.lengths, stops, strict=True)]
            order = np.concatenate([stream[rank] for rank in range(ranks) for stream in streams])
            owner = torch.from_numpy(self.owner[:, None, order]).to(device)
            self._mask = (owner.mT == owner if self.packed else owner >= 0)[:, None]
        return self._mask


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens of an attention, in its order; blocks get them in place of the transformer's own cos and sin.

    Args:
        positions: of (batch, seq) tokens, padding included.
        rotaries: what turns q and k; where there are two, the second turns the second channel of every pair.
        mask: (batch, 1, 1, seq) whether a token is no padding; None where there is none, or documents are packed.
        documents: of a packed row; None where every row is one document.
        text_mask: (documents, 1, 1, tokens) of the texts that packed documents see across; None where all are whole.
        reached: gets an entry from every attention that turns by these rows.
        whole: the rows of which these are a rank's part; None where they are whole.
    """

    positions: DevicePositions
    rotaries: Sequence[Rotary]
    mask: Tensor | None
    documents: PackedDocuments | None
    text_mask: Tensor | None
    reached: list[None]
    whole: WholeRows | None = None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Rows:
        """Move to another device, as those who spread a model over several ask of its arguments."""
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
        """Turn q and k of the same tokens, and let these see their own document alone.

        Args:
            attention: what attends.
            query: not turned yet.
            key: not turned yet.
            value: as it is.
            options: of the call; its attn_mask gives way to ours.
        """
        query, key = self._turned(query, key)
        self.reached.append(None)
        parallel = options.get("parallel_config")
        if self.whole is not None and parallel is not None:
            mask = self.whole.mask(parallel.context_parallel_config, query.device)
            return attention(query, key, value, **{**options, "attn_mask": mask})
        if parallel is not None and (self.mask is not None or self.documents is not None):
            want = "one whole document in each row: a rank sees the mask of its own tokens alone"
            raise UnsupportedError(f"positions: got padding or packed documents under context parallelism, want {want}")
        if self.documents is None:
            return attention(query, key, value, **{**options, "attn_mask": self.mask})
        query, key, value = (self.documents.apart(x) for x in (query, key, value))
        out = attention(query, key, value, **{**options, "attn_mask": self.documents.mask})
        return self.documents.together(out)

    def _turned(self, query: Tensor, key: Tensor) -> Sequence[Tensor]:
        turned: Any = [apply_rotary(query, key, self.positions, one, layout="bshd") for one in self.rotaries]
        if len(turned) == 1:
            return turned[0]
        return [torch.cat((a.chunk(2, -1)[0], b.chunk(2, -1)[1]), -1) for a, b in zip(*turned, strict=True)]

    def attend_across(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """Let every document see its own text, of which k and v have a row each, or all rows one after the other."""
        if self.documents is None:
            return attention(query, key, value, **options)
        if options.get("parallel_config") is not None:
            want = "one document in each row: diffusers splits the texts that they see"
            raise UnsupportedError(f"positions: got packed documents under context parallelism, want {want}")
        count = self.documents.tokens.shape[0]
        key, value = (x.reshape(count, -1, *x.shape[2:]) for x in (key, value))
        query = self.documents.apart(query)
        return self.documents.together(attention(query, key, value, **{**options, "attn_mask": self.text_mask}))


class _Stream(NamedTuple):
    """Segments of all rows, row after row.

    Args:
        columns: (5 + 4·axes, pieces) with lengths in the OFFSET row.
        row: (pieces,) ascending.
        document: (pieces,) −1 for padding.
    """

    columns: IntArray
    row: IntArray
    document: IntArray

    def in_order(self) -> _Stream:
        """Sort by rows, in which nothing changes its order."""
        by_row = np.argsort(self.row, kind="stable")
        return _Stream(self.columns[:, by_row], self.row[by_row], self.document[by_row])


class Streams:
    """Texts and images of a table in rows.

    Args:
        positions: one document in each row, or all documents in one row.
        rotaries: what turns q and k, as in Rows.
        batch: rows.
        lengths: tokens in a row of each stream; a stream that is not among them must have no tokens, and one of None
            is as long as its tokens.
        text_mask: (documents, tokens) of texts in cross-attention, or None.
        device: where attentions run.
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
            raise InvalidInputError(f"positions: got {got} for {rows}, want one in each row, or all in one row")
        empty = positions.lengths == 0
        if empty.any():
            raise InvalidInputError(f"positions: got document {empty.argmax()} without tokens, want one or more")
        self.positions, self.rotaries, self.batch, self.device = positions, rotaries, batch, device
        self.packed = documents > batch
        self.text_mask = None if text_mask is None else text_mask.to(device).bool()[:, None, None]
        self.reached: list[None] = []
        self.arrived: list[IntArray] = []
        self.later: list[Rows] = []
        is_image = positions.is_grid | positions.is_padding  # a document's padding follows its images
        self._streams = {
            name: self._stream(where, lengths[name], name)
            for name, where in ((TEXT, ~is_image), (IMAGE, is_image))
            if name in lengths or self._check_none(where, name)
        }

    def numbers(self, order: tuple[str, ...]) -> dict[str, Tensor]:
        """Number the tokens of a row of these streams; diffusers splits the numbers among ranks as it does tokens."""
        lengths = [self._owners(self._streams[name]).shape[1] for name in order]
        return dict(zip(order, torch.arange(sum(lengths)).split(lengths), strict=True))

    def rows(self, order: tuple[str, ...], tokens: IntArray | None = None) -> Rows:
        """Lay out the streams of an attention in their order.

        Args:
            order: of the streams.
            tokens: ascending numbers of those tokens of every row that this rank has; None for all.
        """
        parts = [self._streams[name] for name in order]
        columns = np.concatenate([part.columns for part in parts], axis=1)
        row, document = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        stream = _Stream(columns, row, document).in_order()
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
        """(batch, tokens) the document of every token of images, −1 for padding."""
        return self._owners(self._streams[IMAGE])

    @property
    def text_lengths(self) -> IntArray:
        """(documents,) tokens of the text of each document, without padding."""
        owner = self._owners(self._streams[TEXT])
        return np.bincount(owner[owner >= 0], minlength=self.positions.num_documents)

    def texts_in_rows(self, x: Tensor) -> Tensor:
        """Lay (documents, tokens, …) texts, padded on the right, out in the rows that they have here."""
        if not self.packed:
            return x
        texts = _packed(self._owners(self._streams[TEXT])[0], self.positions.num_documents)
        return texts.to(x.device).together(x[:, : texts.tokens.shape[1]])

    def _owners(self, stream: _Stream) -> IntArray:
        """(batch, seq) the document of every token, −1 for padding."""
        return stream.document.repeat(stream.columns[OFFSET]).reshape(self.batch, -1)

    def _check_none(self, where: npt.NDArray[np.bool_], name: str) -> bool:
        if where.any():
            raise InvalidInputError(f"positions: got text, want none: that of {name} stands in cross-attention")
        return False

    def _stream(self, where: npt.NDArray[np.bool_], length: int | None, name: str) -> _Stream:
        """Take these segments, and fill every row with padding up to its length."""
        table = self.positions
        columns = table.table[:, where]
        columns[OFFSET] = table.segment_lengths[where]
        segments = np.diff(table.documents[FIRST_SEGMENT], append=table.num_segments)
        document = np.arange(table.num_documents).repeat(segments)[where]
        row = np.zeros_like(document) if self.packed else document
        tokens = np.bincount(row, columns[OFFSET], minlength=self.batch).astype(np.int64)
        missing = (tokens.max() if length is None else length) - tokens
        if (missing < 0).any() or (self.packed and missing.any()):
            r = int((missing != 0).argmax() if self.packed else missing.argmin())
            got, want = f"{length} tokens in a row", f"{tokens[r]} as in row {r} of positions"
            raise InvalidInputError(f"{name}: got {got}, want {want}")
        document = np.where(table.is_padding[where], -1, document)
        (short,) = missing.nonzero()
        padding = padding_column(table.axes)[:, None].repeat(short.size, axis=1)
        padding[OFFSET] = padding[WIDTH] = missing[short]
        columns = np.concatenate([columns, padding], axis=1)
        row, document = np.append(row, short), np.append(document, np.full(short.size, -1))
        return _Stream(columns, row, document).in_order()


def _moved(x: Tensor | None, device: torch.device | str | int, non_blocking: bool) -> Tensor | None:
    return None if x is None else x.to(device, non_blocking=non_blocking)


def _packed(owner: IntArray, count: int) -> PackedDocuments:
    """Find the tokens of every document of a row from (seq,) the document of each, −1 for padding."""
    order = np.argsort(owner, kind="stable")
    order = order[np.count_nonzero(owner < 0) :]
    counts = np.bincount(owner[order], minlength=count)
    longest = max(1, int(counts.max()))
    real = np.arange(longest) < counts[:, None]
    (places,) = real.ravel().nonzero()
    tokens, place_of = np.zeros(real.size, np.int64), np.zeros(owner.size, np.int64)
    tokens[places], place_of[order] = order, places
    mask = None if real.all() else torch.from_numpy(real[:, None, None])
    return PackedDocuments(torch.from_numpy(tokens.reshape(real.shape)), mask, torch.from_numpy(place_of))
