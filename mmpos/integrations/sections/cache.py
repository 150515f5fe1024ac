"""The cos/sin cache of a loaded model replaced by the one of its sections."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.errors import InvalidInputError
from mmpos.integrations.sections.layout import BLOCK, Sections

__all__ = ["install_cache"]


def install_cache(model: nn.Module, sections: Sections) -> int:
    """Replace the cos/sin cache of every M-RoPE module of a model, in place, in its dtype and on its device.

    Engines fill their caches in the natural order of frequencies, with float32 angles. SGLang also appends rows to a
    cache that is too short for its context; those of these modules are exact as well, attention factor included.

    Args:
        model: anything that holds modules with ``cos_sin_cache`` and ``mrope_section``, as vLLM and SGLang name them.
        sections: what they must carry; each module's sizes, pairing and sections are compared with it.

    Returns:
        how many modules were changed.

    Raises:
        InvalidInputError: no such module, or one that does not fit.
    """
    found: list[Any] = [module for module in model.modules() if _is_rotary(module)]
    if not found:
        raise InvalidInputError("model: got no module with cos_sin_cache and mrope_section, want at least one")
    for module in found:
        _check(module, sections)
    made: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    for module in found:
        where = (module.cos_sin_cache.dtype, module.cos_sin_cache.device)
        if where not in made:
            made[where] = sections.cos_sin_cache(*where)
        module.cos_sin_cache = made[where]
        module._ensure_cos_sin_cache_length = partial(_grow, module, sections)
    return len(found)


def _is_rotary(module: Any) -> bool:
    return isinstance(getattr(module, "cos_sin_cache", None), Tensor) and bool(getattr(module, "mrope_section", None))


def _check(module: Any, sections: Sections) -> None:
    rotary = sections.rotary
    wanted = {
        "head_size": rotary.head_dim,
        "rotary_dim": rotary.rotary_dim,
        "is_neox_style": sections.is_neox_style,
        "mrope_section": list(sections.mrope_section),
    }
    for name, want in wanted.items():
        got = getattr(module, name, None)
        got = list(got) if isinstance(got, tuple) else got
        if got != want:
            raise InvalidInputError(f"{type(module).__name__}.{name}: got {got}, want {want} as in sections")
    if getattr(module, "mrope_interleaved", False):
        raise InvalidInputError(f"{type(module).__name__}.mrope_interleaved: got True, want False: sections are blocks")
    rows = module.cos_sin_cache.shape[0]
    if rows != sections.max_position:
        raise InvalidInputError(f"max_position: got {sections.max_position}, want {rows}, the rows of cos_sin_cache")


def _grow(module: Any, sections: Sections, needed_max_pos: int) -> None:
    """In place of SGLang's ``_ensure_cos_sin_cache_length``: rows for all ids up to this one."""
    cache = module.cos_sin_cache
    if needed_max_pos >= len(cache):
        rows = BLOCK * (needed_max_pos // BLOCK + 1)  # many at a time, since ids may come one by one
        module.cos_sin_cache = replace(sections, max_position=rows).cos_sin_cache(cache.dtype, cache.device)
