"""Record formats: each converts a raw record to an ordered list of texts and images, or raises an error."""

from collections.abc import Mapping
from types import MappingProxyType

from mmpos.data.formats.chat import Chat
from mmpos.data.formats.llava import FineVision, LLaVA
from mmpos.data.formats.pages import MMC4, Obelics
from mmpos.data.formats.pairs import HFImages, Pairs
from mmpos.data.formats.tar_documents import TarDocuments
from mmpos.data.formats.templates import ChatTemplate, TokenizerTemplate, Turn
from mmpos.data.formats.texts import Texts

__all__ = [
    "FORMATS",
    "MMC4",
    "Chat",
    "ChatTemplate",
    "FineVision",
    "HFImages",
    "LLaVA",
    "Obelics",
    "Pairs",
    "TarDocuments",
    "Texts",
    "TokenizerTemplate",
    "Turn",
]

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
