"""The formats of records: each makes of a raw record one ordered list of texts and images, or says what is wrong."""

from collections.abc import Mapping
from types import MappingProxyType

from mmpos.data.formats.chat import Chat
from mmpos.data.formats.energon import Energon
from mmpos.data.formats.hf import HFImages
from mmpos.data.formats.llava import LLaVA
from mmpos.data.formats.mmc4 import MMC4
from mmpos.data.formats.obelics import Obelics
from mmpos.data.formats.pairs import Pairs
from mmpos.data.formats.template import ChatTemplate, Turn

__all__ = [
    "FORMATS",
    "MMC4",
    "Chat",
    "ChatTemplate",
    "Energon",
    "HFImages",
    "LLaVA",
    "Obelics",
    "Pairs",
    "Turn",
]

FORMATS: Mapping[str, type] = MappingProxyType(
    {
        "obelics": Obelics,
        "mmc4": MMC4,
        "chat": Chat,
        "llava": LLaVA,
        "energon": Energon,
        "hf": HFImages,
        "pairs": Pairs,
    }
)
"""Every format by the name that the command line knows it by; options are keyword arguments."""
