"""Normalise and rotate on a CPU with the C extension, block by block, in at most as many threads as torch uses."""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented, though not in __all__

from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import AXES
from mmpos.rotary import reference
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions, frequencies_of, row_length_of
from mmpos.rotary.memory import is_plain, mark_written
from mmpos.rotary.reference import Norm, RotationArguments
from mmpos.support import native

Source: TypeAlias = tuple[Any, ...]
"""Source argument of the extension's rotate: positions and constants, or cos and sin; see csrc/rotate.c."""

THREAD_BYTES = 1 << 19
"""Bytes of q and k per thread: starting a thread takes as long as rotating a tenth of these bytes."""

ADJACENT, CONJUGATE, HEADS_FIRST, APART, NORM_AFTER, CHECKED = 1, 2, 4, 8, 16, 32
"""Flags for the extension's rotate."""

FORMS = ((None, 3), (None, 4), ("thd", 3), ("bshd", 4), ("bhsd", 4))
"""Valid combinations of layout and number of dimensions."""


def rotated_at_once(
    q: Tensor, k: Tensor | None, positions: object, rotary: Rotary, layout: str | None, inplace: bool, conjugate: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Rotate q and k in one C call that includes all checks; fast for small inputs, such as in a decoding step.

    Returns:
        the results of ``apply_rotary``, or None, with nothing written, if the general path must be taken; only that
        path raises errors.
    """
    if not isinstance(q, Tensor) or not q.is_cpu or native.core is None:
        return None
    tensors = (q,) if k is None else (q, k)
    if not is_plain(*tensors, allocated=False):
        return None
    try:
        constants, flags = _constants_and_flags(rotary, layout, q.dim(), inplace, conjugate)
        source = _source_at_once(positions, constants, q)
        if source is None:
            return None
        q_out, k_out = (q, k) if inplace else (torch.empty_like(q), None if k is None else torch.empty_like(k))
        capsules: tuple[Any, ...] = to_dlpack(q), None if inplace else to_dlpack(q_out)
        if k is not None and k_out is not None:
            capsules = *capsules, to_dlpack(k), None if inplace else to_dlpack(k_out)
    except (BufferError, RuntimeError, TypeError):  # no storage, as under vmap and other transforms; an unknown option
        return None
    size = q.nbytes if k is None else q.nbytes + k.nbytes
    if not _rotate(capsules, source, None, flags, size):
        return None
    if inplace:
        mark_written(*tensors)
    return q_out, k_out


@lru_cache(maxsize=1 << 10, typed=True)
def _constants_and_flags(
    rotary: Rotary, layout: str | None, dimensions: int, inplace: bool, conjugate: bool
) -> tuple[bytes | None, int]:
    """Return what the extension needs for all calls with these options; no constants if it cannot take them."""
    flags = CHECKED | CONJUGATE * conjugate | HEADS_FIRST * (layout == "bhsd") | APART * inplace
    known = type(rotary) is Rotary and rotary.precision == "exact" and not rotary.own_heads
    if not known or (layout, dimensions) not in FORMS or not (type(inplace) is type(conjugate) is bool):
        return None, flags
    constants = *frequencies_of(rotary), rotary.axes, reference.DENSE_INTEGER, rotary.head_dim, rotary.attention_factor
    return _packed(*constants), flags | ADJACENT * (rotary.pairing == "adjacent")


def _source_at_once(positions: object, constants: bytes | None, q: Tensor) -> Source | None:
    """Return the extension's source argument if the extension can check the positions itself, else None."""
    if constants is None:
        return None
    if type(positions) is Tensor:
        return to_dlpack(positions), reference.DENSE_INTEGER, 0, 0, constants
    if isinstance(positions, PositionTable):
        one_row = q.dim() == 3 or q.shape[0] == 1
        ids, row = positions.table, 0 if one_row else row_length_of(positions) or NO_ROW
    elif isinstance(positions, DevicePositions):
        ids, row = to_dlpack(positions.table), positions.row_length or NO_ROW
    else:
        return None
    return ids, int(positions.fractional), positions.num_tokens, row, constants


NO_ROW = -1
"""Row length for documents of different lengths: it matches no batch."""


# Constants are few and their tensors, which hash by identity, are never freed; see ``device.constants``.
@lru_cache(maxsize=1 << 10)
def _packed(frequencies: Tensor, pair_axis: Tensor, rows: int, mode: int, head_dim: int, factor: float) -> bytes:
    """Pack a rotation's constants for the extension; see Constants in csrc/phases.h."""
    axes = rows if mode >= reference.DENSE_INTEGER else (rows - AXES) // 4
    groups, pairs = pair_axis.numel() // pair_axis.shape[-1], pair_axis.shape[-1]
    numbers = struct.pack("=4q10f", pairs, groups, axes, head_dim, *reference.SIN, *reference.COS, factor, 0.0)
    words = frequencies.expand(groups, *frequencies.shape[-2:])
    return numbers + words.numpy().tobytes() + pair_axis.numpy().tobytes()


def rotate(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: RotationArguments, norm: Norm) -> bool:
    """Do what ``reference.rotate_all`` does.

    Returns:
        whether the extension supports the tensors; if not, nothing is written.
    """
    if native.core is None or q.device.type != "cpu" or q.dtype not in (torch.float32, torch.bfloat16):
        return False
    if q.shape[3] > 1 and not q.stride(3) == k.stride(3) == q_out.stride(3) == k_out.stride(3) == 1:
        q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))  # C requires contiguous channels
        done = rotate(q, k, q, k, rotation, norm)
        if done:
            q_out.copy_(q)
            k_out.copy_(k)
        return done
    tokens = q.shape[0] * q.shape[1]
    plain = norm.q_weight is None and norm.k_weight is None
    rows = zip((q, k), (q_out, k_out), (None, None) if plain else norm.factors(), strict=True)
    with_heads = [row for row in rows if row[0].shape[2]]
    if not with_heads or not tokens:
        return True
    tensors, outs, weights = zip(*with_heads, strict=True)
    scaling = None if plain else (norm.eps, *(w if w is None else w.detach().numpy() for w in weights))
    flags = ADJACENT * rotation.adjacent | CONJUGATE * rotation.conjugate | NORM_AFTER * norm.after
    capsules = tuple([to_dlpack(x) for pair in zip(tensors, outs, strict=True) for x in pair])
    return _rotate(capsules, source_of(rotation, tokens, q.shape[3]), scaling, flags, sum(x.nbytes for x in tensors))


def source_of(rotation: RotationArguments, tokens: int, head_dim: int) -> Source:
    """Return a rotation as the source argument of the extension."""
    if rotation.frequencies.is_floating_point():  # precision "hf", or an engine's cache
        cos, sin = (x.flatten(1).numpy() for x in reference.cos_sin(rotation, tokens))
        return cos, sin, rotation.head_groups or 1
    ids, mode = rotation.positions.numpy(), rotation.mode
    constants = rotation.frequencies, rotation.pair_axis, len(ids), mode, head_dim, rotation.attention_factor
    return ids, mode, tokens, 0, _packed(*constants)


def _rotate(capsules: tuple[Any, ...], source: Source, scaling: tuple[Any, ...] | None, flags: int, size: int) -> bool:
    """Rotate q and k with the extension, in several threads if they are large; return False if the extension declines.

    Args:
        capsules: DLPack capsules of q, its output, k and its output; an output of None rotates in place.
        source: the source argument of the extension's rotate.
        scaling: eps and weights of the norm, or None.
        flags: flags of the extension's rotate.
        size: bytes of q and k.
    """
    core = native.core
    assert core is not None
    workers = size // THREAD_BYTES
    if workers > 1:
        workers = min(workers, threads := torch.get_num_threads())  # read once: another thread may change it
    if workers <= 1:
        return core.rotate(capsules, source, scaling, 0, 1, flags)
    count = 4 * workers  # more parts than threads, since a thread may start late
    rotate = partial(core.rotate, capsules, source, scaling)
    return _rotate_in_threads(lambda part: rotate(part, count, flags), count, workers, _pool(os.getpid(), threads - 1))


def _rotate_in_threads(rotate: Callable[[int], bool], count: int, workers: int, pool: ThreadPoolExecutor) -> bool:
    """Rotate all parts in this thread and the pool, or only in this thread once the main thread has ended."""
    parts = deque(range(count))

    def work() -> bool:
        done = True
        with suppress(IndexError):
            while True:
                done = rotate(parts.popleft()) and done
        return done

    others: list[Future[bool]] = []
    try:
        for _ in range(workers - 1):
            others.append(pool.submit(work))
    except RuntimeError:  # pools refuse work after the main thread has ended
        if threading.main_thread().is_alive():
            raise
    return all([work(), *(other.result() for other in others)])


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return a process's pool, which starts threads on demand; a forked child does not inherit them."""
    return ThreadPoolExecutor(threads, "mmpos-rotary")
