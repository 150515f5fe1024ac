"""What a training step takes: the tensors of a batch beside the one table that its positions follow from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.data.masks import MaskMod, mask_mod, whole_images
from mmpos.data.ranks import PER_TOKEN, shard, shift_labels
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.table import Layout, PositionTable
from mmpos.rotary.device import DevicePositions
from mmpos.support.checks import IntArray, boolean, counted, one_of

__all__ = ["Batch"]

_PER_BATCH = ("device_positions", "cu_seqlens", "patches", "grid_thw", "image_spans", "feature_spans")


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents packed in one row, or padded to rows of one length; all numbers but pixels are integers.

    Nothing here changes under FSDP2's mixed precision, which casts floating tensors: positions travel as the
    integers of their table, also where ids are fractions.

    Args:
        keys: id of every document's record; the parts of a split document have the same.
        positions: the table, on the host.
        device_positions: the same as a small tensor, for ``apply_rotary``; moves with the batch.
        input_ids: (tokens,) packed or (batch, seq) padded, int64.
        labels: likewise; IGNORE_INDEX where a token is not trained on, on padding, and on the first token of
            every document, which nothing predicts.
        text_positions: likewise, int32: tokens counted from the first of each document, as if all were text. They
            go on through padding after a document and are 0 before one.
        cu_seqlens: (documents + 1,) int32 first token of each document, its padding included, then the total.
        attention_mask: (batch, seq) int64, 0 on padding; None if packed.
        patches: (patches, patch_size, patch_size, 3) pixels of all images; None without pixels.
        grid_thw: (images, 3) int64 frames, height, width after merging.
        image_spans: (spans, 2) int64 first token of each image's patches and one past the last, in columns of
            ``positions.dense()``, which are places in ``input_ids.view(-1)``. Of each row of an image whose rows end in
            separators, which are no patches; in a shard, of each piece of an image or a row.
        feature_spans: (spans, 2) int64 the rows that belong there of what a vision encoder makes of the patches:
            one row per token of grid_thw.
        shifted: whether labels stand at the token that predicts them; see ``shift_labels``.
        world_size: context-parallel ranks that share the batch; 1 for a whole batch.
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

    def __post_init__(self) -> None:
        shape = tuple(self.input_ids.shape)
        if self.input_ids.numel() != self.positions.num_tokens:
            got, want = self.input_ids.numel(), self.positions.num_tokens
            raise InvalidInputError(f"input_ids: got {counted(got, 'token')}, want {want} as in positions")
        for name in PER_TOKEN:
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise InvalidInputError(f"{name}: got shape {tuple(tensor.shape)}, want {shape}, that of input_ids")
        if len(self.image_spans) != len(self.feature_spans):
            got, want = len(self.feature_spans), len(self.image_spans)
            raise InvalidInputError(f"feature_spans: got {got} spans, want {want} as in image_spans")

    @classmethod
    def from_arrays(
        cls,
        keys: tuple[str, ...],
        positions: PositionTable,
        *,
        input_ids: IntArray,
        labels: IntArray,
        text_positions: npt.NDArray[np.int32],
        grid_thw: IntArray,
        image_spans: IntArray,
        attention_mask: IntArray | None = None,
        patches: npt.NDArray[Any] | None = None,
    ) -> Batch:
        """A batch on the host that shares memory with these arrays; the arguments are those of the class."""
        ends = np.cumsum(image_spans[:, 1] - image_spans[:, 0])
        firsts = np.append(0, ends[:-1])[: len(ends)]
        return cls(
            keys,
            positions,
            DevicePositions.from_table(positions),
            torch.from_numpy(input_ids),
            torch.from_numpy(labels),
            torch.from_numpy(text_positions),
            torch.from_numpy(positions.cu_seqlens),
            None if attention_mask is None else torch.from_numpy(attention_mask),
            None if patches is None else torch.from_numpy(patches),
            torch.from_numpy(grid_thw),
            torch.from_numpy(image_spans),
            torch.from_numpy(np.stack([firsts, ends], axis=1)),
        )

    @property
    def packed(self) -> bool:
        """Whether documents follow each other in one row."""
        return self.input_ids.dim() == 1

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document, padding included."""
        return self.positions.max_seqlen

    @property
    def fill(self) -> float:
        """Tokens that are no padding over all tokens."""
        padding = int(self.positions.segment_lengths[self.positions.is_padding].sum())
        return 1 - padding / self.positions.num_tokens

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.input_ids.device

    def position_ids(self, dtype: torch.dtype | None = None, text_row: bool = False) -> Tensor:
        """Ids of all tokens, made where the batch lies.

        Args:
            dtype: int32 (default), int64 or float64; fractional schemes give float64 only.
            text_row: whether text_positions come first, as one more row: what Transformers takes, [4, batch, seq] for
                schemes of three axes, and finds the documents of a packed row by.

        Returns:
            (axes, tokens) or (axes, batch, seq), with text_row one row more.
        """
        kinds = (torch.float64,) if self.positions.fractional else (torch.int32, torch.int64, torch.float64)
        kind = one_of("dtype", kinds[0] if dtype is None else dtype, kinds)
        ids = self.device_positions.dense().to(kind).reshape(-1, *self.input_ids.shape)
        return torch.cat([self.text_positions[None].to(kind), ids]) if boolean("text_row", text_row) else ids

    def mask_mod(self, *, bidirectional_images: bool = False) -> MaskMod:
        """The FlexAttention mask of this batch, on its device; see ``mmpos.data.masks.mask_mod``.

        Args:
            bidirectional_images: whether tokens from the first patch of an image to its last see one another both
                ways, separators between rows included.

        Raises:
            UnsupportedError: a shard, whose tokens see those of other ranks too.
        """
        if self.world_size > 1:
            raise UnsupportedError("mask_mod: got a context-parallel shard, want the mask of the whole batch")
        spans = None
        if boolean("bidirectional_images", bidirectional_images):
            spans = whole_images(self.image_spans, self.feature_spans, self.grid_thw)
        return mask_mod(self.positions, padded=not self.packed, image_spans=spans, device=self.device)

    def image_tokens(self) -> tuple[Tensor, Tensor]:
        """Where features of images go: ``embeddings.view(-1, channels)[tokens] = features[rows]``.

        Returns:
            (patch tokens,) int64 places in ``input_ids.view(-1)``, and the row of each; on a GPU this waits for it.
        """
        firsts, lengths = self.image_spans[:, 0], self.image_spans[:, 1] - self.image_spans[:, 0]
        before = lengths.cumsum(0) - lengths
        token = torch.repeat_interleave(firsts - before, lengths)
        counter = torch.arange(len(token), device=self.device)
        return token + counter, torch.repeat_interleave(self.feature_spans[:, 0] - before, lengths) + counter

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        """The batch on another device; ``positions`` stays on the host."""
        return self._each(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; a DataLoader with pin_memory=True calls this."""
        return self._each(lambda value: value.pin_memory())

    def shift_labels(self) -> Batch:
        """Labels moved to the token that predicts them, one to the left in each document; once only.

        A model that computes its own loss shifts labels itself and takes them unshifted. It cannot do so in a
        shard, whose neighbours lie elsewhere: there, compare logits and labels token by token.
        """
        return shift_labels(self)

    def shard(self, rank: int, world_size: int, layout: Layout = "zigzag") -> Batch:
        """What a context-parallel rank has of the batch: its tokens, and labels shifted before the cut.

        Patches and grid_thw stay whole, since an image may lie on several ranks; feature_spans say which rows of the
        features belong to the tokens here. cu_seqlens counts the tokens here. Shard on the host, before ``to``.

        Args:
            rank: 0 to world_size − 1.
            world_size: context-parallel ranks C.
            layout: "zigzag" or "contiguous", and for a packed batch "zigzag-sequence" or "contiguous-sequence"; see
                PositionTable.shard.

        Raises:
            InvalidInputError: a document is no multiple of 2C (zigzag) or C tokens; collate with multiple_of.
            UnsupportedError: "…-sequence" of a padded batch, whose rows would not stay rows.
        """
        return shard(self, rank, world_size, layout)

    def as_dict(
        self, positions: Literal["ids", "table"] = "ids", *, text_row: bool = False, batched: bool = False
    ) -> dict[str, Any]:
        """Keyword arguments for a model or a trainer; what is None is left out.

        Args:
            positions: "ids" gives position_ids, int64; "table" gives positions, a DevicePositions for ``apply_rotary``.
            text_row: as for ``position_ids``.
            batched: whether a packed batch gets a batch dimension of 1, as Transformers wants.

        Returns:
            input_ids, labels, cu_seqlens, max_seqlen, grid_thw, image_spans, feature_spans, and where there are any
            attention_mask and patches. Shifted labels are shift_labels too, which keeps Transformers' losses from
            shifting them again.

        Raises:
            UnsupportedError: ids that may be fractions, which mixed precision would round.
        """
        one_of("positions", positions, ("ids", "table"))
        add = boolean("batched", batched) and self.packed
        found: dict[str, Any] = {"input_ids": self.input_ids, "labels": self.labels}
        if self.shifted:
            found["shift_labels"] = self.labels
        if positions == "ids":
            if self.positions.fractional:
                raise UnsupportedError(
                    "positions: got 'ids' of a fractional scheme, want 'table': mixed precision rounds"
                )
            found["position_ids"] = self.position_ids(torch.int64, text_row)
        if add:
            found = {name: tensor.unsqueeze(-2) for name, tensor in found.items()}
        if positions == "table":
            found["positions"] = self.device_positions
        names = ("cu_seqlens", "max_seqlen", "attention_mask", "patches", "grid_thw", "image_spans", "feature_spans")
        return found | {name: value for name in names if (value := getattr(self, name)) is not None}

    def _each(self, move: Callable[[Any], Any]) -> Batch:
        names = PER_TOKEN + _PER_BATCH
        return replace(self, **{name: move(value) for name in names if (value := getattr(self, name)) is not None})

    def __repr__(self) -> str:
        kind = "packed" if self.packed else "padded"
        positions = self.positions
        documents, tokens = counted(positions.num_documents, "document"), counted(positions.num_tokens, "token")
        images = counted(len(self.grid_thw), "image")
        return f"Batch({kind}, {documents}, {tokens}, {images}, fill={self.fill:.3f}, device={self.device})"
