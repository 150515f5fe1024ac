"""Rotate keys in a paged cache from their old positions to new ones."""

from __future__ import annotations

from torch import Tensor

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import operators, paged
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import Implementation, Positions, check_heads, ids_on, number_of, rotation_of
from mmpos.rotary.memory import check_written
from mmpos.rotary.paged import CacheLayout, SlotNames
from mmpos.rotary.reference import FLOATS
from mmpos.support.checks import boolean, instance, one_of

__all__ = ["rerotate"]


def rerotate(
    k_cache: Tensor,
    slots: Tensor,
    from_positions: Positions,
    to_positions: Positions,
    rotary: Rotary,
    *,
    cache_layout: CacheLayout = "NHD",
    k_scale: Tensor | None = None,
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
        k_cache: (blocks, block_size, num_kv_heads, head_dim) "NHD", (blocks, num_kv_heads, block_size, head_dim) "HND",
            or (slots, num_kv_heads, head_dim), with any strides, in float32, bfloat16, float16, float8_e4m3fn or
            float8_e5m2.
        slots: (tokens,) or (batch, seq) int32 or int64 slots, or a shorter vector for the first tokens. Negative slots
            are skipped; on a device, so are slots that are too large.
        from_positions: old positions: DevicePositions, a PositionTable or dense ids, as for ``apply_rotary``.
        to_positions: new positions; their type may differ from that of from_positions.
        rotary: the rotation by which the cached keys were rotated; its attention factor is not applied again.
        cache_layout: "NHD" or "HND".
        k_scale: float32 scales of an 8-bit cache. Scales of shape (), (1,) or (num_kv_heads,) stay unchanged; scales
            with the cache's shape without head_dim grow by at most √2 if a channel of the rotated key would be too
            large.
        implementation: "triton", "reference" (plain torch), or "auto" (Triton for CUDA tensors); results are bit-equal.
        validate: also check ids, slots and scales on a device; this waits for the device.

    Raises:
        InvalidInputError: arguments do not match; on the host or with ``validate``, also if a slot is too large or
            repeated, or if scales are not finite and positive.
        LimitExceededError: the cache has at least 2³¹ slots.
        UnsupportedError: a tensor requires gradients, or the cache has an unsupported 8-bit dtype.
    """
    boolean("validate", validate)
    instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary")
    pages = _pages(k_cache, cache_layout, k_scale, rotary)
    check_heads("k_cache", pages, rotary)
    start = ids_on(from_positions, rotary, pages.device, validate, "from_positions", "k_cache")
    stop = ids_on(to_positions, rotary, pages.device, validate, "to_positions", "k_cache")
    if start.tokens != stop.tokens:
        raise InvalidInputError(f"to_positions: got {stop.tokens} tokens, want {start.tokens} as in from_positions")
    batch, seq = start.shape if len(start.shape) == 2 else (1, start.tokens)
    names = SlotNames("slots", "from_positions", "k_cache")
    row = paged.slots_of(slots, batch, seq, pages, validate, names)
    _, written = paged.scale_of_cache("k_scale", k_scale, k_cache, pages, cache_layout, validate)
    tensors = {"k_cache": k_cache} if k_scale is None else {"k_cache": k_cache, "k_scale": k_scale}
    check_written(tensors, ("k_cache",) if written is None else ("k_cache", "k_scale"))
    number = number_of(implementation, pages.device)
    rotation = rotation_of(stop, rotary, implementation=number)  # the operator ignores the rotation's attention factor
    operators.call(operators.rerotate_, pages, written, row, start.tensor, start.mode, *rotation)


def _pages(k_cache: Tensor, cache_layout: CacheLayout, k_scale: Tensor | None, rotary: Rotary) -> Tensor:
    """Check the cache and whether it needs scales, and view it as (blocks, block_size, heads, head_dim)."""
    one_of("cache_layout", cache_layout, ("NHD", "HND"))
    if not isinstance(k_cache, Tensor):
        raise InvalidInputError(f"k_cache: got {type(k_cache).__name__}, want a tensor")
    if k_cache.dtype not in (*FLOATS, *paged.EIGHT_BITS):
        error = UnsupportedError if k_cache.dtype.itemsize == 1 else InvalidInputError
        raise error(
            f"k_cache: got {k_cache.dtype}, want float32, bfloat16, float16, float8_e4m3fn or float8_e5m2; "
            "reinterpret bytes of 8-bit floats with view(torch.float8_e4m3fn)"
        )
    if (k_scale is None) == (k_cache.dtype in paged.EIGHT_BITS):
        got = "None" if k_scale is None else type(k_scale).__name__
        want = "None" if k_cache.dtype in FLOATS else "scales: rotated keys may need larger ones"
        raise InvalidInputError(f"k_scale: got {got} for a cache of {k_cache.dtype}, want {want}")
    return paged.as_pages("k_cache", k_cache, cache_layout, "heads", rotary.head_dim)
