"""Documents placed under a scheme, with their exact ids as whole multiples of a unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.compare.family import SHIFTS, Document, spec
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.schemes import Scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray

__all__ = ["Batch", "Mask"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Batch:
    """A placed batch of documents.

    Args:
        documents: what was placed.
        table: where.
        values: (axes, tokens) whole numbers, ids times denominator; Python integers where int64 is too small.
        denominator: the common one of all ids.
    """

    documents: Sequence[Document]
    table: PositionTable
    values: npt.NDArray[Any]
    denominator: int

    @classmethod
    def placed(cls, scheme: Scheme, documents: Sequence[Document], start: int = 0) -> Batch:
        """Documents under a scheme."""
        table = place(SegmentTable.from_documents([list(document) for document in documents]), scheme, start)
        numerators, denominators = table.rationals()
        common = lcm(*set(table.denominator.tolist()))
        if (int(np.abs(numerators).max()) + SHIFTS[-1]) * common >= 2**62:
            numerators, denominators = numerators.astype(object), denominators.astype(object)
        return cls(documents, table, numerators * (common // denominators), common)

    @property
    def offsets(self) -> IntArray:
        """(documents,) first token of each document."""
        return self.table.cu_seqlens[:-1].astype(np.int64)

    @property
    def owner(self) -> IntArray:
        """(tokens,) document of each token."""
        return np.repeat(np.arange(len(self.documents)), self.table.lengths)

    def astray(self, other: Batch, shift: int = 0) -> Mask:
        """(tokens,) those whose ids in the other batch, of as many tokens, are not just shift more on every axis."""
        here, there = self.values + shift * self.denominator, other.values
        if self.denominator != other.denominator:
            here, there = here.astype(object) * other.denominator, there.astype(object) * self.denominator
        found: Mask = (here != there).any(axis=0)
        return found

    def taken(self, begin: int, lengths: IntArray) -> Batch:
        """Of each document the tokens from begin on, as many as told."""
        starts = self.offsets + begin
        tokens = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
        return Batch(
            self.documents, self.table.take(starts, starts + lengths), self.values[:, tokens], self.denominator
        )

    def document(self, document: int) -> Batch:
        """One document as it is placed here."""
        return Batch(
            [self.documents[document]],
            self.table.window([document], [0], [self.table.lengths[document]]),
            self.values[:, self.owner == document],
            self.denominator,
        )

    def any_token(self, mask: Mask) -> Mask:
        """(documents,) those with a token in the mask."""
        found: Mask = np.logical_or.reduceat(mask, self.offsets)
        return found

    def first_token(self, mask: Mask, document: int) -> int:
        """The first token of the mask in a document, counted from the document's first."""
        return int(mask[self.offsets[document] :].argmax())

    def at(self, document: int, token: int) -> str:
        """The position of a token as people write it."""
        return self.written(self.values[:, self.offsets[document] + token])

    def written(self, values: npt.NDArray[Any]) -> str:
        """A position, or a difference of two: a number, or several in brackets."""
        numbers = [str(Fraction(int(value), self.denominator)) for value in values]
        return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"

    def spec(self, document: int) -> str:
        """A document as the command line has it."""
        return spec(self.documents[document])
