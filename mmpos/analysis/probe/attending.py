"""Recorder that gives all tokens in a diffusers transformer one key before the rotation, and records the rotated keys.

This file imports torch for the base class of Attending; the adapters import torch only when they are called.
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
"""Last submodules of an attention module before keys are rotated, for images and for text: a norm, or else the
projection.
"""

_CROSS = "attn2"
"""Name of cross-attention, whose keys are not rotated, in the blocks of diffusers."""


class Attending(TorchFunctionMode):
    """Give all tokens of each self-attention one key inside a ``with`` block, and record the keys it attends to.

    ``keys`` holds (batch, tokens, heads, head_dim) for each attention, and ``references`` the (heads, head_dim) key
    before its rotation.

    Args:
        transformer: a ModelMixin.
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.keys: list[Tensor] = []
        self.references: list[Tensor] = []
        self._transformer = transformer
        self._handles: list[RemovableHandle] = []
        self._key: Tensor | None = None  # set while an attention module runs

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
        if self._key is None:
            # The key varies along the last axis only: heads precede tokens in some models, and follow them in others.
            generator = torch.Generator().manual_seed(len(self.keys))
            self._key = torch.randn(output.shape[-1:], generator=generator).to(output)
        return self._key.expand_as(output)

    def _leave(self, *_: object) -> None:
        self._key = None

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a torch function, and record the keys of scaled_dot_product_attention."""
        named = kwargs or {}
        if func is scaled_dot_product_attention and self._key is not None:
            key: Tensor = args[1] if len(args) > 1 else named["key"]
            self.keys.append(key.transpose(1, 2))
            self.references.append(self._key.reshape(-1, key.shape[-1]).expand(key.shape[1], -1))
        return func(*args, **named)
