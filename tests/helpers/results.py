"""Equality of call results."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mmpos import MmposError


def assert_equal(one: Any, other: Any) -> None:
    """Assert that two results are equal in types, values, dtypes, shapes and error messages."""
    assert type(one) is type(other), (one, other)
    if isinstance(one, MmposError):
        assert str(one) == str(other)
    elif type(one).__name__ == "Tensor":  # torch is not imported here
        assert one.dtype == other.dtype
        assert one.equal(other)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif is_dataclass(one):
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(other, field.name))
    else:
        assert one == other
