"""Patch transformers of diffusers so that they accept a PositionTable, for images of mixed sizes, padded or packed."""

from mmpos_diffusers.patching import patch, unpatch

__all__ = ["patch", "unpatch"]
