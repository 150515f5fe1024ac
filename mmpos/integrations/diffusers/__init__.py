"""Transformers of diffusers with mmpos's positions."""

from typing import TYPE_CHECKING

from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos.integrations.diffusers.patching import patch, unpatch

__all__ = ["patch", "unpatch"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        "mmpos.integrations.diffusers",
        {"patch": "patching", "unpatch": "patching"},
        extra="all",
        what="mmpos.integrations.diffusers",
    )
