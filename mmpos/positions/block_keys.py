"""Prefix-cache keys: one per full block of tokens, equal if and only if the inputs of the block's K and V are equal."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN
from mmpos.segments.kinds import CLIP, GRID, NOUNS, PAD, TEXT
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import INT32_MAX, Array, IntArray, counted, int_array, integer, text
from mmpos.support.ragged import ragged_arange

__all__ = ["block_keys"]

_T = TypeVar("_T")


_ROOT = b"mmpos.block_keys 1"
"""Start of every chain; its version number changes with the content of keys."""

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
    """Compute a key for each full block of each document by hashing the block with the key before it.

    Two keys are equal if and only if the following are equal for every token up to the end of the block: its position;
    its grid, if any, with its row and column and the frames, height and width of the whole grid, even if the block
    contains only part of it; its token id, if there are input_ids; and the content of its grid, if there are
    image_hashes. Keys do not depend on tokens after the block, how text is split into segments, or the scheme's name.

    >>> from mmpos.positions.place import place
    >>> from mmpos.segments import Grid, Text
    >>> low, high = (SegmentTable.from_documents([[Text(4), Grid(rows, 2)]]) for rows in (2, 3))
    >>> (a,), (b,) = (block_keys(segments, place(segments, "mrope"), 4) for segments in (low, high))
    >>> a[0] == b[0], a[1] == b[1]
    (True, False)

    Args:
        segments: segments of the documents.
        positions: their position table; tokens past the end of a document are text (see ``window``).
        block_size: number of tokens in a block.
        input_ids: (tokens,) token ids of the whole table; None for an engine that hashes token ids itself and adds this
            key to its own hash of the block.
        image_hashes: content hash of each grid, audio run, clip, thumbnail and tile, in order; None for an engine that
            hashes the content itself as well.
        salt: value that separates caches that must not share blocks, for example between models, adapters or tenants.
        known: keys of the first blocks of each document, which are not computed again; they already contain the salt.

    Returns:
        For each document, a new list with 32 bytes (SHA-256) per full block.

    Raises:
        InvalidInputError: tables, ids or hashes do not match, or the table has padding.
    """
    size = integer("block_size", block_size, minimum=1, maximum=INT32_MAX)
    _check_tables(segments, positions)
    ids = None if input_ids is None else int_array("input_ids", input_ids, (positions.num_tokens,))
    digests = None if image_hashes is None else _digests(image_hashes, segments.kind[_with_content(segments)])
    full = positions.lengths // size
    chains = _checked_chains(known, full)
    known_blocks = np.array([len(keys) for keys in chains], np.int64)
    counts = full - known_blocks
    if not counts.any():
        return chains
    settings = struct.pack("<4q", size, positions.axes, ids is not None, digests is not None)
    root = sha256(_ROOT + settings + _encoded("salt", salt)).digest()
    hashed = _contents(segments, positions, ids, digests, size, known_blocks, full)
    for keys, count in zip(chains, counts.tolist(), strict=True):
        key = keys[-1] if keys else root
        for _ in range(count):
            key = sha256(key + next(hashed)).digest()
            keys.append(key)
    return chains


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
            raise InvalidInputError(
                f"{name}: got padding in segment {padding.argmax()}, want documents without padding"
            )
    tokens = np.zeros(segments.kind.size + 1, np.int64)
    segments.lengths.cumsum(out=tokens[1:])
    lengths = np.diff(tokens[segments.segment_offsets])
    short = positions.lengths < lengths
    if short.any():
        d = int(short.argmax())
        got, want = positions.lengths[d], lengths[d]
        raise InvalidInputError(f"positions: got {got} tokens in document {d}, want at least {want} as in segments")


def _digests(image_hashes: Sequence[str | bytes], kinds: npt.NDArray[np.uint8]) -> Bytes:
    """Hash the content hashes of segments, given as str or bytes, to (segments, 32) bytes."""
    listed = _listed("image_hashes", image_hashes)
    if len(listed) != kinds.size:
        nouns = [noun for kind, noun in NOUNS.items() if kind in kinds] or ["grid"]
        want = f"{kinds.size}, one per {' and '.join(nouns)}"
        raise InvalidInputError(f"image_hashes: got {len(listed)}, want {want}")
    named = [_encoded(f"image_hashes[{i}]", name) for i, name in enumerate(listed)]
    if not all(named):
        raise InvalidInputError(f"image_hashes[{named.index(b'')}]: got nothing, want a hash of the content")
    return np.frombuffer(b"".join(sha256(name).digest() for name in named), np.uint8).reshape(kinds.size, _KEY_BYTES)


def _encoded(name: str, value: object) -> bytes:
    if isinstance(value, str):
        return text(name, value).encode()
    if not isinstance(value, bytes):
        raise InvalidInputError(f"{name}: got {value!r}, want str or bytes")
    return value


def _checked_chains(known: Sequence[Sequence[bytes]] | None, full: IntArray) -> list[list[bytes]]:
    """Copy the known keys of each document into a new list."""
    if known is None:
        return [[] for _ in range(full.size)]
    chains = [_listed(f"known[{d}]", keys) for d, keys in enumerate(_listed("known", known))]
    if len(chains) != full.size:
        raise InvalidInputError(f"known: got lists for {counted(len(chains), 'document')}, want {full.size}")
    for d, keys in enumerate(chains):
        if len(keys) > full[d]:
            raise InvalidInputError(f"known[{d}]: got {len(keys)} keys, want at most {full[d]}, one per full block")
        for i, key in enumerate(keys):
            if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
                raise InvalidInputError(f"known[{d}][{i}]: got {key!r}, want {_KEY_BYTES} bytes")
    return chains


def _listed(name: str, values: Iterable[_T]) -> list[_T]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidInputError(f"{name}: got {type(values).__name__}, want a list")
    return list(values)


Bytes = npt.NDArray[np.uint8]


def _contents(
    segments: SegmentTable,
    positions: PositionTable,
    ids: IntArray | None,
    digests: Bytes | None,
    size: int,
    first: IntArray,
    stop: IntArray,
) -> Iterator[bytes]:
    """Yield the bytes to hash for each block, identical on every machine.

    Little-endian, in this order: positions rounded down, (axes, tokens) int32; ids, (tokens,) int64, if given; two
    int64: 1 if any position is a fraction, else 0, and the number of grids; fractions in units of 2⁻⁶², (axes, tokens)
    int64, if there are any; for each grid, five int64: its first token relative to the block's first, frames, height,
    width, and 1 if its rows end in separators, else 0, or its kind if that is audio, a clip, a thumbnail or a tile (for
    the last three, the number of extra tokens follows); then the 32 bytes of its digest, if given. The numbers
    determine the length of the rest, so different blocks have different bytes.

    Args:
        segments: the documents.
        positions: their position table.
        ids: (tokens,) ids of the table.
        digests: (grids, 32) digest of the content of each grid.
        size: number of tokens in a block.
        first: (documents,) first requested block of each document.
        stop: (documents,) one past the last requested block; at least one block in total.
    """
    counts = stop - first
    count = int(counts.sum())
    starts = positions.documents[FIRST_TOKEN] + first * size
    wanted = positions.take(starts, starts + counts * size)
    whole, fractions = _split(wanted)
    pieces = [_by_block(whole.astype("<i4"), count)]
    if ids is not None:
        _, tokens = ragged_arange(wanted.lengths, starts)
        pieces.append(_by_block(ids[None, tokens].astype("<i8"), count))
    fixed, fine = np.concatenate(pieces, axis=1), _by_block(fractions.astype("<i8"), count)
    fractional: list[bool] = np.any(fine, axis=1).tolist()
    for b, (grids, entries) in enumerate(zip(*_grids_in(segments, digests, size, first, stop), strict=True)):
        rest = fine[b].tobytes() if fractional[b] else b""
        yield fixed[b].tobytes() + struct.pack("<2q", fractional[b], grids) + rest + entries


def _split(positions: PositionTable) -> tuple[Array, IntArray]:
    """Split the ids of all tokens into whole numbers and fractions, independently of how the table stores them."""
    if not positions.fractional:
        return positions.dense(), np.zeros((0, positions.num_tokens), np.int64)
    numerators, denominators = positions.rationals()
    whole, rest = np.divmod(numerators, denominators)
    # 62 bits distinguish any two fractions with denominators below 2**31; two steps stay within 64 bits.
    high, rest = np.divmod(rest << 31, denominators)
    return whole, (high << 31) + (rest << 31) // denominators


def _by_block(values: Array, count: int) -> Bytes:
    """Convert (rows, tokens) numbers to (blocks, bytes), with the rows of each block one after another."""
    rows = values.reshape(len(values), count, values.shape[1] // count).transpose(1, 0, 2)
    return np.ascontiguousarray(rows.reshape(count, -1)).view(np.uint8)


def _grids_in(
    segments: SegmentTable, digests: Bytes | None, size: int, first: IntArray, stop: IntArray
) -> tuple[list[int], list[bytes]]:
    """Count the grids with a token in each requested block, and return the bytes that they contribute to its key."""
    count = int((stop - first).sum())
    grids, entries = [0] * count, [b""] * count
    lengths, offsets = segments.lengths, segments.segment_offsets
    before = lengths.cumsum() - lengths
    (grid,) = _with_content(segments).nonzero()
    document = offsets.searchsorted(grid, side="right") - 1
    starts = before[grid] - before[offsets[document]]
    shift = ((stop - first).cumsum() - stop).tolist()  # from block numbers in a document to those in all documents
    for i, (s, d, start) in enumerate(zip(grid.tolist(), document.tolist(), starts.tolist(), strict=True)):
        separated = segments.row_separator is not None and bool(segments.row_separator[s])
        kind = int(segments.kind[s])
        entry = struct.pack("<4q", *segments.extents[:, s], separated if kind == GRID else kind)
        if kind >= CLIP:
            entry += struct.pack("<q", 0 if segments.extra_tokens is None else segments.extra_tokens[s])
        if digests is not None:
            entry += digests[i].tobytes()
        last = (start + int(lengths[s]) - 1) // size
        for block in range(max(start // size, int(first[d])), min(last + 1, int(stop[d]))):
            grids[shift[d] + block] += 1
            entries[shift[d] + block] += struct.pack("<q", start - block * size) + entry
    return grids, entries


def _with_content(segments: SegmentTable) -> npt.NDArray[np.bool_]:
    """Return a (segments,) mask of segments that token ids alone do not determine: grids, audio, clips and crops."""
    return np.asarray((segments.kind != TEXT) & (segments.kind != PAD))
