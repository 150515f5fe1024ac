"""The known mistakes, the most telling first: what makes their ids, and what to do about each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mmpos.analysis.diagnosis import axes, counting, documents, numbers, padding, placements
from mmpos.analysis.diagnosis.case import Case, Guess


@dataclass(frozen=True)
class Suspect:
    """A kind of mistake.

    Args:
        guesses: the ids that it gives in a case, one guess for each of its forms.
        remedy: what to do about it, in words that follow "To do: ".
    """

    guesses: Callable[[Case], Iterator[Guess]]
    remedy: str


SUSPECTS = (
    Suspect(numbers.cut_fractions, "keep ids as float64, or as exact integers in the table; never .long() them"),
    Suspect(numbers.low_precision, "keep ids out of casts to low precision: in int32, in float64, or in the table"),
    Suspect(numbers.narrow_integers, "hold ids in int32 or int64"),
    Suspect(
        counting.token_index, "give the model ids with all axes, as positions.dense() has them, in place of arange"
    ),
    Suspect(axes.permuted, "order the axes as the scheme does: (row, col) or (frame, row, col)"),
    Suspect(axes.sides_exchanged, "give grids as (frames, height, width), the rows of patches before the columns"),
    Suspect(axes.column_major, "flatten patches row after row, the column fastest"),
    Suspect(counting.start, "begin at the same id as the scheme, or tell it yours as start"),
    Suspect(
        placements.other_times,
        "give what the model's processor has: second_per_grid_ts, frames of one patch over frames per second",
    ),
    Suspect(placements.other_scheme, "compute ids by the scheme that the model was trained with"),
    Suspect(padding.other_side, "pad ids on the side where the token ids are padded"),
    Suspect(padding.counted, "begin at the first real token: left padding takes no ids"),
    Suspect(documents.not_reset, "begin every packed document at start, from cu_seqlens"),
    Suspect(documents.reset, "give one document as one, or the documents as several"),
    Suspect(placements.wrong_advance, "go on after a grid at the scheme's cursor: positions.next_positions has it"),
    Suspect(placements.unmerged, "divide height and width by the merge size before ids are computed"),
    Suspect(
        documents.delta_forgotten, "add the document's delta to the token index, or take ids from positions.decode"
    ),
    Suspect(documents.delta_of_another, "keep deltas with their documents, never on the model: positions.deltas"),
    Suspect(counting.one_token_off, "shift labels and not position ids: id and token have the same index"),
    Suspect(counting.constant, "look at what stands before the first difference: it takes another number of ids"),
)
"""In the order in which they are tried; casts first, since few bits make the ids of all other mistakes alike."""
