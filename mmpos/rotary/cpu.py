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

from mmpos.positions.table_rows import AXES, DENOMINATOR, OFFSET
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
    """Normalise and rotate q and k, (batch, seq, heads, head_dim), into q_out and k_out, which may be q and k.

    Returns:
        Whether it was done; if not, nothing was written: what is declined for one group of heads, is for all.
    """
    core = native.core
    if core is None or norm.after or q.device.type != "cpu" or q.dtype not in BITS:
        return False
    if q.shape[3] > 1 and not q.stride(3) == k.stride(3) == q_out.stride(3) == k_out.stride(3) == 1:
        q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))  # C wants channels side by side
        done = rotated(q, k, q, k, rotation, norm)
        if done:
            q_out.copy_(q)
            k_out.copy_(k)
        return done
    tokens, adjacent, conjugate = q.shape[0] * q.shape[1], rotation.adjacent, rotation.conjugate
    angles = angles_of(rotation, tokens)
    if angles is None:
        return False
    # Buffers of numpy know their bounds, so that nothing the extension does can pass them.
    tensors = tuple([x.detach().view(BITS[q.dtype]).numpy() for x in (q, q_out, k, k_out) if x.shape[2]])
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

    def turn(first: int, stop: int) -> bool:
        for heads, source in groups:
            if not core.rotate(heads, source, scaling, first, stop, adjacent, conjugate, True):
                return False
        return True

    threads = torch.get_num_threads()  # asked once: another thread may set it
    workers = min(threads, (q.nbytes + k.nbytes) // THREAD_BYTES, tokens)
    return turn(0, tokens) if workers <= 1 else _turn_in_threads(turn, tokens, workers, _pool(os.getpid(), threads - 1))


def angles_of(rotation: RotationArguments, tokens: int) -> Angles | None:
    """Return the angles of tokens as the extension takes them, of all groups of heads; None for a table it does not."""
    if rotation.frequencies.is_floating_point():  # those of Transformers, or an engine's cache
        cos, sin = reference.cos_sin(rotation, tokens)
        return cos.numpy(), sin.numpy()
    ids: Array = rotation.positions.numpy()  # int32, or int64 in units of 2⁻³²
    fractional = rotation.fractional
    if rotation.is_table:
        assert native.core is not None
        table, ids = ids, np.empty(((len(ids) - AXES) // 4, tokens), np.int64 if fractional else np.int32)
        if not native.core.expand(table, tokens, False, ids, None, True):
            return None
        if fractional:
            denominator = table[DENOMINATOR].repeat(np.diff(table[OFFSET], append=tokens))
            ids = reference.fixed_from_fractions(torch.from_numpy(ids), torch.from_numpy(denominator)).numpy()
    words, pair_axis = rotation.frequencies.numpy(), rotation.pair_axis.view(-1, rotation.pair_axis.shape[-1]).numpy()
    return ids, fractional, words, pair_axis, COEFFICIENTS, rotation.attention_factor


def _of_group(angles: Angles, group: int) -> Angles:
    """Return the angles of one group of heads."""
    if len(angles) == 2:
        return tuple(table[:, group] for table in angles)
    *before, pair_axis, coefficients, factor = angles
    return *before, pair_axis[group : group + 1], coefficients, factor


def _turn_in_threads(turn: Callable[[int, int], bool], tokens: int, workers: int, pool: ThreadPoolExecutor) -> bool:
    """Turn all tokens in this thread and others; in this one alone once the main thread has ended."""
    # More parts than threads, since a thread may come late; what one takes, no other does.
    count = min(4 * workers, tokens)
    parts = deque(pairwise(tokens * i // count for i in range(count + 1)))

    def work() -> bool:
        done = True
        with suppress(IndexError):
            while True:
                done = turn(*parts.popleft()) and done
        return done

    others: list[Future[bool]] = []
    try:
        for _ in range(workers - 1):
            others.append(pool.submit(work))
    except RuntimeError:  # pools take no more work
        if threading.main_thread().is_alive():
            raise
    return all([work(), *(other.result() for other in others)])


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return one pool for tensors of all sizes, which starts threads on demand; a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, "mmpos-rotary")
