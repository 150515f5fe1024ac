"""The special tokens of images, and their ids."""

from __future__ import annotations

from dataclasses import dataclass

from mmpos.checks import INT32_MAX, integer
from mmpos.errors import InvalidInputError
from mmpos.tokenizers import Tokenizer

__all__ = ["Markers"]


@dataclass(frozen=True)
class Markers:
    """The special tokens around and inside an image, by name or by id.

    Args:
        begin: stands before the patches of an image.
        end: stands after them.
        patch: stands for every patch in input_ids, where its embedding will go.
    """

    begin: str | int = "[IMG]"
    end: str | int = "[/IMG]"
    patch: str | int = "[PATCH]"

    def ids(self, tokenizer: Tokenizer) -> tuple[int, int, int]:
        """Ids of begin, end and patch.

        Raises:
            InvalidInputError: a name is not one token of the tokenizer, or two markers share an id.
        """
        found = []
        for name in ("begin", "end", "patch"):
            marker = getattr(self, name)
            token_id = tokenizer.token_to_id(marker) if isinstance(marker, str) else marker
            if token_id is None:
                raise InvalidInputError(f"markers.{name}: got {marker!r}, want a token that is one id of the tokenizer")
            found.append(integer(f"markers.{name}", token_id, minimum=0, maximum=INT32_MAX))
        begin, end, patch = found
        if len({begin, end, patch}) < 3:
            raise InvalidInputError(f"markers: got ids {begin}, {end} and {patch}, want three different ids")
        return begin, end, patch
