"""What came of comparing ids with a scheme, as data and as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mmpos.support.checks import counted

__all__ = ["Diagnosis"]


@dataclass(frozen=True)
class Diagnosis:
    """Whether ids are those of a scheme, and if not where they first differ and why.

    Args:
        equal: whether all ids that were compared agree; the fields after num_documents are then empty.
        scheme: name of the scheme, with the parameters that are not the defaults.
        num_tokens: tokens that were compared, padding left out.
        num_documents: their documents.
        different_tokens: tokens of which an id differs.
        different_documents: documents with such a token.
        document: the first document with such a token.
        token: its first such token, counted from the document's first; of padding, the place in the padded row.
        what: what this token is, such as "row 0, column 1 of a grid of width 3 (segment 1)".
        axis: the first axis on which it differs.
        got: its ids as they came, one per row of the ids.
        want: its ids in the scheme, one per axis, exactly.
        cause: the mistake that explains the difference, if one is known that does.
        remedy: what to do about that mistake.
        explained: how many of the different tokens have exactly the ids that the mistake gives.
    """

    equal: bool
    scheme: str
    num_tokens: int
    num_documents: int
    different_tokens: int = 0
    different_documents: int = 0
    document: int | None = None
    token: int | None = None
    what: str | None = None
    axis: int | None = None
    got: tuple[int | float, ...] | None = None
    want: tuple[Fraction, ...] | None = None
    cause: str | None = None
    remedy: str | None = None
    explained: int = 0

    @property
    def sentences(self) -> tuple[str, ...]:
        """That all is well; or the first difference, the count, the cause and what to do."""
        documents = counted(self.num_documents, "document")
        if self.equal:
            return (f"All {counted(self.num_tokens, 'token')} of {documents} have the ids of {self.scheme}.",)
        got, want = _position(self.got or ()), _position(self.want or ())
        first = (
            f"documents[{self.document}], token {self.token}, is {self.what}: got {got}, want {want} in {self.scheme}."
        )
        count = (
            f"{self.different_tokens} of {counted(self.num_tokens, 'token')} differ, "
            f"in {self.different_documents} of {documents}."
        )
        if self.cause is None:
            many = self.different_tokens > 1
            why = "no known mistake gives the first two differences" if many else "one token alone proves no mistake"
            return first, count, f"Cause unknown: {why}."
        part = f" (so {self.explained} of the {self.different_tokens})"
        cause = f"Cause{'' if self.explained == self.different_tokens else part}: {self.cause}."
        return first, count, cause, f"To do: {self.remedy}."

    def __str__(self) -> str:
        return " ".join(self.sentences)


def _position(values: Sequence[Fraction | int | float]) -> str:
    words = [str(int(value)) if value == value // 1 else str(value) for value in values]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"
