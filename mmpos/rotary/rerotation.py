"""Turn keys that lie in a paged cache from one table of positions to another."""

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
    """Turn keys in a paged cache from one table of positions to another, in place: in one launch on a GPU.

    A key that was rotated to one position becomes the same key rotated to another one, with one rounding, and the same
    bits where nothing lies between: neither k nor its projection is computed anew for a chunk that moves.

    Its content stays. Where other text or images now stand before a chunk, only the first layer's keys are those of the
    whole prompt computed anew; in deeper layers k and v have seen what stood before, so that cached ones approximate.

    Args:
        k_cache: (blocks, block_size, num_kv_heads, head_dim) "NHD", (blocks, num_kv_heads, block_size, head_dim) "HND",
            or (slots, num_kv_heads, head_dim), any strides; float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
        slots: (tokens,) or (batch, seq) int32 or int64 slots, or a row of fewer for the first tokens; a negative one,
            and on a device one that is too large, is skipped.
        from_positions: where tokens were: DevicePositions, a PositionTable or dense ids, as for ``apply_rotary``.
        to_positions: where they go; another sort than from_positions will do.
        rotary: by which they were rotated; an attention factor is not multiplied again.
        cache_layout: "NHD" or "HND".
        k_scale: of a cache of 8 bits, float32: (), (1,) or (num_kv_heads,), which stay, or the cache's shape without
            head_dim, of which those grow, by √2 at most, whose turned key would have a channel too large.
        implementation: "triton", "reference" (plain torch), or "auto": triton on CUDA tensors; the same bits.
        validate: also check ids, slots and scales that lie on a device, which waits for the device.

    Raises:
        InvalidInputError: something does not fit together; a slot that the cache does not have or that an earlier token
            has, and scales that are missing or not finite and positive, where they are read: on the host, or validated.
        LimitExceededError: 2³¹ slots or more.
        UnsupportedError: under autograd; a cache of another dtype of 8 bits.
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
    rotation = rotation_of(stop, rotary, implementation=number)  # whose factor plays no part
    operators.call(operators.rerotate_, pages, written, row, start.tensor, start.mode, *rotation)


def _pages(k_cache: Tensor, cache_layout: CacheLayout, k_scale: Tensor | None, rotary: Rotary) -> Tensor:
    """Check the cache, with scales if it needs them, and view it as (blocks, block_size, heads, head_dim)."""
    one_of("cache_layout", cache_layout, ("NHD", "HND"))
    if not isinstance(k_cache, Tensor):
        raise InvalidInputError(f"k_cache: got {type(k_cache).__name__}, want a tensor")
    if k_cache.dtype not in (*FLOATS, *paged.EIGHT_BITS):
        error = UnsupportedError if k_cache.dtype.itemsize == 1 else InvalidInputError
        raise error(
            f"k_cache: got {k_cache.dtype}, want float32, bfloat16, float16, float8_e4m3fn or float8_e5m2: "
            "bytes that hold 8-bit floats are view(torch.float8_e4m3fn)"
        )
    if (k_scale is None) == (k_cache.dtype in paged.EIGHT_BITS):
        got = "None" if k_scale is None else type(k_scale).__name__
        want = "None" if k_cache.dtype in FLOATS else "its scales: a rotation may need larger ones"
        raise InvalidInputError(f"k_scale: got {got} for a cache of {k_cache.dtype}, want {want}")
    return paged.as_pages("k_cache", k_cache, cache_layout, "heads", rotary.head_dim)
