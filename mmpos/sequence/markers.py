"""The special tokens of images, and their ids."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from mmpos.errors import InvalidInputError
from mmpos.sequence.tokenizers import Tokenizer
from mmpos.support.checks import INT32_MAX, IntArray, integer

__all__ = ["MarkerIds", "Markers"]


class MarkerIds(NamedTuple):
    """The ids of Markers; None for those that there are not."""

    begin: int | None
    end: int | None
    patch: int
    row: int | None
    last_row: int | None

    @property
    def margins(self) -> tuple[int, int]:
        """Tokens before the patches of an image, and after them."""
        return int(self.begin is not None), int(self.end is not None)

    def write(self, input_ids: IntArray, image_spans: IntArray, separators: IntArray) -> None:
        """Put the markers of images around and between their patches.

        Args:
            input_ids: (tokens,), changed in place.
            image_spans: (images, 2) first token of each image's patches and one past the last, separators included.
            separators: (separators,) the tokens that end rows.
        """
        for token_id, tokens in (
            (self.begin, image_spans[:, 0] - 1),
            (self.end, image_spans[:, 1]),
            (self.row, separators),
            (self.last_row, image_spans[:, 1] - 1),
        ):
            if token_id is not None:
                input_ids[tokens] = token_id


@dataclass(frozen=True)
class Markers:
    """The special tokens around and inside an image, by name or by id.

    Pixtral and Mistral Small write ``Markers(None, None, "[IMG]", "[IMG_BREAK]", "[IMG_END]")``.

    Args:
        begin: stands before the patches of an image; None where nothing does.
        end: stands after them, and after the row marker of the last row; None likewise.
        patch: stands for every patch in input_ids, where its embedding will go.
        row: stands after the patches of every row, for models that generate patch by patch or read rows of any length;
            None where rows follow each other. With it every image has row separators.
        last_row: stands in the place of row after the last row; None is row.
    """

    begin: str | int | None = "[IMG]"
    end: str | int | None = "[/IMG]"
    patch: str | int = "[PATCH]"
    row: str | int | None = None
    last_row: str | int | None = None

    def ids(self, tokenizer: Tokenizer) -> MarkerIds:
        """The id of each.

        Raises:
            InvalidInputError: a name is not one token of the tokenizer, or two markers share an id.
        """
        if self.last_row is not None and self.row is None:
            raise InvalidInputError(f"markers.last_row: got {self.last_row!r}, want markers.row, too")
        found = MarkerIds(*(self._id(field.name, tokenizer) for field in fields(self)))
        ids = [token_id for token_id in found if token_id is not None]
        if len(set(ids)) < len(ids):
            got = f"{', '.join(map(str, ids[:-1]))} and {ids[-1]}"
            raise InvalidInputError(f"markers: got ids {got}, want {len(ids)} different ids")
        return found

    def _id(self, name: str, tokenizer: Tokenizer) -> Any:
        marker = getattr(self, name)
        if marker is None and name != "patch":
            return None
        token_id = tokenizer.token_to_id(marker) if isinstance(marker, str) else marker
        if token_id is None:
            raise InvalidInputError(f"markers.{name}: got {marker!r}, want a token that is one id of the tokenizer")
        return integer(f"markers.{name}", token_id, minimum=0, maximum=INT32_MAX)
