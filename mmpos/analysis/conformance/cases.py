"""Cases, each a request to a program and the expected answer, and the comparison of an answer with the expected one."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from importlib import resources
from typing import Any

from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted, finite

__all__ = ["Case", "Tolerances", "load_cases"]

VECTORS = resources.files("mmpos.analysis.conformance") / "vectors"
MANIFEST = "manifest.json"

FRACTION = re.compile("-?[0-9]{1,40}/[1-9][0-9]{0,39}")
"""Pattern of fractions that are written as text."""

INEXACT = ("cos", "sin")
"""Fields with rounded numbers, which most programs compute in float32."""


@dataclass(frozen=True)
class Tolerances:
    """Largest distances at which numbers count as equal.

    Args:
        turned: for cos and sin; the stored values are within 1e-10 of the true ones.
        ids: for ids that are floats in the answer, or integers where fractions are expected, for programs that
            store fractions as floats.
    """

    turned: float = 1e-5
    ids: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            finite(f"tolerance of {name}", value, minimum=0)


@dataclass(frozen=True)
class Case:
    """A request and its answer.

    Args:
        name: file, line and number of the request, such as "rope-tie/0/3-chunk".
        request: the JSON object that is sent to a program.
        want: the fields of the answer; a null in them matches any value.
    """

    name: str
    request: Mapping[str, Any]
    want: Mapping[str, Any]

    def difference(self, answer: Mapping[str, Any], tolerances: Tolerances = Tolerances()) -> str | None:
        """Describe the first difference between an answer and the expected one; return None if there is none.

        >>> Case("mine/0/0-prefill", {}, {"position_ids": [[0, 1], [0, "1/2"]]}).difference({"position_ids": [[0, 1]]})
        'position_ids: got 1 value, want 2'
        """
        for field, want in self.want.items():
            if field not in answer:
                return f"{field}: missing, want {as_json(want)}"
            near = tolerances.turned if field in INEXACT else tolerances.ids
            message = _difference(field, answer[field], want, near)
            if message is not None:
                return message
        return None


def load_cases(patterns: Sequence[str] = ()) -> list[Case]:
    """Load all cases, or those whose names match a shell pattern, after verifying the checksums of their files.

    Args:
        patterns: shell patterns such as "rope-tie/*", "*-chunk" or "qwen2_vl/0/*"; * also matches slashes.

    Raises:
        InvalidInputError: the checksum of a file differs from the manifest, or a pattern matches no case.
    """
    cases: list[Case] = []
    for path, digest in json.loads((VECTORS / MANIFEST).read_bytes())["files"].items():
        data = (VECTORS / path).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise InvalidInputError(f"{path}: the checksum differs from {MANIFEST}; reinstall mmpos")
        for line in data.decode().splitlines():
            cases += _cases_of(json.loads(line))
    chosen: dict[str, Case] = {} if patterns else {case.name: case for case in cases}
    for pattern in patterns:
        matching = {case.name: case for case in cases if fnmatchcase(case.name, pattern)}
        if not matching:
            raise InvalidInputError(f"pattern: got {pattern!r}, which no case matches, want one such as 'rope-tie/*'")
        chosen |= matching
    return list(chosen.values())


def _cases_of(group: dict[str, Any]) -> Iterator[Case]:
    """Yield the cases about one batch; each request contains the whole batch, or only the document of its case."""
    questions, name = group.pop("cases"), group.pop("group")
    for number, question in enumerate(questions):
        case = f"{name}/{number}-{question['ask']}"
        want, document = question.pop("want"), question.pop("document", None)
        documents = group["documents"] if document is None else [group["documents"][document]]
        yield Case(case, {"case": case, **group, "documents": documents, **question}, want)


def _difference(where: str, got: Any, want: Any, near: float) -> str | None:
    if want is None:
        return None
    if isinstance(want, list):
        if not isinstance(got, list):
            return f"{where}: got {as_json(got)}, want {counted(len(want), 'value')} in a list"
        if len(got) != len(want):
            return f"{where}: got {counted(len(got), 'value')}, want {len(want)}"
        parts = (_difference(f"{where}[{i}]", *pair, near) for i, pair in enumerate(zip(got, want, strict=True)))
        return next((part for part in parts if part is not None), None)
    number = _number(got)
    if number is None:
        return f"{where}: got {as_json(got)}, want the number {want}"
    exact = isinstance(got, str) or (isinstance(got, int) and isinstance(want, int))
    if abs(number - Fraction(want)) <= (0 if exact else near):
        return None
    return f"{where}: got {cut(str(got))}, want {want}"


def _number(value: Any) -> Fraction | None:
    """Convert an integer, a finite float or text such as "9/2"; refuse other text: 1e999999999 would take too long."""
    if isinstance(value, str):
        return Fraction(value) if FRACTION.fullmatch(value) else None
    if isinstance(value, int) and not isinstance(value, bool):  # isfinite raises on large integers
        return Fraction(value)
    return Fraction(value) if isinstance(value, float) and math.isfinite(value) else None


def as_json(value: object) -> str:
    """Format a value as JSON for a message, and shorten it."""
    try:
        return cut(json.dumps(value))
    except RecursionError:
        return "lists in lists"


def cut(text: str) -> str:
    """Shorten text to 60 characters."""
    return text if len(text) <= 60 else f"{text[:57]}..."
