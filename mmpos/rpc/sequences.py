"""Sequences as messages: input_ids, shape, positions, patches, and what engines ask of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.rpc.fields import integers, path, put_integers, required
from mmpos.rpc.positions import get_result, put_result
from mmpos.rpc.queries import PositionsResult
from mmpos.rpc.tables import get_segments, put_segments
from mmpos.rpc.tensors import get_tensor, owned, put_tensor
from mmpos.rpc.v1 import sequences_pb2 as pb
from mmpos.segments.table import token_types
from mmpos.sequence.builder import InterleavedSequence
from mmpos.support.checks import INT32_MAX, counted

if TYPE_CHECKING:
    from mmpos.rpc.memory import Memory


def put_sequence(message: pb.Sequence, sequence: InterleavedSequence, memory: Memory | None = None) -> None:
    """Fill a message with a sequence; memory: as for ``put_tensor``."""
    narrow = sequence.input_ids.max(initial=0) <= INT32_MAX
    put_tensor(message.input_ids, sequence.input_ids.astype(np.int32) if narrow else sequence.input_ids, memory)
    put_segments(message.segments, sequence.segments)
    put_result(message.positions, PositionsResult.of(sequence.positions))
    if sequence.patches is not None:
        put_tensor(message.patches, sequence.patches, memory)
    put_integers(message.grid_thw, sequence.grid_thw)
    put_integers(message.image_spans, sequence.image_spans)
    put_integers(message.part_offsets, sequence.part_offsets)
    put_integers(message.image_margins, np.array(sequence.image_margins))
    message.image_hashes.extend(content_hash or "" for content_hash in sequence.image_hashes)


def get_sequence(
    name: str,
    message: pb.Sequence,
    hashes: Mapping[int, str] = MappingProxyType({}),
    memory: Memory | None = None,
) -> InterleavedSequence:
    """The sequence of a message.

    Args:
        name: of the field, for errors.
        message: the sequence.
        hashes: content hashes that are known better here, by index of the image.
        memory: as for ``get_tensor``.

    Raises:
        InvalidInputError: parts of the message do not fit each other.
    """
    segments = get_segments(path(name, "segments"), required(name, message, "segments"))
    positions = get_result(path(name, "positions"), required(name, message, "positions")).table
    input_ids = get_tensor(path(name, "input_ids"), message.input_ids, ("int32", "int64"), (1,), memory)
    if positions is None or not input_ids.size == positions.num_tokens == segments.num_tokens:
        got = None if positions is None else positions.num_tokens
        raise InvalidInputError(
            f"{path(name, 'input_ids')}: got {counted(input_ids.size, 'token')}, {segments.num_tokens} in segments and "
            f"{got} in positions, want the same"
        )
    patches = None
    if message.HasField("patches"):
        patches = owned(get_tensor(path(name, "patches"), message.patches, memory=memory))
    return InterleavedSequence(
        input_ids=input_ids.astype(np.int64),
        token_type_ids=token_types(segments),
        segments=segments,
        positions=positions,
        patches=patches,
        grid_thw=integers(message.grid_thw, columns=3, name=path(name, "grid_thw")),
        image_spans=integers(message.image_spans, columns=2, name=path(name, "image_spans")),
        image_hashes=tuple(hashes.get(i, found or None) for i, found in enumerate(message.image_hashes)),
        part_offsets=integers(message.part_offsets),
        image_margins=_margins(path(name, "image_margins"), message.image_margins),
    )


def _margins(name: str, numbers: Sequence[int]) -> tuple[int, int]:
    """Markers before and after an image, each one or none."""
    if not numbers:  # of a server that knows no others
        return (1, 1)
    if len(numbers) != 2 or not {0, 1}.issuperset(numbers):
        raise InvalidInputError(f"{name}: got {list(numbers)[:8]}, want two numbers of 0 and 1")
    return numbers[0], numbers[1]
