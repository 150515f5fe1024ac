"""Record formats: each converts a raw record to an ordered list of texts and images, or raises an error."""

from collections.abc import Mapping
from types import MappingProxyType

from mmpos.data.formats.chat import Chat, LLaVA
from mmpos.data.formats.pages import MMC4, Obelics
from mmpos.data.formats.pairs import HFImages, Pairs
from mmpos.data.formats.templates import ChatTemplate, TokenizerTemplate, Turn

__all__ = [
    "FORMATS",
    "MMC4",
    "Chat",
    "ChatTemplate",
    "HFImages",
    "LLaVA",
    "Obelics",
    "Pairs",
    "TokenizerTemplate",
    "Turn",
]

FORMATS: Mapping[str, type] = MappingProxyType(
    {
        "obelics": Obelics,
        "mmc4": MMC4,
        "chat": Chat,
        "llava": LLaVA,
        "hf": HFImages,
        "pairs": Pairs,
    }
)
"""Format classes by their names on the command line; options are keyword arguments."""
