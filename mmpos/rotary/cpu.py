"""Normalise and rotate on a CPU by the extension: in C, block by block, in as many threads as torch has."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented, if not in its __all__

from mmpos.positions.table import PositionTable
from mmpos.rotary import reference
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions, frequencies_of, row_length_of
from mmpos.rotary.memory import has_tangent, is_plain, mark_written
from mmpos.rotary.reference import Norm, RotationArguments
from mmpos.support import native

Source: TypeAlias = tuple[Any, ...]
"""Positions and what turns by them, or cos and sin; see csrc/rotate.c."""

THREAD_BYTES = 1 << 19
"""Bytes of q and k that are worth a thread: handing them over takes as long as rotating a tenth of them."""

ADJACENT, CONJUGATE, HEADS_FIRST, APART, NORM_AFTER = 1, 2, 4, 8, 16
"""Flags of the extension's rotate."""

FORMS = ((None, 3), (None, 4), ("thd", 3), ("bshd", 4), ("bhsd", 4))
"""Layouts, and dimensions of tensors in them."""


def rotated_at_once(
    q: Tensor, k: Tensor | None, positions: object, rotary: Rotary, layout: str | None, inplace: bool, conjugate: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Rotate q and k where one call in C does it, checks included: as for the tokens of a decoding step.

    Returns:
        As ``apply_rotary``; None for all that goes the long way, mistakes too, and then nothing was written.
    """
    tensors = (q,) if k is None else (q, k)
    if native.core is None or type(rotary) is not Rotary or not is_plain(*tensors) or not q.is_cpu:
        return None
    shape, heads_first = q.shape, layout == "bhsd"
    if (layout, len(shape)) not in FORMS or tensors[-1].dim() != len(shape):
        return None
    batch, seq = (1, shape[0]) if len(shape) == 3 else (shape[0], shape[2 if heads_first else 1])
    source = _source_at_once(positions, rotary, batch, seq)
    if source is None or any(map(has_tangent, tensors)):
        return None
    flags = ADJACENT * (rotary.pairing == "adjacent") | CONJUGATE * conjugate
    outs = tensors if inplace else tuple(map(torch.empty_like, tensors))
    if not _turn(tensors, outs, source, None, flags | HEADS_FIRST * heads_first | APART * inplace, batch * seq):
        return None
    if inplace:
        mark_written(*tensors)
    return outs[0], None if k is None else outs[1]


def _source_at_once(positions: object, rotary: Rotary, batch: int, seq: int) -> Source | None:
    """Return positions as the extension takes them, if no check is left but its own."""
    ids: Any
    constants, tokens = _constants_of(rotary.text), batch * seq
    if constants is None:
        return None
    if isinstance(positions, PositionTable):
        ids, mode, tokens = positions.table, int(positions.fractional), positions.num_tokens
        row = row_length_of(positions) if batch > 1 else seq
    elif isinstance(positions, DevicePositions) and is_plain(positions.table) and positions.table.is_cpu:
        ids, mode, tokens = positions.table.numpy(), int(positions.fractional), positions.num_tokens
        row = positions.row_length
    elif not isinstance(positions, Tensor) or positions.dtype != torch.int32:  # others may hold more than ids
        return None
    elif is_plain(positions) and positions.is_cpu and positions.dim() in (2, 3):
        ids, mode = positions.flatten(1).numpy(), reference.DENSE_INTEGER
        row = positions.shape[2] if positions.dim() == 3 else seq
    else:
        return None
    return (ids, mode, tokens, constants) if batch == 1 or row == seq else None


@lru_cache(maxsize=1 << 10)
def _constants_of(text: str) -> bytes | None:
    """Pack the constants of a rotary for the extension; None where more than these is needed."""
    rotary = Rotary.from_dict(json.loads(text))
    if rotary.precision == "hf" or rotary.head_axes is not None:
        return None
    return _packed(*frequencies_of(rotary), rotary.axes, rotary.head_dim, rotary.attention_factor)


def _packed(frequencies: Tensor, pair_axis: Tensor, axes: int, head_dim: int, factor: float) -> bytes:
    """Pack what the extension turns by: see Constants in csrc/phases.h."""
    groups, pairs = pair_axis.numel() // pair_axis.shape[-1], pair_axis.shape[-1]
    numbers = struct.pack("=4q10f", pairs, groups, axes, head_dim, *reference.SIN, *reference.COS, factor, 0.0)
    return numbers + frequencies.numpy().tobytes() + pair_axis.numpy().tobytes()


def rotated(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: RotationArguments, norm: Norm) -> bool:
    """Normalise and rotate q and k, (batch, seq, heads, head_dim), into q_out and k_out, which may be q and k.

    Returns:
        Whether it was done; if not, nothing was written.
    """
    if native.core is None or q.device.type != "cpu" or q.dtype not in (torch.float32, torch.bfloat16):
        return False
    if q.shape[3] > 1 and not q.stride(3) == k.stride(3) == q_out.stride(3) == k_out.stride(3) == 1:
        q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))  # C wants channels side by side
        done = rotated(q, k, q, k, rotation, norm)
        if done:
            q_out.copy_(q)
            k_out.copy_(k)
        return done
    tokens = q.shape[0] * q.shape[1]
    with_heads = [each for each in zip((q, k), (q_out, k_out), norm.weights(), strict=True) if each[0].shape[2]]
    if not with_heads:
        return True
    tensors, outs, weights = zip(*with_heads, strict=True)
    scaling = None if norm.is_none else (norm.eps, *(w if w is None else w.detach().numpy() for w in weights))
    flags = ADJACENT * rotation.adjacent | CONJUGATE * rotation.conjugate | NORM_AFTER * norm.after
    return _turn(tensors, outs, source_of(rotation, tokens, q.shape[3]), scaling, flags, tokens)


def source_of(rotation: RotationArguments, tokens: int, head_dim: int) -> Source:
    """Return what tokens turn by as the extension takes it."""
    if rotation.frequencies.is_floating_point():  # those of Transformers, or an engine's cache
        cos, sin = (x.flatten(1).numpy() for x in reference.cos_sin(rotation, tokens))
        return cos, sin, rotation.head_groups or 1
    constants = rotation.frequencies, rotation.pair_axis, rotation.axes, head_dim, rotation.attention_factor
    return rotation.positions.numpy(), rotation.mode, tokens, _packed(*constants)


def _turn(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], source: Source, scaling: tuple[Any, ...] | None, flags: int,
    tokens: int,
) -> bool:  # fmt: skip
    """Turn q and k by the extension, in threads where they are worth it; False, and nothing written, if it declines."""
    core = native.core
    assert core is not None
    capsules = tuple([to_dlpack(x) for pair in zip(tensors, outs, strict=True) for x in pair])

    def turn(first: int, stop: int) -> bool:
        return core.rotate(capsules, source, scaling, first, stop, flags)

    threads = torch.get_num_threads()  # asked once: another thread may set it
    workers = min(threads, sum(x.nbytes for x in tensors) // THREAD_BYTES, tokens)
    return turn(0, tokens) if workers <= 1 else _turn_in_threads(turn, tokens, workers, _pool(os.getpid(), threads - 1))


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
