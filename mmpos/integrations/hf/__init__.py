"""mmpos positions for Transformers models and processors.

Shapes used throughout:

    input_ids        (batch, seq) token ids, or inputs_embeds (batch, seq, hidden) instead
    mm_position_ids  a PositionTable or DevicePositions of batch·seq tokens, or ids of shape (axes, batch, seq)
"""

from typing import TYPE_CHECKING

from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos.integrations.hf.get_rope_index import install, rope_index, uninstall
    from mmpos.integrations.hf.patching import patch, unpatch
    from mmpos.integrations.hf.processor import MMPosProcessor

__all__ = ["MMPosProcessor", "install", "patch", "rope_index", "uninstall", "unpatch"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        "mmpos.integrations.hf",
        {
            "MMPosProcessor": "processor",
            "install": "get_rope_index",
            "patch": "patching",
            "rope_index": "get_rope_index",
            "uninstall": "get_rope_index",
            "unpatch": "patching",
        },
        extra="hf",
        what="mmpos.integrations.hf",
    )
