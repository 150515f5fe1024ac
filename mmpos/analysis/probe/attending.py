"""One key for all tokens of a transformer of diffusers, read once it is rotated, where torch attends.

It is apart from the adapters, which load torch when they are called: the base class of Attending is torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

_LAST = (("norm_k", "to_k"), ("norm_added_k", "add_k_proj"))
"""Modules of an attention that give the keys right before they are rotated, of images and of text: a norm, or else the
projection."""

_CROSS = "attn2"
"""Name of cross-attention in the blocks of diffusers, whose keys are not rotated."""


class Attending(TorchFunctionMode):
    """Give all tokens of each self-attention one key inside a ``with`` block, and record what torch attends to.

    ``keys`` are (batch, tokens, heads, head_dim) of each attention, and ``references`` (heads, head_dim) before they
    are rotated.

    Args:
        transformer: a ModelMixin.
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.keys: list[Tensor] = []
        self.references: list[Tensor] = []
        self._transformer = transformer
        self._handles: list[RemovableHandle] = []
        self._key: Tensor | None = None  # of the attention that runs

    def __enter__(self) -> Self:
        for name, module in self._transformer.named_modules():
            if not hasattr(module, "processor") or name.rpartition(".")[2] == _CROSS:
                continue
            for names in _LAST:
                parts = (getattr(module, name, None) for name in names)
                part = next((part for part in parts if part is not None), None)
                if part is not None:
                    self._handles.append(part.register_forward_hook(self._one_key))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _one_key(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        if (
            self._key is None
        ):  # of the last axis alone, since heads stand before the tokens in some, after them in others
            generator = torch.Generator().manual_seed(len(self.keys))
            self._key = torch.randn(output.shape[-1:], generator=generator).to(output)
        return self._key.expand_as(output)

    def _leave(self, *_: object) -> None:
        self._key = None

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and keep the keys that it attends to."""
        named = kwargs or {}
        if func is scaled_dot_product_attention and self._key is not None:
            key: Tensor = args[1] if len(args) > 1 else named["key"]
            self.keys.append(key.transpose(1, 2))
            self.references.append(self._key.reshape(-1, key.shape[-1]).expand(key.shape[1], -1))
        return func(*args, **named)
