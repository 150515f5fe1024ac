"""Normalise and rotate on a CPU by the extension: in C, block by block, in as many threads as torch has."""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.positions.table_rows import DENOMINATOR, OFFSET
from mmpos.rotary import reference
from mmpos.rotary.reference import Norm, RotationArguments
from mmpos.support import native

Array = npt.NDArray[Any]

Angles: TypeAlias = tuple[Any, ...]
"""cos and sin, or the arguments that the extension makes them of; see csrc/rotate.c."""

COEFFICIENTS = struct.pack("=8f", *reference.SIN, *reference.COS)

THREAD_BYTES = 1 << 19
"""Bytes of q and k that are worth a thread: handing them over takes as long as rotating a tenth of them."""

BITS = {torch.float32: torch.float32, torch.bfloat16: torch.int16}
"""Dtypes by which numpy, which has no bfloat16, shows a tensor to the extension."""


def rotated(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: RotationArguments, norm: Norm) -> bool:
    """Normalise and rotate by the extension, where it is there and takes the tensors; whether it did."""
    if native.core is None or norm.after or q.device.type != "cpu" or q.dtype not in BITS:
        return False
    angles = angles_of(rotation, q.shape[0] * q.shape[1])
    return angles is not None and rotate(q, k, q_out, k_out, angles, rotation, norm)


def angles_of(rotation: RotationArguments, tokens: int) -> Angles | None:
    """Return the angles of tokens as the extension takes them, of all groups of heads; None for a table it does not."""
    if rotation.frequencies.is_floating_point():  # those of Transformers, or an engine's cache
        cos, sin = reference.cos_sin(rotation, tokens)
        return cos.numpy(), sin.numpy()
    positions: Array = rotation.positions.numpy()
    ids = _ids_of(positions, rotation.axes, tokens, rotation.fractional) if rotation.is_table else positions
    if ids is None:
        return None
    words, pair_axis = rotation.frequencies.numpy(), rotation.pair_axis.view(-1, rotation.pair_axis.shape[-1]).numpy()
    return ids, rotation.fractional, words, pair_axis, COEFFICIENTS, rotation.attention_factor


def _of_group(angles: Angles, group: int) -> Angles:
    """Return the angles of one group of heads."""
    if len(angles) == 2:
        return tuple(table[:, group] for table in angles)
    *before, pair_axis, coefficients, factor = angles
    return *before, pair_axis[group : group + 1], coefficients, factor


def _ids_of(table: Array, axes: int, tokens: int, fractional: bool) -> Array | None:
    """Expand a table to (axes, tokens) ids: int32, or int64 in units of 2⁻³²."""
    assert native.core is not None
    ids = np.empty((axes, tokens), np.int64 if fractional else np.int32)
    if not native.core.expand(table, tokens, False, ids, None, True):
        return None
    if not fractional:
        return ids
    denominator = table[DENOMINATOR].repeat(np.diff(table[OFFSET], append=tokens))
    return reference.fixed_from_fractions(torch.from_numpy(ids), torch.from_numpy(denominator)).numpy()


def rotate(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, angles: Angles, rotation: RotationArguments, norm: Norm
) -> bool:
    """Normalise and rotate q and k, (batch, seq, heads, head_dim), into q_out and k_out, which may be q and k.

    Returns:
        Whether it was done; if not, nothing was written: what is declined for one group of heads, is for all.
    """
    if any(x.stride(3) != 1 and x.shape[3] > 1 for x in (q, k, q_out, k_out)):  # C wants channels side by side
        q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
        done = rotate(q, k, q, k, angles, rotation, norm)
        if done:
            q_out.copy_(q)
            k_out.copy_(k)
        return done
    core = native.core
    assert core is not None
    tokens, adjacent, conjugate = q.shape[0] * q.shape[1], rotation.adjacent, rotation.conjugate
    # Buffers of numpy know their bounds, so that nothing the extension does can pass them.
    tensors = tuple(_bits(x) for pair in ((q, q_out), (k, k_out)) if pair[0].shape[2] for x in pair)
    if not tensors:
        return True
    groups = [(tensors, angles)]
    if rotation.head_groups:
        axes = rotation.pair_axis.numpy()
        starts = np.flatnonzero((axes[1:] != axes[:-1]).any(axis=1)) + 1  # neighbours that turn alike go together
        cut = zip(*(np.split(x, starts * (x.shape[2] // len(axes)), axis=2) for x in tensors), strict=True)
        groups = [(heads, _of_group(angles, group)) for group, heads in zip([0, *starts], cut, strict=True)]
    scaling = None
    if not norm.is_none:
        weights = (w for x, w in zip((q, k), norm.weights(), strict=True) if x.shape[2])
        scaling = norm.eps, *(w if w is None else w.detach().numpy() for w in weights)
    threads = torch.get_num_threads()  # asked once: another thread may set it
    workers = min(threads, (q.nbytes + k.nbytes) // THREAD_BYTES, tokens)

    def turn(first: int, stop: int) -> bool:
        return all(
            core.rotate(heads, given, scaling, first, stop, adjacent, conjugate, True) for heads, given in groups
        )

    if workers <= 1:
        return turn(0, tokens)
    # More parts than threads, since a thread may come late; what one takes, no other does.
    count = min(4 * workers, tokens)
    parts = deque(pairwise(tokens * i // count for i in range(count + 1)))

    def work() -> bool:
        done = True
        with suppress(IndexError):
            while True:
                done = turn(*parts.popleft()) and done
        return done

    others = _help(work, _pool(os.getpid(), threads - 1), workers - 1)
    return all([work(), *(other.result() for other in others)])


def _help(work: Callable[[], bool], pool: ThreadPoolExecutor, helpers: int) -> list[Future[bool]]:
    """Start the same work in other threads; in none once the main thread has ended, when they take no more."""
    begun: list[Future[bool]] = []
    try:
        for _ in range(helpers):
            begun.append(pool.submit(work))
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
    return begun


def _bits(x: Tensor) -> Array:
    return x.detach().view(BITS[x.dtype]).numpy()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return one pool for tensors of all sizes, which starts threads on demand; a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, "mmpos-rotary")
