"""Settings of diffusers transformers, read from their configs, and latents of mixed sizes, padded or packed."""

from typing import TYPE_CHECKING

from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos.integrations.diffusers.latents import pack_latents, unpack_latents
    from mmpos.integrations.diffusers.settings import TransformerSettings, from_diffusers

__all__ = ["TransformerSettings", "from_diffusers", "pack_latents", "unpack_latents"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        "mmpos.integrations.diffusers",
        {
            "TransformerSettings": "settings",
            "from_diffusers": "settings",
            "pack_latents": "latents",
            "unpack_latents": "latents",
        },
        extra="all",
        what="mmpos.integrations.diffusers",
    )
