"""Simple HTML for notebooks and reports: tables, token maps and self-contained pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
import numpy.typing as npt

__all__ = ["page", "paragraphs", "table", "token_map"]

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.7rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
"""

_WIDTH, _LEFT, _ROW = 800, 130, 30  # in pixels; a row has the bar of a document and, below it, segment numbers
_DIGIT = 7  # maximum width of a digit, in pixels
_COLOURS = ("#0072B2", "#D55E00", "#9aa4af")  # distinguishable for colour-blind readers


def paragraphs(sentences: Iterable[str]) -> str:
    """Write each sentence as a paragraph."""
    return "".join(f"<p>{escape(sentence)}</p>\n" for sentence in sentences)


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; its cells are escaped.

    >>> table(["a"], [["<"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;</td></tr></tbody></table>'
    """
    titles = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def token_map(
    states: npt.ArrayLike,
    offsets: npt.ArrayLike,
    segment_starts: npt.ArrayLike,
    names: Sequence[str],
    most: int = 40,
) -> str:
    """Draw a bar for each document, coloured by the states of its tokens, with a legend below.

    The map keeps its size; it scrolls horizontally on narrow screens.

    Args:
        states: (tokens,) state of each token, as an index into names.
        offsets: (documents + 1,) first token of each document, then the number of tokens.
        segment_starts: (segments,) first token of each segment; the number of the segment is written below the bar if
            there is room. The segment that contains the first token of a document with a state other than 0 is always
            numbered.
        names: names of up to three states.
        most: maximum number of bars; documents in which every token has state 0 are left out first.
    """
    state, edges, starts = (np.asarray(x, np.int64) for x in (states, offsets, segment_starts))
    documents = [d for d in range(edges.size - 1) if edges[d + 1] > edges[d]]
    if len(documents) > most:
        eventful = [d for d in documents if state[edges[d] : edges[d + 1]].any()]
        documents = (eventful or documents)[:most]
    longest = max((int(edges[d + 1] - edges[d]) for d in documents), default=1)
    scale, parts = (_WIDTH - _LEFT) / longest, list[str]()
    for row, d in enumerate(documents):
        y = row * _ROW
        inside = state[edges[d] : edges[d + 1]]
        parts.append(_text(0, y + 12, f"documents[{d}]"))
        parts += _runs(inside, scale, y, names)
        parts.append(_text(0, y + 25, "segments", size=11))
        parts += _numbers(starts - edges[d], inside, scale, y)
    y = len(documents) * _ROW + 16
    for k, name in enumerate(names):
        parts.append(f'<rect x="{_LEFT + 150 * k}" y="{y - 10}" width="12" height="12" fill="{_COLOURS[k]}"/>')
        parts.append(_text(_LEFT + 150 * k + 18, y, name))
    left_out = edges.size - 1 - len(documents)
    more = f"<p>{left_out} more documents are not drawn.</p>" if left_out else ""
    size = f'viewBox="0 0 {_WIDTH} {y + 6}" width="{_WIDTH}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{"".join(parts)}</svg>'
    return f'<div style="overflow-x: auto" tabindex="0">{svg}</div>{more}'


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y}" fill="currentColor" font-size="{size}">{escape(text)}</text>'


def _runs(state: npt.NDArray[np.int64], scale: float, y: int, names: Sequence[str]) -> list[str]:
    """Draw one rectangle for each run of tokens with the same state."""
    starts = np.flatnonzero(np.diff(state, prepend=-1))
    rectangles = []
    for first, last in zip(starts.tolist(), [*(starts[1:] - 1).tolist(), state.size - 1], strict=True):
        kind, tokens = int(state[first]), f"token {first}" if first == last else f"tokens {first} to {last}"
        width = max((last - first + 1) * scale, 0.8)
        rectangles.append(
            f'<rect x="{_LEFT + first * scale:.2f}" y="{y + 2}" width="{width:.2f}" height="12" '
            f'fill="{_COLOURS[kind]}"><title>{tokens}: {escape(names[kind])}</title></rect>'
        )
    return rectangles


def _numbers(starts: npt.NDArray[np.int64], state: npt.NDArray[np.int64], scale: float, y: int) -> list[str]:
    """Draw a tick and a number for each segment with enough room, and for the segment with the first nonzero state.

    Args:
        starts: (segments,) first token of each segment, relative to the document.
        state: (tokens,) states of the document's tokens.
        scale: pixels per token.
        y: top of the bar.
    """
    numbers = np.flatnonzero((starts >= 0) & (starts < state.size))
    widths = np.diff(starts[numbers], append=state.size) * scale
    first = numbers[starts[numbers] <= state.argmax()].max(initial=-1) if state.any() else -1
    marks, free = list[str](), 0.0
    for number, width in zip(numbers.tolist(), widths.tolist(), strict=True):
        x, room = _LEFT + float(starts[number]) * scale, 5.0 + _DIGIT * len(str(number))
        left = min(x, _WIDTH - room) if number == first else max(x, free)
        if number == first or left + room <= x + width:
            marks.append(f'<rect x="{x:.2f}" y="{y + 14}" width="1" height="12" fill="currentColor"/>')
            marks.append(_text(round(left + 3, 2), y + 25, str(number), size=11))
            free = left + room
    return marks


def page(title: str, body: str) -> str:
    """Write a complete page that loads no other resources.

    Args:
        title: title of the page, which is escaped.
        body: HTML of the page body.
    """
    name = escape(title)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n{body}\n</body>\n</html>\n"
    )
