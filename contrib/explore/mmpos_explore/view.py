"""The contents of the explorer's page: all ids are computed here, none on the page."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from mmpos import PositionTable, place
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.rotary import Rotary
from mmpos.schemes import SCHEMES, Scheme
from mmpos.segments import AUDIO, CLIP, GRID, THUMBNAIL, TILE, Grid, SegmentTable, Text

MAX_TOKENS = 4096
"""Maximum number of tokens in a document on the page."""

HEAD_DIM = 128
"""Number of channels of the head whose phases are drawn."""

_NOUNS = {GRID: "image", AUDIO: "audio run", CLIP: "clip", THUMBNAIL: "thumbnail", TILE: "tile"}
_AXES = {1: ("id",), 2: ("row", "col"), 3: ("frame", "row", "col")}


@dataclass(frozen=True)
class Explored:
    """A document to draw.

    Args:
        segments: the segments of the document.
        code: Python code that assigns ``segments``.
        start: id of the first token.
    """

    segments: SegmentTable
    code: str
    start: int = 0


def code_of(document: Sequence[Text | Grid]) -> str:
    """Return the Python code that builds the segment table of a document.

    >>> print(code_of([Text(3), Grid(2, 3)]))
    segments = mmpos.SegmentTable.from_documents([[mmpos.Text(3), mmpos.Grid(2, 3)]])
    """
    parts = ", ".join(f"mmpos.{_call(part)}" for part in document)
    return f"segments = mmpos.SegmentTable.from_documents([[{parts}]])"


def view(
    explored: Explored, schemes: Sequence[Scheme], token: int, pair: int, sentences: Iterable[int]
) -> dict[str, object]:
    """Compute the contents of the page for one document in several schemes.

    Args:
        explored: the document.
        schemes: 1 to 3 schemes, which are shown side by side.
        token: the selected token; its score with every other token is computed.
        pair: the pair of channels whose phases are computed, 0 to 63.
        sentences: tokens to explain.

    Returns:
        A JSON-serializable object: the segments, and for each scheme ids, sentences, phases, scores and the Python code
        that computes the ids.

    Raises:
        InvalidInputError: the token or pair does not exist, or the number of schemes is not 1 to 3.
        LimitExceededError: the document has more than 4,096 tokens.
    """
    if not 1 <= len(schemes) <= 3:
        raise InvalidInputError(f"schemes: got {len(schemes)}, want 1 to 3")
    tokens = explored.segments.num_tokens
    if tokens > MAX_TOKENS:
        raise LimitExceededError(f"document: got {tokens} tokens, want at most {MAX_TOKENS}")
    for name, number, stop in (("token", token, tokens), ("pair", pair, HEAD_DIM // 2)):
        if type(number) is not int or not 0 <= number < stop:
            raise InvalidInputError(f"{name}: got {number!r}, want an integer from 0 to {stop - 1}")
    explained = list(sentences)
    return {
        "tokens": tokens,
        "token": token,
        "pairs": HEAD_DIM // 2,
        "segments": _segments(explored.segments),
        "schemes": [_scheme(explored, scheme, token, pair, explained) for scheme in schemes],
    }


def _segments(segments: SegmentTable) -> list[dict[str, object]]:
    """List the segments with their nouns, first tokens and sides."""
    first = np.cumsum(segments.lengths) - segments.lengths
    rows = zip(
        segments.kind.tolist(), first.tolist(), segments.lengths.tolist(), segments.extents.T.tolist(), strict=True
    )
    return [
        {"kind": "video" if kind == GRID and frames > 1 else _NOUNS.get(kind, "text"), "first": start, "length": length}
        | {"frames": frames, "height": height, "width": width}
        for kind, start, length, (frames, height, width) in rows
    ]


def _scheme(explored: Explored, scheme: Scheme, token: int, pair: int, explained: Sequence[int]) -> dict[str, object]:
    """Compute the ids, sentences, code and rotation of the document in one scheme."""
    positions = place(explored.segments, scheme, explored.start)
    resumable = bool(positions.resumable[0])
    numerators, denominators = positions.rationals()
    exact = [
        [str(Fraction(n, d)) for n, d in zip(axis, denominators.tolist(), strict=True)] for axis in numerators.tolist()
    ]
    return {
        "label": scheme.label,
        "axes": _axis_names(positions.axes),
        "ids": positions.dense().tolist(),
        "exact": exact if positions.fractional else None,
        "next": int(positions.next_positions[0]) if resumable else None,
        "delta": int(positions.deltas[0]) if resumable else None,
        "sentences": {str(index): positions.explain(index, explored.segments) for index in explained},
        "python": _program(explored, scheme),
        **_rotation(positions, token, pair),
    }


def _rotation(positions: PositionTable, token: int, pair: int) -> dict[str, object]:
    """Compute the phases of one pair, and the mean cosine over pairs between the selected token and every token."""
    rotary = _rotary(positions.axes)
    ids = positions.dense(dtype=np.float64)
    frequency, turning = rotary.inv_freq_array[pair], int(rotary.pair_axis[pair])
    phases = ids[turning] * frequency % (2 * np.pi)
    scores = np.cos(rotary.pair_ids(ids - ids[:, [token]]) * rotary.inv_freq_array[:, None]).mean(axis=0)
    axis = _axis_names(positions.axes)[turning]
    return {
        "pair": {"index": pair, "axis": axis, "inv_freq": float(frequency), "phases": phases.round(6).tolist()},
        "scores": scores.round(6).tolist(),
    }


def _axis_names(axes: int) -> list[str]:
    return [*_AXES.get(axes, (f"axis {axis}" for axis in range(axes)))]


@lru_cache
def _rotary(axes: int) -> Rotary:
    """Return the default rotation with this number of axes; cached, since exact frequencies are slow to compute."""
    return Rotary(head_dim=HEAD_DIM, axes=axes)


def _program(explored: Explored, scheme: Scheme) -> str:
    """Return the Python code that computes the ids of a scheme."""
    known = SCHEMES.get(scheme.name)
    module = "mmpos.schemes" if known is type(scheme) else type(scheme).__module__
    default = known is not None and known() == scheme
    value = repr(scheme.name) if default else f"{module}.{_call(scheme)}"
    start = f", start={explored.start}" if explored.start else ""
    code = f"{explored.code}\npositions = mmpos.place(segments, scheme={value}{start})\nprint(positions.dense())\n"
    imports = ["import mmpos"]
    if "Fraction(" in code:
        imports.insert(0, "from fractions import Fraction\n")
    if not default and module != "mmpos.schemes":
        imports.append(f"import {module}")
    return "\n".join([*imports, "", code])


def _call(value: object) -> str:
    """Format the call that constructs a dataclass, without default arguments."""
    arguments: list[str] = []
    by_name = False
    for name, parameter in inspect.signature(type(value)).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        argument = getattr(value, name)
        by_name = by_name or parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if argument == parameter.default:
            by_name = True
        else:
            arguments.append(f"{name}={argument!r}" if by_name else repr(argument))
    return f"{type(value).__name__}({', '.join(arguments)})"
