"""The forward of one attention with the rotation straight from positions, in place of cos, sin and five operations."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from mmpos.integrations.hf.anatomy import APPLY, turning_forward
from mmpos.rotary.apply import Implementation, apply_rotary
from mmpos.rotary.config import Rotary

__all__ = ["FusedForward"]


class FusedForward:
    """The forward of an attention's class, where ``apply_rotary_pos_emb`` also takes positions and their Rotary.

    It is the same code with another name in its globals, so that no other model sees a difference.

    Args:
        attention: the module that it is the forward of.
        implementation: as for ``apply_rotary``.
    """

    def __init__(self, attention: nn.Module, implementation: Implementation) -> None:
        forward = turning_forward(attention)
        assert forward is not None, "dissect has looked"
        turning = turns_or(forward.__globals__[APPLY], implementation)
        names = {**forward.__globals__, APPLY: turning}
        copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        copied.__kwdefaults__ = forward.__kwdefaults__
        self.attention = attention
        self.implementation = implementation
        self.method = MethodType(copied, attention)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The attention."""
        return self.method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedForward, (self.attention, self.implementation)


def turns_or(original: Callable[..., Any], implementation: Implementation) -> Callable[..., Any]:
    """``apply_rotary_pos_emb`` of a model, which rotates by positions where it is given them for cos."""

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sin, Rotary):
            return apply_rotary(q, k, cos, sin, layout="bhsd", implementation=implementation)
        return original(q, k, cos, sin, *args, **kwargs)

    return apply_rotary_pos_emb
