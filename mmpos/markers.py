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
        row: stands after the patches of every row, for models that generate patch by patch or read rows of any length
            (Pixtral's [IMG_BREAK]); None where rows follow each other. With it every image has row separators.
    """

    begin: str | int = "[IMG]"
    end: str | int = "[/IMG]"
    patch: str | int = "[PATCH]"
    row: str | int | None = None

    def ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Ids of begin, end and patch, and of row if there is one.

        Raises:
            InvalidInputError: a name is not one token of the tokenizer, or two markers share an id.
        """
        names = ["begin", "end", "patch"] + ["row"] * (self.row is not None)
        found = []
        for name in names:
            marker = getattr(self, name)
            token_id = tokenizer.token_to_id(marker) if isinstance(marker, str) else marker
            if token_id is None:
                raise InvalidInputError(f"markers.{name}: got {marker!r}, want a token that is one id of the tokenizer")
            found.append(integer(f"markers.{name}", token_id, minimum=0, maximum=INT32_MAX))
        if len(set(found)) < len(found):
            got, want = ", ".join(map(str, found[:-1])), "three" if self.row is None else "four"
            raise InvalidInputError(f"markers: got ids {got} and {found[-1]}, want {want} different ids")
        return tuple(found)
