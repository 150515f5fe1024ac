"""Training batch: tensors and the position table, with attention masks and context-parallel shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.data.examples import IGNORE_INDEX
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions import expand
from mmpos.positions.table import Layout, PositionTable
from mmpos.positions.table_rows import FIRST_SEGMENT
from mmpos.rotary.device import DevicePositions
from mmpos.support.checks import IntArray, boolean, counted, one_of
from mmpos.support.ragged import ragged_arange

__all__ = ["Batch", "MaskMod", "ModelArguments", "construct"]

T = TypeVar("T")

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Mask function of FlexAttention: (b, h, q_idx, kv_idx) -> bool, True if the query attends to the key."""

_PER_TOKEN = ("input_ids", "labels", "text_positions", "attention_mask")
"""Fields of a batch with one value per token."""

_COPIED = 32  # mean tokens in a range above which ranges are copied one by one

_SPANS = ("image_spans", "feature_spans", "audio_spans", "audio_feature_spans")
_PER_BATCH = ("device_positions", "cu_seqlens", "patches", "grid_thw", *_SPANS)


def construct(cls: type[T], **fields: Any) -> T:
    """Create an instance of a dataclass from all its fields, without the checks of ``__init__``."""
    instance = object.__new__(cls)
    vars(instance).update(fields)
    return instance


class _WholeType(type):
    """Metaclass that says what to do in the errors of accelerate's dispatcher, which print the type of an argument."""

    def __format__(cls, spec: str) -> str:
        remedy = "mmpos.data.RankLoader(DataLoader(dataset, batch_size=None)), which accelerate leaves unchanged"
        return f"{cls!r}, which stays whole: load it through {remedy}"


@dataclass(frozen=True, eq=False)
class Batch(metaclass=_WholeType):
    """Batch of documents, packed into one row or padded to rows of equal length.

    All values except pixels are integers, which the casts of mixed precision do not change.

    Args:
        keys: record id of each document; the parts of a split document have the same key.
        positions: position table on the host.
        device_positions: position table as a small tensor for ``apply_rotary``; moves with the batch.
        input_ids: (tokens,) packed or (batch, seq) padded, int64.
        labels: int64 with the shape of input_ids; IGNORE_INDEX for tokens that are not trained on, for padding, and for
            the first token of each document, which no token predicts.
        text_positions: int32 with the shape of input_ids; index of each token in its document. The indices continue
            through padding after a document and are 0 for padding before it.
        cu_seqlens: (documents + 1,) int32 first token of each document, including padding, then the total.
        attention_mask: (batch, seq) int64, 0 on padding; None if packed.
        patches: (patches, patch_size, patch_size, 3) pixels of all images, or (patches, values) as returned by a
            model's processor; None without pixels.
        grid_thw: (images, 3) int64 frames, height, width after merging.
        image_spans: (spans, 2) int64 first patch token of each run of patches and one past the last, as indices into
            ``input_ids.view(-1)``. Row separators, audio of clips and the cuts of shards divide images into runs.
        feature_spans: (spans, 2) int64 rows of the vision encoder's features for each span of image_spans; the encoder
            returns one row per token of grid_thw.
        shifted: whether each label is at the token that predicts it; see ``shift_labels``.
        world_size: number of context-parallel ranks that share the batch; 1 for a whole batch.
        audio_spans: like image_spans, for audio, including that inside clips; None without audio.
        audio_feature_spans: (spans, 2) int64 rows of the audio encoder's features for each span of audio_spans.
    """

    keys: tuple[str, ...]
    positions: PositionTable
    device_positions: DevicePositions
    input_ids: Tensor
    labels: Tensor
    text_positions: Tensor
    cu_seqlens: Tensor
    attention_mask: Tensor | None
    patches: Tensor | None
    grid_thw: Tensor
    image_spans: Tensor
    feature_spans: Tensor
    shifted: bool = False
    world_size: int = 1
    audio_spans: Tensor | None = None
    audio_feature_spans: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.input_ids.shape)
        if (got := self.input_ids.numel()) != self.positions.num_tokens:
            want = self.positions.num_tokens
            raise InvalidInputError(f"input_ids: got {counted(got, 'token')}, want {want} as in positions")
        for name in _PER_TOKEN:
            if (tensor := getattr(self, name)) is not None and tuple(tensor.shape) != shape:
                of = f"{tuple(tensor.shape)}, want {shape}, the shape of input_ids"
                raise InvalidInputError(f"{name}: got shape {of}")
        for spans, features in (_SPANS[:2], _SPANS[2:]):
            want, got = (0 if (tensor := getattr(self, name)) is None else len(tensor) for name in (spans, features))
            if got != want:
                raise InvalidInputError(f"{features}: got {got} spans, want {want} as in {spans}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Make fields when one is first read: from arrays, from a PositionTable, or by a callable."""
            later = (fields := self.__dict__).get("_later", {})
            if name not in later:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if callable(source := later[name]):
                fields.update(source())
            elif type(source) is PositionTable:
                fields[name] = DevicePositions.from_table(source)
            else:  # all at once, since a failed look-up costs more than a tensor
                arrays = [(key, value) for key, value in later.items() if type(value) is np.ndarray]
                fields.update([(key, torch.from_numpy(value)) for key, value in arrays])
            return fields[name]

    @property
    def packed(self) -> bool:
        """Whether the documents are packed into one row."""
        return self.input_ids.dim() == 1

    @property
    def max_seqlen(self) -> int:
        """Number of tokens in the longest document, including padding."""
        return self.positions.max_seqlen

    @property
    def fill(self) -> float:
        """Fraction of tokens that are not padding."""
        padding = int(self.positions.segment_lengths[self.positions.is_padding].sum())
        return 1 - padding / self.positions.num_tokens

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.input_ids.device

    def position_ids(self, dtype: torch.dtype | None = None, text_row: bool = False) -> Tensor:
        """Expand the position ids on the batch's device.

        Args:
            dtype: int32 (default), int64 or float64; fractional schemes support only float64.
            text_row: whether to prepend text_positions as a row, in which Transformers finds the documents of a pack.

        Returns:
            (axes, tokens) or (axes, batch, seq); with text_row, axes + 1 rows.
        """
        table = self.positions
        if self.input_ids.is_cpu:  # as the table is
            ids = torch.from_numpy(expand.dense(table.table, table.num_tokens, table.fractional))
        else:
            ids = self.device_positions.dense()
        if dtype is not None:
            kinds = (torch.float64,) if table.fractional else (torch.int32, torch.int64, torch.float64)
            ids = ids.to(one_of("dtype", dtype, kinds))
        if not self.packed:
            ids = ids.view(-1, *self.input_ids.shape)
        if boolean("text_row", text_row):
            ids = torch.cat([self.text_positions[None].to(ids.dtype), ids])
        return ids

    def mask_mod(self, *, bidirectional_images: bool = False) -> MaskMod:
        """Return the mask of this batch for ``create_block_mask`` and ``flex_attention``: causal within each document.

        Padding tokens attend to nothing and are not attended to; flex_attention returns zeros for them.

        Args:
            bidirectional_images: whether all tokens from the first to the last patch of an image attend to one another.

        Returns:
            a function for B = 1 and Q = KV = tokens if the batch is packed, else B = documents and Q = KV = length.

        Raises:
            UnsupportedError: the batch is a context-parallel shard, whose tokens also attend to those of other ranks.
        """
        if self.world_size > 1:
            raise UnsupportedError("mask_mod: got a context-parallel shard, want the mask of the whole batch")
        shape = (1, -1) if self.packed else tuple(self.input_ids.shape)
        document = torch.from_numpy(_documents(self.positions)).to(self.device).reshape(shape)

        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            q_document = document[b, q_idx]
            return (q_document == document[b, kv_idx]) & (q_document >= 0) & (q_idx >= kv_idx)

        if not boolean("bidirectional_images", bidirectional_images):
            return causal
        image = _images(_whole_images(self), self.input_ids.numel()).reshape(shape)

        def causal_except_images(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            q_image = image[b, q_idx]
            return causal(b, h, q_idx, kv_idx) | ((q_image == image[b, kv_idx]) & (q_image >= 0))

        return causal_except_images

    def image_tokens(self) -> tuple[Tensor, Tensor]:
        """Return indices to scatter image features: ``embeddings.view(-1, channels)[tokens] = features[rows]``.

        Returns:
            (patch tokens,) int64 indices into ``input_ids.view(-1)``, and the feature row of each. This synchronizes
            with a GPU.
        """
        return _indexed(self.image_spans, self.feature_spans)

    def audio_tokens(self) -> tuple[Tensor, Tensor]:
        """Return indices to scatter audio features, like ``image_tokens``; both are empty without audio."""
        if self.audio_spans is None or self.audio_feature_spans is None:
            none = torch.empty(0, dtype=torch.int64, device=self.device)
            return none, none
        return _indexed(self.audio_spans, self.audio_feature_spans)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        """Move the batch to another device; ``positions`` stays on the host."""
        return self._each(methodcaller("to", device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Copy the batch to page-locked memory; a DataLoader with pin_memory=True calls this."""
        return self._each(methodcaller("pin_memory"))

    def shift_labels(self) -> Batch:
        """Move each label one position to the left in its document, to the token that predicts it; idempotent.

        A model that computes its own loss does so itself, but cannot in a shard, whose next tokens other ranks hold.
        """
        if self.shifted:
            return self
        labels = torch.full_like(self.labels, IGNORE_INDEX)
        flat = labels.view(-1)
        flat[:-1] = self.labels.reshape(-1)[1:]
        flat[self.cu_seqlens[1:].long() - 1] = IGNORE_INDEX
        return replace(self, labels=labels, shifted=True)

    def shard(self, rank: int, world_size: int, layout: Layout = "zigzag") -> Batch:
        """Return the tokens of a context-parallel rank; labels are shifted first.

        Patches and grid_thw stay whole, since an image may span several ranks. cu_seqlens counts the tokens in the
        shard. Call this on the host, before ``to``.

        Args:
            rank: 0 to world_size − 1.
            world_size: number C of context-parallel ranks.
            layout: as in PositionTable.shard.

        Raises:
            InvalidInputError: the length of a document is not a multiple of 2C (zigzag) or C; collate with multiple_of.
            UnsupportedError: a "…-sequence" layout for a padded batch, whose rows it would cut apart.
        """
        if str(layout).endswith("sequence") and not self.packed:
            want = "'zigzag' or 'contiguous', row by row"
            raise UnsupportedError(f"layout: got {layout!r} for a padded batch, want {want}")
        if not self.input_ids.is_cpu:
            return self.to("cpu").shard(rank, world_size, layout).to(self.device)
        positions = self.positions.shard(rank, world_size, layout)
        starts, stops = self.positions.shard_ranges(rank, world_size, layout)
        few = len(starts) * _COPIED < self.positions.num_tokens
        ranges = list(map(slice, starts.tolist(), stops.tolist()))
        indices = None if few else ragged_arange(stops - starts, starts)[1]
        shape = (*self.input_ids.shape[:-1], -1)
        fields: dict[str, Any] = {"audio_spans": None, "audio_feature_spans": None}
        for name in _PER_TOKEN:
            fields[name] = whole = getattr(self, name)
            if whole is not None:
                flat = whole.numpy().reshape(-1)
                if name == "labels" and not self.shifted:
                    flat = np.concatenate([flat[1:], flat[:1]])
                    flat[self.positions.cu_seqlens[1:] - 1] = IGNORE_INDEX
                cut = np.concatenate([flat[tokens] for tokens in ranges]) if indices is None else flat.take(indices)
                fields[name] = torch.from_numpy(cut.reshape(shape))
        later: dict[str, Any] = {"cu_seqlens": positions.cu_seqlens.copy(), "device_positions": positions}
        spans = partial(_pieces, _SPANS[:2], self.image_spans, self.feature_spans, starts, stops)
        later.update(dict.fromkeys(_SPANS[:2], spans))
        if self.audio_spans is not None and self.audio_feature_spans is not None:
            fields |= _pieces(_SPANS[2:], self.audio_spans, self.audio_feature_spans, starts, stops)
        world_size *= self.world_size
        fields |= {"positions": positions, "shifted": True, "world_size": world_size, "_later": later}
        return construct(Batch, keys=self.keys, patches=self.patches, grid_thw=self.grid_thw, **fields)

    def as_dict(
        self, positions: Literal["ids", "table"] = "ids", *, text_row: bool = False, batched: bool = False
    ) -> dict[str, Any]:
        """Return the batch as keyword arguments for a model or a trainer, without fields that are None.

        Args:
            positions: "ids" adds position_ids, int64; "table" adds positions, a DevicePositions for ``apply_rotary``.
            text_row: see ``position_ids``.
            batched: whether to add a batch dimension of 1 to a packed batch, as Transformers expects.

        Returns:
            max_seqlen, input_ids, labels, cu_seqlens, grid_thw, image_spans, feature_spans, and, if present,
            attention_mask, patches, audio_spans and audio_feature_spans. Shifted labels are also returned as
            shift_labels, which keeps Transformers from shifting them again in its losses.

        Raises:
            InvalidInputError: positions is neither "ids" nor "table".
            UnsupportedError: text_row or batched with patches, which Transformers models would ignore; or position_ids
                of a fractional scheme, which mixed precision would round.
        """
        one_of("positions", positions, ("ids", "table"))
        options = {"text_row": boolean("text_row", text_row), "batched": boolean("batched", batched)}
        if self.patches is not None and any(options.values()):
            name = next(name for name, value in options.items() if value)
            want = "ModelCollator(settings)(batch), or neither text_row nor batched for your own model"
            got = "True for a batch with patches, which a Transformers model would ignore"
            raise UnsupportedError(f"{name}: got {got}, want {want}")
        arguments = {"input_ids": self.input_ids, "labels": self.labels}
        if self.shifted:
            arguments["shift_labels"] = self.labels
        if positions == "ids":
            if self.positions.fractional:
                raise UnsupportedError(
                    "positions: got 'ids' of a fractional scheme, want 'table' because mixed precision rounds ids"
                )
            arguments["position_ids"] = self.position_ids(torch.int64, text_row)
        if batched and self.packed:
            arguments = {name: tensor.unsqueeze(-2) for name, tensor in arguments.items()}
        names = ("cu_seqlens", "attention_mask", "patches", "grid_thw", *_SPANS)
        rest = {name: value for name in names if (value := getattr(self, name)) is not None}
        table = {"positions": self.device_positions} if positions == "table" else {}
        # An integer comes first: the dispatcher takes the batch size from the first value and fails, even on a copy.
        return ModelArguments({"max_seqlen": self.max_seqlen, **arguments, **table, **rest})

    def __getitem__(self, name: object) -> NoReturn:
        """Raise UnsupportedError: Trainer expects a mapping of arguments; `in` and iteration also call this."""
        raise UnsupportedError(
            "batch: got a Batch instead of the arguments of a model, want ModelCollator(settings) as data_collator "
            "of Trainer, or ModelCollator(settings)(batch)"
        )

    def _each(self, move: methodcaller) -> Batch:
        names = _PER_TOKEN + _PER_BATCH
        return replace(self, **{name: move(value) for name in names if (value := getattr(self, name)) is not None})

    def __repr__(self) -> str:
        kind, positions = "packed" if self.packed else "padded", self.positions
        documents, tokens = counted(positions.num_documents, "document"), counted(positions.num_tokens, "token")
        images = counted(len(self.grid_thw), "image")
        return f"Batch({kind}, {documents}, {tokens}, {images}, fill={self.fill:.3f}, device={self.device})"


class ModelArguments(dict[str, Any]):
    """Model arguments that refuse to be split across ranks.

    accelerate's dispatcher would cut each tensor to the number of rows of the first, including cu_seqlens and patches.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if any(type(value).__name__ == "TensorInformation" for value in self.values()):
            raise UnsupportedError(
                "batch: got arguments of a model that accelerate's dispatcher is about to split along their first "
                "dimension, want the whole batch; load through mmpos.data.RankLoader, which accelerate leaves unchanged"
            )


def _whole_images(batch: Batch) -> Tensor:
    """Merge the spans of each image of a whole batch into (images, 2) first patch and one past the last."""
    image_spans, images = batch.image_spans, len(batch.grid_thw)
    if len(image_spans) == images:
        return image_spans
    ends = batch.grid_thw.prod(dim=1).cumsum(0)
    image = torch.searchsorted(ends, batch.feature_spans[:, 0].contiguous(), right=True)
    edges = torch.searchsorted(image, torch.arange(images + 1, device=ends.device))
    return torch.stack([image_spans[edges[:-1], 0], image_spans[edges[1:] - 1, 1]], dim=1)


def _indexed(spans: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens in the spans and the feature row of each token."""
    firsts, lengths = spans[:, 0], spans[:, 1] - spans[:, 0]
    before = lengths.cumsum(0) - lengths
    token = torch.repeat_interleave(firsts - before, lengths)
    counter = torch.arange(len(token), device=spans.device)
    return token + counter, torch.repeat_interleave(features[:, 0] - before, lengths) + counter


def _documents(positions: PositionTable) -> npt.NDArray[np.int32]:
    """Return the (tokens,) document index of each token, -1 for padding."""
    segments = np.arange(positions.num_segments)
    document = np.searchsorted(positions.documents[FIRST_SEGMENT], segments, side="right") - 1
    document[positions.is_padding] = -1
    return document.astype(np.int32).repeat(positions.segment_lengths)


def _images(spans: Tensor, tokens: int) -> Tensor:
    """Return the (tokens,) image index of each token, -1 outside images, without device synchronization."""
    token = torch.arange(tokens, device=spans.device)
    if not len(spans):
        return torch.full_like(token, -1)
    image = torch.searchsorted(spans[:, 0].contiguous(), token, right=True) - 1
    inside = (image >= 0) & (token < spans[image.clamp(min=0), 1])
    return torch.where(inside, image, -1).to(torch.int32)


def _pieces(
    names: tuple[str, str], spans: Tensor, features: Tensor, starts: IntArray, stops: IntArray
) -> dict[str, Tensor]:
    """Intersect spans with ascending token ranges, and renumber the pieces as if the ranges were concatenated.

    Args:
        names: names of the two results.
        spans: (spans, 2) first token and one past the last.
        features: (spans, 2) feature rows of each span.
        starts: (ranges,) first tokens.
        stops: (ranges,) one past the last tokens.

    Returns:
        (pieces, 2) tokens in the concatenated ranges, and (pieces, 2) feature rows, by name.
    """
    firsts, lasts = spans.numpy().T
    first = np.searchsorted(stops, firsts, side="right")
    count = np.maximum(np.searchsorted(starts, lasts, side="left") - first, 0)
    owner, piece = ragged_arange(count, first)
    begin = np.maximum(starts[piece], firsts[owner])
    lengths = np.minimum(stops[piece], lasts[owner]) - begin
    before = (stops - starts).cumsum() - (stops - starts)
    token = before[piece] + begin - starts[piece]
    feature = features.numpy()[owner, 0] + begin - firsts[owner]
    both = (np.stack([value, value + lengths], axis=1) for value in (token, feature))
    return dict(zip(names, map(torch.from_numpy, both), strict=True))
