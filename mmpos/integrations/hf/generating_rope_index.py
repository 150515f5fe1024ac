"""Replacement for ``get_rope_index`` of GLM-Image, including the ids of the images to generate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.library import infer_schema

from mmpos.errors import InvalidInputError
from mmpos.integrations.hf.token_types import (
    IMAGE,
    Ids,
    TokenTypes,
    check_tensors,
    ids_and_deltas,
    merge_grids,
    on_host,
    scan_tensors,
)
from mmpos.integrations.models.settings import generated, per_sample
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.rotary.memory import is_plain
from mmpos.rotary.operators import define_operator
from mmpos.schemes import MRopeTransformers
from mmpos.segments.kinds import PAD
from mmpos.segments.placeholders import Merging, Placeholders
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray
from mmpos.support.ragged import ragged_arange

__all__ = ["GeneratingRopeIndex"]

_MROPE = MRopeTransformers()
_MERGING = Merging(1, 1, frames_apart=False)


@dataclass(frozen=True)
class GeneratingRopeIndex:
    """Function with the same arguments and results as ``get_rope_index`` of GLM-Image.

    That method also computes the ids of the images to generate and stores them on the model; ``with_generated`` returns
    them instead.

    Args:
        image_start_token_id: token id of the marker before an image.
        image_end_token_id: token id of the marker after an image.
        model: model on which calls store the ids of the images to generate, to be read by its decoding steps; or None.
    """

    image_start_token_id: int
    image_end_token_id: int
    model: Any = field(default=None, repr=False, compare=False)

    def __call__(
        self,
        input_ids: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        images_per_sample: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Ids:
        """Compute the position ids of a batch; all deltas are 0.

        Args:
            input_ids: (batch, seq); every token between the markers of an image is a patch, whatever its id.
            image_grid_thw: (images, 3) frames (always 1), height and width in tokens. For each row of the batch, the
                images in its prompt come first, then the images to generate. None treats all tokens as text.
            images_per_sample: (batch,) number of images in each row; None if every row has all images.
            attention_mask: (batch, seq); tokens whose mask is not 1 are not counted and have the id 1. A mask of a
                different length is ignored.
            kwargs: ignored, as in Transformers.

        Returns:
            (3, batch, seq) position ids and (batch, 1) zeros, both with the dtype of input_ids.

        Raises:
            InvalidInputError: the grids do not match the images, or an argument has the wrong shape.
        """
        ids, ahead = self.with_generated(input_ids, image_grid_thw, images_per_sample, attention_mask)
        if self.model is not None:
            self.model._prefill_len, self.model._cached_decode_position_ids = ids[0].shape[2], ahead
        return ids

    def with_generated(
        self,
        input_ids: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        images_per_sample: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Ids, Tensor | None]:
        """Compute the ids of a batch and of the tokens to generate.

        Args:
            input_ids: as for ``__call__``.
            image_grid_thw: as for ``__call__``.
            images_per_sample: as for ``__call__``.
            attention_mask: as for ``__call__``.

        Returns:
            The result of ``__call__``, and (rows with grids, 3, steps) int64 ids: those of the patches of the images to
            generate, last grid first, and of the end marker after them; shorter rows repeat the ids of the end marker.
            The second result is None if there are no grids.
        """
        if isinstance(attention_mask, Tensor) and isinstance(input_ids, Tensor):
            attention_mask = attention_mask if attention_mask.shape[1:] == input_ids.shape[1:] else None
        tensors = check_tensors(
            input_ids=input_ids,
            image_grid_thw=image_grid_thw,
            images_per_sample=images_per_sample,
            attention_mask=attention_mask,
        )
        assert input_ids is not None, "checked above"
        compute = _compute if is_plain(*tensors) else _OPERATOR
        ids, ahead = compute(
            input_ids,
            image_grid_thw,
            images_per_sample,
            attention_mask,
            self.image_start_token_id,
            self.image_end_token_id,
        )
        deltas = input_ids.new_zeros((len(input_ids), 1))
        return (ids, deltas), None if image_grid_thw is None or not len(image_grid_thw) else ahead


def _compute(
    input_ids: Tensor,
    image_grid_thw: Tensor | None,
    images_per_sample: Tensor | None,
    attention_mask: Tensor | None,
    image_start_token_id: int,
    image_end_token_id: int,
) -> tuple[Tensor, Tensor]:
    markers = image_start_token_id, image_end_token_id
    prompts = _scanned(input_ids, image_grid_thw, images_per_sample, attention_mask, markers)
    if prompts is not None:
        positions = place(prompts.segments, _MROPE)
        ids, _ = ids_and_deltas(positions, input_ids)
        if attention_mask is not None and (prompts.segments.kind == PAD).any():
            ids.masked_fill_(attention_mask == 0, 1)
        return ids, torch.from_numpy(np.ascontiguousarray(_generated_ids(prompts, positions)))
    mask = None if attention_mask is None else attention_mask == 1
    types = torch.zeros_like(input_ids, dtype=torch.uint8)
    for kind, token in enumerate(markers, 1):
        types.masked_fill_(input_ids == token, kind)
    kinds, mask, grids, counts = on_host(types, mask, image_grid_thw, images_per_sample)
    tokens = TokenTypes.of(kinds, mask).packed()
    prompts = _matched(tokens, grids, counts)
    positions = place(prompts.segments, _MROPE)
    generated_ids = _generated_ids(prompts, positions)
    size = 3 * input_ids.numel()
    numbers = np.ones(size + generated_ids.size, np.int64)
    numbers[:size].reshape(3, -1)[:, tokens.packed_index] = positions.dense()
    numbers[size:] = generated_ids.ravel()
    copied = torch.from_numpy(numbers).to(input_ids.device, non_blocking=input_ids.device.type == "cuda")
    ids, ahead = copied.split([size, generated_ids.size])
    return ids.view(3, *input_ids.shape).to(input_ids.dtype), ahead.view(generated_ids.shape).clone()


class _Prompts(NamedTuple):
    """Prompts and all of their grids.

    Args:
        segments: the prompts, one document each.
        grid_thw: (grids, 3); for each prompt, the grids of its images come first, then the grids to generate.
        per_row: (documents,) number of grids for each prompt.
    """

    segments: SegmentTable
    grid_thw: IntArray
    per_row: IntArray


def _scanned(
    input_ids: Tensor,
    image_grid_thw: Tensor | None,
    images_per_sample: Tensor | None,
    attention_mask: Tensor | None,
    markers: tuple[int, int],
) -> _Prompts | None:
    """Build the prompts in a single pass in C over tokens on the host; return None for input unsupported in C."""
    grids = input_ids.new_zeros((0, 3), dtype=torch.int64) if image_grid_thw is None else image_grid_thw
    if not input_ids.is_cpu or grids.dtype != torch.int64 or grids.dim() != 2 or (grids[:, :1] != 1).any():
        return None
    counts = images_per_sample
    if counts is None:
        batch = len(input_ids)
        counts, grids = grids.new_full((batch,), len(grids)), grids.repeat(batch, 1)
    tokens = *Placeholders().tokens[:-2], *markers
    scanned = scan_tensors(input_ids, tokens, _MERGING, grids, None, attention_mask, counts)
    if scanned is None or (grids < 1).any():
        return None
    return _Prompts(scanned[0], grids.numpy(), counts.numpy())


def _matched(tokens: TokenTypes, grids: Tensor | None, counts: Tensor | None) -> _Prompts:
    """Build the prompts from packed token types: 1 marks the start of an image, and 2 its end."""
    assert tokens.cu_seqlens is not None, "packed"
    grid_thw = merge_grids("image_grid_thw", grids, np.ones(3, np.int64))
    grid_thw = np.zeros((0, 3), np.int64) if grid_thw is None else grid_thw
    if (grid_thw[:, 0] != 1).any():
        g = int((grid_thw[:, 0] != 1).argmax())
        raise InvalidInputError(f"image_grid_thw[{g}, 0]: got {grid_thw[g, 0]} frames, want 1")
    batch = tokens.cu_seqlens.size - 1
    if counts is None:
        counts, grid_thw = torch.full((batch,), len(grid_thw), device="cpu"), np.tile(grid_thw, (batch, 1))
    grid_thw, per_row = per_sample(grid_thw, counts.numpy(), batch)
    inside, images = _between_markers(tokens.types, tokens.cu_seqlens, per_row)
    owner, index = ragged_arange(per_row)
    sources = grid_thw[index < images[owner]]
    segments = SegmentTable.from_input_ids(inside, Placeholders(image=IMAGE), sources, cu_seqlens=tokens.cu_seqlens)
    return _Prompts(segments, grid_thw, per_row)


def _generated_ids(prompts: _Prompts, positions: PositionTable) -> IntArray:
    """Compute the (rows with grids, 3, steps) ids of the images to generate; shorter rows repeat their last ids."""
    segments, grid_thw, per_row = prompts
    ahead = place(generated(segments, grid_thw, per_row), _MROPE, positions.next_positions)
    has_grids = per_row > 0
    lengths, first = ahead.lengths[has_grids, None], ahead.cu_seqlens[:-1][has_grids, None]
    step = np.minimum(np.arange(lengths.max(initial=0)), lengths - 1) + first
    return ahead.dense(dtype=np.int64)[:, step].transpose(1, 0, 2)


def _between_markers(types: IntArray, cu_seqlens: IntArray, most: IntArray) -> tuple[IntArray, IntArray]:
    """Find the complete images in prompts, each between a marker of type 1 and a marker of type 2.

    Args:
        types: (tokens,) token types of a packed batch.
        cu_seqlens: (documents + 1,) first token of each document, then the total.
        most: (documents,) number of grids for each document, which is also the maximum number of its images.

    Returns:
        (tokens,) 1 inside images, else 0; and (documents,) the number of images.
    """
    starts, ends = (np.flatnonzero(types == kind) for kind in (1, 2))
    begun, ended = (np.searchsorted(at, cu_seqlens) for at in (starts, ends))
    images = np.minimum(np.diff(ended), most)
    owner, nth = ragged_arange(images)
    fits = np.diff(begun)[owner] > nth
    first = starts[np.where(fits, begun[:-1][owner] + nth, 0)] + 1 if starts.size else np.ones_like(owner)
    stop = ends[ended[:-1][owner] + nth]
    fits &= first <= stop
    fits[1:] &= first[1:] > stop[:-1]
    if not fits.all():
        d = int(owner[fits.argmin()])
        raise InvalidInputError(f"input_ids[{d}]: got image_end_token_id without image_start_token_id before it")
    change = np.zeros(types.size + 1, np.int64)
    change[first] += 1
    change[stop] -= 1
    return change.cumsum()[:-1], images


def _shapes(input_ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rows, steps = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
    ahead = input_ids.new_empty((rows, 3, steps), dtype=torch.int64)
    return input_ids.new_empty((3, *input_ids.shape)), ahead


_OPERATOR = define_operator("generating_rope_index" + infer_schema(_compute, mutates_args=()), _compute, _shapes)
