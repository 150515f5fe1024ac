"""Keys of a prefix cache: one for each full block of tokens, equal where all that decides its K and V is equal."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.positions.block_contents import Blocks, Bytes, contents
from mmpos.positions.table import PositionTable
from mmpos.segments.parts import GRID, PAD
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import INT32_MAX, IntArray, counted, int_array, integer, text

__all__ = ["block_keys"]

_ROOT = b"mmpos.block_keys 1"
"""What every chain starts with; the number changes with what a key is made of."""

_KEY_BYTES = sha256().digest_size


def block_keys(
    segments: SegmentTable,
    positions: PositionTable,
    block_size: int,
    *,
    input_ids: npt.ArrayLike | None = None,
    image_hashes: Sequence[str | bytes] | None = None,
    salt: str | bytes = b"",
    known: Sequence[Sequence[bytes]] | None = None,
) -> list[list[bytes]]:
    """One key for each full block of each document, each hashed with the key before it.

    Two keys are equal exactly if these are, for every token up to the block's end: its position; the grid that it lies
    in, if any, with its place there and the frames, height and width of the whole grid, also of one that the block
    cuts; its id and the content of its grid, if they are given. What comes after the block does not count, nor how text
    is cut into segments, nor the name of the scheme.

    >>> from mmpos.positions.place import place
    >>> from mmpos.segments import Grid, Text
    >>> low, high = (SegmentTable.from_documents([[Text(4), Grid(rows, 2)]]) for rows in (2, 3))
    >>> (a,), (b,) = (block_keys(segments, place(segments, "mrope"), 4) for segments in (low, high))
    >>> a[0] == b[0], a[1] == b[1]
    (True, False)

    Args:
        segments: the documents.
        positions: their table; tokens past the end of a document are text, as ``window`` makes them.
        block_size: tokens of a block.
        input_ids: (tokens,) of the whole table; None for an engine that hashes them itself and adds our key, a key of
            places, to what it hashes of a block.
        image_hashes: of the content of each grid, in order; None for an engine that hashes that itself, too.
        salt: tells caches apart that must not share blocks: of models, adapters or tenants.
        known: keys of the first blocks of each document, which are not computed again; the salt is in them already.

    Returns:
        for each document a new list of 32 bytes (SHA-256) per full block.

    Raises:
        InvalidInputError: tables, ids or hashes that do not fit each other; padding, which no paged cache holds.
    """
    size = integer("block_size", block_size, minimum=1, maximum=INT32_MAX)
    _check_tables(segments, positions)
    ids = None if input_ids is None else int_array("input_ids", input_ids, (positions.num_tokens,))
    digests = None if image_hashes is None else _digests(image_hashes, int((segments.kind == GRID).sum()))
    full = positions.lengths // size
    found = _known(known, full)
    blocks = Blocks(size, np.array([len(keys) for keys in found], np.int64), full)
    if not blocks.counts.any():
        return found
    settings = struct.pack("<4q", size, positions.axes, ids is not None, digests is not None)
    root = sha256(_ROOT + settings + _encoded("salt", salt)).digest()
    hashed = contents(segments, positions, ids, digests, blocks)
    for keys, count in zip(found, blocks.counts.tolist(), strict=True):
        key = keys[-1] if keys else root
        for _ in range(count):
            key = sha256(key + next(hashed)).digest()
            keys.append(key)
    return found


def _check_tables(segments: SegmentTable, positions: PositionTable) -> None:
    if not isinstance(segments, SegmentTable):
        raise InvalidInputError(f"segments: got {type(segments).__name__}, want a SegmentTable")
    if not isinstance(positions, PositionTable):
        raise InvalidInputError(f"positions: got {type(positions).__name__}, want a PositionTable")
    if positions.num_documents != segments.num_documents:
        got, want = positions.num_documents, segments.num_documents
        raise InvalidInputError(f"positions: got {counted(got, 'document')}, want {want} as in segments")
    for name, padding in (("segments", segments.kind == PAD), ("positions", positions.is_padding)):
        if padding.any():
            raise InvalidInputError(f"{name}: got padding in segment {padding.argmax()}, want documents without")
    tokens = np.zeros(segments.kind.size + 1, np.int64)
    segments.lengths.cumsum(out=tokens[1:])
    lengths = np.diff(tokens[segments.segment_offsets])
    short = positions.lengths < lengths
    if short.any():
        d = int(short.argmax())
        got, want = positions.lengths[d], lengths[d]
        raise InvalidInputError(f"positions: got {got} tokens in document {d}, want at least {want} as in segments")


def _digests(image_hashes: Sequence[str | bytes], grids: int) -> Bytes:
    """(grids, 32) hashes of whatever the caller names contents by."""
    listed = _listed("image_hashes", image_hashes)
    if len(listed) != grids:
        raise InvalidInputError(f"image_hashes: got {len(listed)}, want {grids}, one per grid")
    named = [_encoded(f"image_hashes[{i}]", name) for i, name in enumerate(listed)]
    if not all(named):
        raise InvalidInputError(f"image_hashes[{named.index(b'')}]: got nothing, want a hash of the content")
    return np.frombuffer(b"".join(sha256(name).digest() for name in named), np.uint8).reshape(grids, _KEY_BYTES)


def _encoded(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(name, value).encode()
    if not isinstance(value, bytes):
        raise InvalidInputError(f"{name}: got {value!r}, want str or bytes")
    return value


def _known(known: Sequence[Sequence[bytes]] | None, full: IntArray) -> list[list[bytes]]:
    """A new list of the keys that are there, for each document."""
    if known is None:
        return [[] for _ in range(full.size)]
    found = [_listed(f"known[{d}]", keys) for d, keys in enumerate(_listed("known", known))]
    if len(found) != full.size:
        raise InvalidInputError(f"known: got lists for {counted(len(found), 'document')}, want {full.size}")
    for d, keys in enumerate(found):
        if len(keys) > full[d]:
            raise InvalidInputError(f"known[{d}]: got {len(keys)} keys, want at most {full[d]}, one per full block")
        for i, key in enumerate(keys):
            if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
                raise InvalidInputError(f"known[{d}][{i}]: got {key!r}, want {_KEY_BYTES} bytes")
    return found


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidInputError(f"{name}: got {type(values).__name__}, want a list")
    return list(values)
