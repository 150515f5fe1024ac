"""The rotation in C declines tensors flaw by flaw, with nothing written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from mmpos.rotary import cpu
from mmpos.support import native

if native.core is None:
    pytest.skip("the extension was not built", allow_module_level=True)

CORE = native.core
X = np.zeros((1, 4, 2, 16), np.float32)
GIVEN: tuple[Any, ...] = (
    np.zeros((2, 4), np.int32), False, np.zeros((3, 8), np.int64), np.zeros((1, 8), np.int32), cpu.COEFFICIENTS, 1.0
)  # fmt: skip
TABLES: tuple[Any, ...] = (np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32))
WEIGHT = np.ones(16, np.float32)


def with_part(part: int, value: Any) -> dict[str, Any]:
    return {"given": (*GIVEN[:part], value, *GIVEN[part + 1 :])}


DECLINED: dict[str, dict[str, Any]] = {
    "three dimensions": {"x": X[0]},
    "float64": {"x": X.astype(np.float64)},
    "float16": {"x": X.astype(np.float16)},
    "big endian": {"x": X.astype(">f4")},
    "strided channels": {"x": np.zeros((1, 4, 2, 32), np.float32)[..., ::2]},
    "channels backwards": {"x": X[..., ::-1]},
    "no buffer": {"x": X.tolist()},
    "fewer channels than pairs": {"x": X[..., :15]},
    "other tokens": {"x": X[:, :3]},
    "no tokens": {"x": X[:, :0]},
    "an out of another shape": {"out": np.zeros((1, 4, 1, 16), np.float32)},
    "an out of another dtype": {"out": np.zeros(X.shape, np.int16)},
    "an out of strided channels": {"out": np.zeros((1, 4, 2, 32), np.float32)[..., ::2]},
    "an out to read": {"out": np.frombuffer(bytes(X.nbytes), np.float32).reshape(X.shape)},
    "k of another dtype": {"k": np.zeros((1, 4, 1, 16), np.int16)},
    "k of other tokens": {"k": np.zeros((1, 5, 1, 16), np.float32)},
    "k of few channels": {"k": np.zeros((1, 4, 1, 14), np.float32)},
    "k without an out": {"tensors": (X, X.copy(), X)},
    "no tensors": {"tensors": ()},
    "too many tensors": {"tensors": (X, X.copy()) * 3},
    "a first below 0": {"first": -1},
    "a stop past the end": {"stop": 5},
    "a stop before the first": {"first": 3, "stop": 2},
    "a first beyond int64": {"first": 1 << 70},
    "a list for the source": {"given": list(GIVEN)},
    "a source of other length": {"given": GIVEN[:5]},
    "ids of other tokens": with_part(0, np.zeros((2, 5), np.int32)),
    "ids of one dimension": with_part(0, np.zeros(4, np.int32)),
    "float ids": with_part(0, np.zeros((2, 4))),
    "too many axes": with_part(0, np.zeros((9, 4), np.int32)),
    "narrow fixed point": with_part(1, True),
    "narrow words": with_part(2, np.zeros((3, 8), np.int32)),
    "two words": with_part(2, np.zeros((2, 8), np.int64)),
    "words of fewer pairs": with_part(2, np.zeros((3, 7), np.int64)),
    "wide axes of pairs": with_part(3, np.zeros((1, 8), np.int64)),
    "axes of fewer pairs": with_part(3, np.zeros((1, 7), np.int32)),
    "a pair of an axis past the last": with_part(3, np.array([[0, 1] * 3 + [1, 2]], np.int32)),
    "a pair of an axis below none": with_part(3, np.array([[0, -2] * 4], np.int32)),
    "seven coefficients": with_part(4, cpu.COEFFICIENTS[:28]),
    "coefficients in a list": with_part(4, [1.0] * 8),
    "a whole factor": with_part(5, 1),
    "cos of other tokens": {"given": (np.ones((5, 8), np.float32),) * 2},
    "cos in float64": {"given": (np.ones((4, 8)),) * 2},
    "sin of other tokens": {"given": (TABLES[0], np.ones((3, 8), np.float32))},
    "sin of other pairs": {"given": (TABLES[0], np.ones((4, 7), np.float32))},
    "no pairs": {"given": (np.ones((4, 0), np.float32),) * 2},
    "more pairs than channels": {"given": (np.ones((4, 9), np.float32),) * 2},
    "a norm in a list": {"norm": [1e-6, WEIGHT]},
    "a norm without a weight": {"norm": (1e-6,)},
    "a norm of two tensors for one": {"norm": (1e-6, WEIGHT, WEIGHT)},
    "a norm of one tensor for two": {"norm": (1e-6, WEIGHT), "k": X[:, :, :1]},
    "a whole eps": {"norm": (1, WEIGHT)},
    "a weight of fewer channels": {"norm": (1e-6, WEIGHT[:15])},
    "a weight of the channels of q for k": {"norm": (1e-6, None, WEIGHT), "k": np.zeros((1, 4, 1, 18), np.float32)},
    "a weight in float64": {"norm": (1e-6, WEIGHT.astype(np.float64))},
    "a weight of int16": {"norm": (1e-6, WEIGHT.astype(np.int16))},
    "a weight in a row": {"norm": (1e-6, WEIGHT[None])},
    "a strided weight": {"norm": (1e-6, np.ones(32, np.float32)[::2])},
    "a weight in a tuple": {"norm": (1e-6, tuple(WEIGHT))},
}


def attempt(
    x: Any = X, out: Any = None, k: Any = None, tensors: Any = None, given: Any = GIVEN, norm: Any = None,
    first: int = 0, stop: int = 4,
) -> bool:  # fmt: skip
    out = np.full(np.shape(x), 7, getattr(x, "dtype", np.float32)) if out is None else out
    before = out.copy()
    made = (x, out) if k is None else (x, out, k, np.zeros_like(k))
    done = CORE.rotate(made if tensors is None else tensors, given, norm, first, stop, False, False, True)
    assert done or np.array_equal(out, before)
    return done


def test_what_is_declined_is_taken_without_its_flaw() -> None:
    assert attempt()
    assert attempt(given=TABLES)
    assert attempt(**with_part(3, np.array([[0, -1] * 4], np.int32)))  # −1 is none
    assert attempt(k=np.zeros((1, 4, 0, 18), np.float32))
    assert attempt(x=X.astype(np.int16))
    assert attempt(first=4)
    assert attempt(norm=(1e-6, WEIGHT))
    assert attempt(norm=(1e-6, None, np.ones(18, np.float32)), k=np.zeros((1, 4, 1, 18), np.float32))


@pytest.mark.parametrize("case", DECLINED)
def test_anything_else_is_declined_and_nothing_written(case: str) -> None:
    assert not attempt(**DECLINED[case])


def test_other_arguments_are_a_type_error() -> None:
    flags = False, False, True
    for arguments in ((), ((X, X), GIVEN), ([X, X], GIVEN, None, 0, 4, *flags), ((X, X), GIVEN, None, 0, 4.0, *flags)):
        with pytest.raises(TypeError, match="rotate takes"):
            CORE.rotate(*arguments)
