"""Record formats: each converts a raw record to an ordered list of texts and images, or raises an error."""

from collections.abc import Mapping
from types import MappingProxyType

from mmpos.data.formats.chat import Chat, FineVision, LLaVA
from mmpos.data.formats.pages import MMC4, Obelics, TarDocuments
from mmpos.data.formats.pairs import HFImages, Pairs, Texts
from mmpos.data.formats.templates import ChatTemplate, TokenizerTemplate, Turn

__all__ = [
    "FORMATS", "MMC4", "Chat", "ChatTemplate", "FineVision", "HFImages", "LLaVA", "Obelics", "Pairs", "TarDocuments",
    "Texts", "TokenizerTemplate", "Turn",
]  # fmt: skip

FORMATS: Mapping[str, type] = MappingProxyType(
    {
        "obelics": Obelics,
        "mmc4": MMC4,
        "chat": Chat,
        "llava": LLaVA,
        "finevision": FineVision,
        "hf": HFImages,
        "pairs": Pairs,
        "tar-documents": TarDocuments,
        "texts": Texts,
    }
)
"""Format classes by their names on the command line; options are keyword arguments."""
