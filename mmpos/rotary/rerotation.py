"""Rotate keys in a paged cache from their old positions to new ones."""

from __future__ import annotations

from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.rotary import operators, paged
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import Implementation, Positions, check_heads, ids_on, number_of, rotation_of
from mmpos.rotary.memory import check_written
from mmpos.rotary.paged import SlotNames
from mmpos.rotary.reference import FLOATS
from mmpos.support.checks import boolean, instance

__all__ = ["rerotate"]


def rerotate(
    k_cache: Tensor,
    slots: Tensor,
    from_positions: Positions,
    to_positions: Positions,
    rotary: Rotary,
    *,
    implementation: Implementation = "auto",
    validate: bool = False,
) -> None:
    """Rotate keys in a paged cache in place from their old positions to new ones, in one launch on a GPU.

    Each key is rotated by the difference of its positions and rounded once; if the positions are equal, its bits do not
    change. A chunk of tokens can thus be moved without recomputing k or its projection.

    Apart from the rotation, a key does not change. If the text or images before a chunk change, only the first layer's
    keys equal those of a recomputed prompt; in deeper layers, the cached k and v are approximations because they depend
    on prior tokens.

    Args:
        k_cache: (blocks, block_size, num_kv_heads, head_dim) or (slots, num_kv_heads, head_dim), with any strides, in
            float32, bfloat16 or float16. Pass ``cache.transpose(1, 2)`` for a cache in layout "HND".
        slots: (tokens,) or (batch, seq) int32 or int64 slots, or a shorter vector for the first tokens. Negative slots
            are skipped; on a device, so are slots that are too large.
        from_positions: old positions: DevicePositions, a PositionTable or dense ids, as for ``apply_rotary``.
        to_positions: new positions; their type may differ from that of from_positions.
        rotary: the rotation by which the cached keys were rotated; its attention factor is not applied again.
        implementation: "triton", "reference" (plain torch), or "auto" (Triton for CUDA tensors); results are bit-equal.
        validate: also check ids and slots on a device; this waits for the device.

    Raises:
        InvalidInputError: arguments do not match; on the host or with ``validate``, also if a slot is too large or
            repeated.
        LimitExceededError: the cache has at least 2³¹ slots.
        UnsupportedError: a tensor requires gradients.
    """
    boolean("validate", validate)
    instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary")
    if not isinstance(k_cache, Tensor) or k_cache.dtype not in FLOATS:
        got = k_cache.dtype if isinstance(k_cache, Tensor) else type(k_cache).__name__
        raise InvalidInputError(f"k_cache: got {got}, want a tensor of float32, bfloat16 or float16")
    pages = paged.as_pages("k_cache", k_cache, "NHD", "heads", rotary.head_dim)
    check_heads("k_cache", pages, rotary)
    start = ids_on(from_positions, rotary, pages.device, validate, "from_positions", "k_cache")
    stop = ids_on(to_positions, rotary, pages.device, validate, "to_positions", "k_cache")
    if start.tokens != stop.tokens:
        raise InvalidInputError(f"to_positions: got {stop.tokens} tokens, want {start.tokens} as in from_positions")
    batch, seq = start.shape if len(start.shape) == 2 else (1, start.tokens)
    names = SlotNames("slots", "from_positions", "k_cache")
    row = paged.slots_of(slots, batch, seq, pages, validate, names)
    check_written({"k_cache": k_cache}, ("k_cache",))
    number = number_of(implementation, pages.device)
    rotation = rotation_of(stop, rotary, implementation=number)  # the operator ignores the rotation's attention factor
    operators.call(operators.rerotate_, pages, row, start.tensor, start.mode, *rotation)
