"""Rounding to 8 bits, in torch and in a kernel, compared with a search for the nearest number."""

# mypy: ignore-errors
# ruff: noqa: N803  (kernel constants are upper case)

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from store_oracle import DEVICE, nearest

from mmpos.rotary.kernel.float8 import codes_of, format_of, values_of
from mmpos.rotary.paged import quantised

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def codes_kernel(x, codes, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Round float32 to 8-bit numbers and store their bits."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + index, codes_of(tl.load(x + index), FORMAT))


@triton.jit
def values_kernel(codes, x, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Convert the bits of 8-bit numbers to float32."""
    index = tl.arange(0, BLOCK)
    tl.store(x + index, values_of(tl.load(codes + index), FORMAT))


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return all bfloat16 and dtype numbers, the midpoints between dtype numbers, and the midpoints' neighbours."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    finite = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    finite = finite[finite.isfinite()]
    midpoints = (finite[1:] + finite[:-1]) / 2
    neighbours = [torch.nextafter(midpoints, torch.full_like(midpoints, end)) for end in (0.0, torch.inf)]
    x = torch.cat([every, *(sign * part for part in (finite, midpoints, *neighbours) for sign in (1, -1))])
    return torch.cat([x, x.new_zeros(-x.numel() % 8192)]).to(DEVICE)


@pytest.mark.filterwarnings("ignore:invalid value encountered in add:RuntimeWarning")  # signalling NaN
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_number_is_rounded_to_the_nearest_8_bit_number(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    codes_kernel[(x.numel() // 8192,)](x, codes, BLOCK=8192, FORMAT=format_of(dtype, False))
    one = torch.ones(1, device=DEVICE).expand(x.shape)
    for got in (codes.view(dtype), quantised(x.unsqueeze(-1), one, dtype).squeeze(-1)):
        rounded, want = got.double().cpu(), x.double().cpu()
        assert torch.equal(rounded.isnan(), want.isnan())
        real = ~want.isnan()
        largest = torch.finfo(dtype).max
        assert torch.equal(rounded[real], nearest(want[real].clamp(-largest, largest), dtype))
        assert torch.equal(rounded[real].signbit(), want[real].signbit())


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_8_bit_code_is_converted_to_float32(dtype: torch.dtype) -> None:
    codes, x = torch.arange(256, dtype=torch.uint8, device=DEVICE), torch.empty(256, device=DEVICE)
    values_kernel[(1,)](codes, x, BLOCK=256, FORMAT=format_of(dtype, False))
    torch.testing.assert_close(x, codes.view(dtype).float(), rtol=0, atol=0, equal_nan=True)
