"""Models and processors of Transformers with mmpos's positions.

Shapes used throughout:
    input_ids        (batch, seq) token ids; inputs_embeds (batch, seq, hidden) in their place
    mm_position_ids  a PositionTable or DevicePositions of batch·seq tokens, or ids of shape (axes, batch, seq)
"""

from typing import TYPE_CHECKING

from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    from mmpos.integrations.hf.patching import patch, unpatch
    from mmpos.integrations.hf.processor import MMPosProcessor

__all__ = ["MMPosProcessor", "patch", "unpatch"]

_ROOMS = {"MMPosProcessor": "processor", "patch": "patching", "unpatch": "patching"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _ROOMS:
            raise AttributeError(f"module 'mmpos.integrations.hf' has no attribute {name!r}")
        from importlib import import_module

        with needed_for("mmpos.integrations.hf", extra="hf"):
            return getattr(import_module(f"mmpos.integrations.hf.{_ROOMS[name]}"), name)
