"""Normalise and rotate on a CPU with the C extension, block by block, in at most as many threads as torch uses."""

from __future__ import annotations

import json
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
from mmpos.rotary import reference
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions, frequencies_of, row_length_of
from mmpos.rotary.memory import has_tangent, is_unseen, mark_written
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
    if type(rotary) is not Rotary or not (type(inplace) is type(conjugate) is bool) or not is_unseen(*tensors):
        return None
    if has_tangent(q) or (k is not None and has_tangent(k)):
        return None
    dimensions, constants = q.dim(), _constants_of(rotary.text)
    if (layout, dimensions) not in FORMS or constants is None:
        return None
    q_out, k_out = (q, k) if inplace else (torch.empty_like(q), None if k is None else torch.empty_like(k))
    try:
        source = _source_at_once(positions, constants, q if dimensions == 4 else None)
        capsules: tuple[Any, ...] = to_dlpack(q), None if inplace else to_dlpack(q_out)
        if k is not None and k_out is not None:
            capsules = *capsules, to_dlpack(k), None if inplace else to_dlpack(k_out)
    except (BufferError, RuntimeError):  # the tensors have no allocated storage, as under vmap and other transforms
        return None
    flags = CHECKED
    if rotary.pairing == "adjacent":
        flags |= ADJACENT
    if conjugate:
        flags |= CONJUGATE
    if layout == "bhsd":
        flags |= HEADS_FIRST
    if inplace:
        flags |= APART
    size = q.nbytes if k is None else q.nbytes + k.nbytes
    if source is None or not _rotate(capsules, source, None, flags, size):
        return None
    if inplace:
        mark_written(*tensors)
    return q_out, k_out


def _source_at_once(positions: object, constants: bytes, batched: Tensor | None) -> Source | None:
    """Return the extension's source argument if the extension can check the positions itself, else None.

    Args:
        positions: positions as the caller passed them.
        constants: the rotary's packed constants.
        batched: a tensor whose first dimension is the batch, which requires documents of equal length; None for thd.
    """
    if type(positions) is Tensor:
        ids, tokens, row, mode = to_dlpack(positions), 0, 0, reference.DENSE_INTEGER
    elif isinstance(positions, PositionTable):
        ids, tokens, mode = positions.table, positions.num_tokens, int(positions.fractional)
        row = 0 if batched is None or batched.shape[0] == 1 else row_length_of(positions) or NO_ROW
    elif isinstance(positions, DevicePositions):
        ids, tokens, mode = to_dlpack(positions.table), positions.num_tokens, int(positions.fractional)
        row = positions.row_length or NO_ROW
    else:
        return None
    return ids, mode, tokens, row, constants


NO_ROW = -1
"""Row length for documents of different lengths: it matches no batch."""


@lru_cache(maxsize=1 << 10)
def _constants_of(text: str) -> bytes | None:
    """Pack a rotary's constants for the extension; return None for precision "hf" and per-head rotations."""
    rotary = Rotary.from_dict(json.loads(text))
    if rotary.precision == "hf" or rotary.own_heads:
        return None
    return _packed(*frequencies_of(rotary), rotary.axes, rotary.head_dim, rotary.attention_factor)


def _packed(frequencies: Tensor, pair_axis: Tensor, axes: int, head_dim: int, factor: float) -> bytes:
    """Pack a rotation's constants for the extension; see Constants in csrc/phases.h."""
    groups, pairs = pair_axis.numel() // pair_axis.shape[-1], pair_axis.shape[-1]
    numbers = struct.pack("=4q10f", pairs, groups, axes, head_dim, *reference.SIN, *reference.COS, factor, 0.0)
    words = frequencies.expand(groups, *frequencies.shape[-2:])
    return numbers + words.numpy().tobytes() + pair_axis.numpy().tobytes()


def rotated(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: RotationArguments, norm: Norm) -> bool:
    """Normalise and rotate (batch, seq, heads, head_dim) q and k into q_out and k_out, which may be q and k.

    Returns:
        whether the extension supports the tensors; if not, nothing is written.
    """
    if native.core is None or q.device.type != "cpu" or q.dtype not in (torch.float32, torch.bfloat16):
        return False
    if q.shape[3] > 1 and not q.stride(3) == k.stride(3) == q_out.stride(3) == k_out.stride(3) == 1:
        q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))  # C requires contiguous channels
        done = rotated(q, k, q, k, rotation, norm)
        if done:
            q_out.copy_(q)
            k_out.copy_(k)
        return done
    tokens = q.shape[0] * q.shape[1]
    with_heads = [row for row in zip((q, k), (q_out, k_out), norm.weights(), strict=True) if row[0].shape[2]]
    if not with_heads:
        return True
    tensors, outs, weights = zip(*with_heads, strict=True)
    scaling = None if norm.is_none else (norm.eps, *(w if w is None else w.detach().numpy() for w in weights))
    flags = ADJACENT * rotation.adjacent | CONJUGATE * rotation.conjugate | NORM_AFTER * norm.after
    capsules = tuple([to_dlpack(x) for pair in zip(tensors, outs, strict=True) for x in pair])
    return _rotate(capsules, source_of(rotation, tokens, q.shape[3]), scaling, flags, sum(x.nbytes for x in tensors))


def source_of(rotation: RotationArguments, tokens: int, head_dim: int) -> Source:
    """Return a rotation as the source argument of the extension."""
    if rotation.frequencies.is_floating_point():  # precision "hf", or an engine's cache
        cos, sin = (x.flatten(1).numpy() for x in reference.cos_sin(rotation, tokens))
        return cos, sin, rotation.head_groups or 1
    constants = rotation.frequencies, rotation.pair_axis, rotation.axes, head_dim, rotation.attention_factor
    return rotation.positions.numpy(), rotation.mode, tokens, 0, _packed(*constants)


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
