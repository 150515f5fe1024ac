"""Conversion of documents (text, token ids, images) and the sequences built from them to messages and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mmpos.errors import InvalidInputError, MmposError
from mmpos.images import ImageSize
from mmpos.images.decode import open_source
from mmpos.rpc.beside import Beside
from mmpos.rpc.positions import get_result, get_segments, put_each_result, put_each_segments
from mmpos.rpc.tensors import (
    chosen,
    get_rational,
    get_tensor,
    integers,
    owned,
    path,
    put_rational,
    put_tensor,
    required,
)
from mmpos.rpc.v1 import sequences_pb2 as pb
from mmpos.segments.kinds import Audio, Clip, Grid
from mmpos.sequence.builder import Contents, InterleavedSequence, PlacedDocuments, is_ids
from mmpos.sequence.video import plain_parts, refuse_crop
from mmpos.support.checks import INT32_MAX, counted, int_array, naming, text


@dataclass(frozen=True)
class Sent:
    """Record of how a document was sent, needed to read the server's answer.

    Args:
        hashes: content hashes by index among the document's images, for images whose pixels do not determine the hash.
        origins: index of the caller's part for each sent part, since a Video is sent as texts and images.
        names: name of each sent part in errors.
        error: error of the first part that cannot be sent; a server may still find errors in the parts before it.
    """

    hashes: dict[int, str] = field(default_factory=dict)
    origins: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    error: MmposError | None = None


def put_parts(message: pb.Document, parts: object, beside: Beside | None = None) -> Sent:
    """Fill a message with parts for SequenceBuilder.build, up to the first one that cannot be sent.

    A path is sent as the bytes of the file, an image without a file as its upright pixels, and a Video as its plain
    parts; see ``put_tensor`` for beside. ``Sent.error`` is the error that SequenceBuilder.build would raise.
    """
    if not isinstance(parts, list | tuple):
        return Sent(error=InvalidInputError(f"parts: got {type(parts).__name__}, want a list of parts"))
    sent, images = Sent(), 0
    for origin, name, part in plain_parts(parts):
        entry = message.parts.add()
        try:
            is_image, content_hash = _put_part(name, entry, part, beside)
        except MmposError as error:
            del message.parts[-1]
            return replace(sent, error=error)
        if content_hash is not None:
            sent.hashes[images] = content_hash
        images += is_image
        sent.origins.append(origin)
        sent.names.append(name)
    return sent


def get_parts(name: str, message: pb.Document, beside: Beside | None = None) -> list[object]:
    """Read the parts of a document for SequenceBuilder.build; see ``get_tensor`` for beside."""
    return [_get_part(path(name, f"parts[{i}]"), part, beside) for i, part in enumerate(message.parts)]


def _put_part(name: str, entry: pb.Part, part: object, beside: Beside | None) -> tuple[bool, str | None]:
    """Fill a part; return whether it is an image, and its content hash if its pixels do not determine it."""
    if isinstance(part, str):
        entry.text = text(name, part)
    elif is_ids(part):
        put_tensor(entry.token_ids, int_array(name, part, (None,)), beside)
    elif isinstance(part, Audio):
        entry.audio = part.length
    else:
        refuse_crop(name, part)
        with naming(name):
            return True, _put_image(entry, part, beside)
    return False, None


def _put_image(entry: pb.Part, image: object, beside: Beside | None) -> str | None:
    if isinstance(image, ImageSize):
        entry.image_size.height, entry.image_size.width = image
    elif isinstance(image, Grid):
        _put_sizes(entry.grid, image)
    elif isinstance(image, Clip):
        _put_sizes(entry.clip, image)
    elif isinstance(image, bytes | bytearray | memoryview):
        entry.image = bytes(image)
    elif isinstance(image, os.PathLike):
        entry.image = _file(image)
    else:
        with open_source(image) as source:
            _ = source.size  # raises an error for an image without pixels
            samples, content_hash = source.read("pillow")
        put_tensor(entry.pixels, np.asarray(samples), beside)
        return content_hash
    return None


def _put_sizes(message: pb.Grid | pb.Clip, segment: Grid | Clip) -> None:
    for each in message.DESCRIPTOR.fields:
        value = getattr(segment, each.name)
        if isinstance(value, Fraction):
            put_rational(message.seconds_per_frame, value)
        elif value is not None:
            setattr(message, each.name, value)


def _file(image: os.PathLike[str]) -> bytes:
    try:
        return Path(image).read_bytes()
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"image: got {os.fspath(image)!r}, want a file that can be read ({error})") from error


def _get_part(name: str, part: pb.Part, beside: Beside | None) -> object:
    kind = part.WhichOneof("content") or chosen(name, part, "content")
    value = getattr(part, kind)
    if kind == "token_ids":
        return get_tensor(path(name, kind), value, ("int32", "int64"), (1,), beside)
    if kind == "pixels":
        return get_tensor(path(name, kind), value, ("uint8", "uint16"), (2, 3), beside)
    if kind == "image_size":
        return ImageSize(*(_side(f"{name}.image_size.{side}", getattr(value, side)) for side in ("height", "width")))
    if kind == "audio":
        with naming(name):
            return Audio(value)
    if kind not in ("grid", "clip"):
        return value
    needed = ("height", "width") if kind == "grid" else ("height", "width", "frames", "audio")
    sizes: dict[str, Any] = dict.fromkeys(needed, 0) | {each.name: number for each, number in value.ListFields()}
    if "seconds_per_frame" in sizes:
        sizes["seconds_per_frame"] = get_rational(f"{name}.{kind}.seconds_per_frame", value.seconds_per_frame)
    with naming(path(name, kind)):
        return (Grid if kind == "grid" else Clip)(**sizes)


def _side(name: str, value: int) -> int:
    if not 1 <= value <= INT32_MAX:
        raise InvalidInputError(f"{name}: got {value}, want 1 to {INT32_MAX}")
    return value


def put_sequence(message: pb.Sequence, sequence: InterleavedSequence, beside: Beside | None = None) -> None:
    """Fill a message with a sequence; see ``put_tensor`` for beside."""
    put_sequences([message], [sequence], sequence, beside)


def put_sequences(
    messages: Sequence[pb.Sequence],
    documents: Sequence[Contents | InterleavedSequence],
    placed: PlacedDocuments | InterleavedSequence,
    beside: Beside | None = None,
) -> None:
    """Fill a message with each of several documents that were placed together; see ``put_tensor`` for beside."""
    ids, stops = placed.input_ids, placed.positions.cu_seqlens.tolist()
    if ids.max(initial=0) <= INT32_MAX:
        ids = ids.astype(np.int32)
    put_each_segments([message.segments for message in messages], placed.segments, range(len(stops)))
    put_each_result([message.positions for message in messages], placed.positions)
    for message, own, begin, stop in zip(messages, documents, stops[:-1], stops[1:], strict=True):
        put_tensor(message.input_ids, ids[begin:stop], beside)
        if own.patches is not None:
            put_tensor(message.patches, own.patches, beside)
        if len(own.grid_thw):
            message.grid_thw.extend(chain.from_iterable(own.grid_thw))
            message.image_spans.extend(chain.from_iterable(own.image_spans))
            message.image_hashes.extend(content_hash or "" for content_hash in own.image_hashes)
        message.part_offsets.extend(own.part_offsets)
        message.image_margins.extend(own.image_margins)
        message.audio_margins.extend(own.audio_margins)


def get_sequence(
    name: str, message: pb.Sequence, hashes: Mapping[int, str] = MappingProxyType({}), beside: Beside | None = None
) -> InterleavedSequence:
    """Read the sequence from a message; see ``get_tensor`` for beside.

    By index of the image, ``hashes`` replace the content hashes of the message.

    Raises:
        InvalidInputError: the parts of the message contradict one another.
    """
    segments = get_segments(path(name, "segments"), required(name, message, "segments"))
    positions = get_result(path(name, "positions"), required(name, message, "positions")).table
    input_ids = get_tensor(path(name, "input_ids"), message.input_ids, ("int32", "int64"), (1,), beside)
    if positions is None or not input_ids.size == positions.num_tokens == segments.num_tokens:
        got = None if positions is None else positions.num_tokens
        raise InvalidInputError(
            f"{path(name, 'input_ids')}: got {counted(input_ids.size, 'token')}, {segments.num_tokens} in segments and "
            f"{got} in positions, want equal numbers"
        )
    patches = None
    if message.HasField("patches"):
        patches = owned(get_tensor(path(name, "patches"), message.patches, beside=beside))
    return InterleavedSequence(
        input_ids=input_ids.astype(np.int64),
        token_type_ids=positions.token_types(segments),
        segments=segments,
        positions=positions,
        patches=patches,
        grid_thw=integers(message.grid_thw, columns=3, name=path(name, "grid_thw")),
        image_spans=integers(message.image_spans, columns=2, name=path(name, "image_spans")),
        image_hashes=tuple(hashes.get(i, content_hash or None) for i, content_hash in enumerate(message.image_hashes)),
        part_offsets=integers(message.part_offsets),
        image_margins=_margins(path(name, "image_margins"), message.image_margins, (1, 1)),
        audio_margins=_margins(path(name, "audio_margins"), message.audio_margins, (0, 0)),
    )


def _margins(name: str, numbers: Sequence[int], default: tuple[int, int]) -> tuple[int, int]:
    """Read the numbers of markers before and after an image or audio, 0 or 1 each."""
    if not numbers:  # the server does not have this field
        return default
    if len(numbers) != 2 or not {0, 1}.issuperset(numbers):
        raise InvalidInputError(f"{name}: got {list(numbers)[:8]}, want two numbers of 0 and 1")
    return numbers[0], numbers[1]
