"""Settings of diffusers transformers, read from their configs, and positions for mixed sizes, padded or packed."""

from typing import TYPE_CHECKING

from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos.integrations.diffusers.latents import pack_latents, unpack_latents
    from mmpos.integrations.diffusers.patching import patch, unpatch
    from mmpos.integrations.diffusers.settings import TransformerSettings, from_diffusers

__all__ = ["TransformerSettings", "from_diffusers", "pack_latents", "patch", "unpack_latents", "unpatch"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        "mmpos.integrations.diffusers",
        {
            "TransformerSettings": "settings",
            "from_diffusers": "settings",
            "pack_latents": "latents",
            "patch": "patching",
            "unpack_latents": "latents",
            "unpatch": "patching",
        },
        extra="diffusers",
        what="mmpos.integrations.diffusers",
    )
