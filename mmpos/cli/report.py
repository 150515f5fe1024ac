"""The output of the commands: tables of at most 100 columns for readers, and JSON objects for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from mmpos.cli.options import Document, to_json
from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions.place import ids_consumed
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import DELTA, NEXT_POSITION, axis_names
from mmpos.schemes import SCHEMES
from mmpos.segments.kinds import AUDIO, CLIP, GRID, TEXT, THUMBNAIL, Grid
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted
from mmpos.support.files import local_path, whole_file
from mmpos.support.program import console

if TYPE_CHECKING:
    from mmpos.integrations.models import ModelSettings

_SHORT = 24  # largest number of tokens for which all ids are printed
_MAX_DOCUMENTS, _MAX_SEGMENTS = 8, 20
_MAX_JSON_TOKENS = 2**22


def show(out: Console, table: RenderableType) -> None:
    """Print a table or a text without trailing spaces."""
    with out.capture() as capture:
        out.print(table)
    for line in capture.get().splitlines():
        out.out(line.rstrip(), highlight=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[float, int | None, str], None] | None]:
    """Show a bar on stderr, and yield its update function of done, total and words, or None without a terminal."""
    out = Console(stderr=True)
    if not out.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, words: bar.update(task, completed=done, total=total, description=words)


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Create a table with a line only under its header; the columns in ``right`` are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def show_values(values: Mapping[str, str], *header: str) -> None:
    """Print names and values in two columns, under a header if there is one."""
    table = new_table(*(header or ("", "")))
    table.show_header = bool(header)
    for name, value in values.items():
        table.add_row(name, value)
    show(console(), table)


def print_positions(out: Console, segments: SegmentTable, positions: PositionTable) -> None:
    """Print each document's table of segments, all its ids if it is short, its next position and its delta."""
    if not positions.num_documents:
        out.print("no documents")
    for d in range(min(positions.num_documents, _MAX_DOCUMENTS)):
        if d:
            out.print()
        name = f"document {d + 1}: " if positions.num_documents > 1 else ""
        out.print(f"{name}{heading(positions, d)}\n")
        show(out, segment_table(segments, positions, d))
        first, stop = positions.cu_seqlens[d : d + 2].tolist()
        if stop - first <= _SHORT:
            rows = _dense_rows(positions.slice(first, stop))
            if max(map(len, rows)) <= out.width:
                out.print("", *rows, sep="\n")
        out.print(f"\n{_ending(positions, d)}")
    if (more := positions.num_documents - _MAX_DOCUMENTS) > 0:
        out.print(f"\n… and {counted(more, 'more document')} (--json prints them all)")


def heading(positions: PositionTable, document: int) -> str:
    """Return a line with a document's number of tokens, scheme and axes."""
    length = int(positions.lengths[document])
    axes = ", ".join(axis_names(positions.axes))
    return f"{counted(length, 'token', ',')}, scheme {positions.scheme}, positions ({axes})"


def segment_table(
    segments: SegmentTable, positions: PositionTable, document: int, names: Sequence[str] | None = None
) -> Table:
    """Create a table with one line per segment: tokens, description, first and last position, and steps.

    Args:
        segments: the segments of the batch.
        positions: the placed table.
        document: index of the document.
        names: (segments,) description of each segment of the document; None describes its tokens or patches.
    """
    begin, end = segments.segment_offsets[document : document + 2].tolist()
    stops = np.cumsum(segments.lengths)[begin:end]
    starts = stops - segments.lengths[begin:end]
    corners = np.stack([starts, stops - 1], axis=1).ravel()
    ids = exact(positions.take(corners, corners + 1))
    start_of_document = int(positions.cu_seqlens[document])
    table = new_table("tokens", "what", "first", "last", "steps")
    skipped = range(_MAX_SEGMENTS - 4, end - begin - 4) if end - begin > _MAX_SEGMENTS else range(0)
    for i in range(end - begin):
        if i in skipped:
            if i == skipped[0]:
                table.add_row("…", f"{len(skipped)} more segments", "…", "…", "…")
            continue
        a, b = int(starts[i]) - start_of_document, int(stops[i]) - start_of_document - 1
        name = names[i] if names else _described(segments, begin + i)
        steps = _steps(positions, segments, begin + i, int(starts[i]))
        table.add_row(f"{a}" if a == b else f"{a}–{b}", name, position(ids[2 * i]), position(ids[2 * i + 1]), steps)
    return table


class SchemeRow(NamedTuple):
    """What the list of schemes says about one; without ids if text cannot continue after an image."""

    axes: int
    ids_of_24x24: int | None
    fractional: bool
    description: str


def scheme_rows() -> dict[str, SchemeRow]:
    """Describe the schemes by name, each with the first line of its documentation."""
    rows = {}
    for name, scheme in SCHEMES.items():
        default = scheme()
        try:
            consumed = int(ids_consumed(default, [Grid(24, 24, seconds_per_frame=1)])[0])
        except UnsupportedError:
            consumed = None
        rows[name] = SchemeRow(
            default.axes, consumed, default.fractional, (scheme.__doc__ or "").strip().splitlines()[0]
        )
    return rows


def print_schemes(out: Console) -> None:
    """Print the schemes as a table."""
    table = new_table("scheme", "axes", "ids of\n24×24", "ids", "description", right=("axes", "ids of\n24×24"))
    for name, row in scheme_rows().items():
        consumed = "–" if row.ids_of_24x24 is None else str(row.ids_of_24x24)
        kind = "fractions" if row.fractional else "integers"
        table.add_row(name, str(row.axes), consumed, kind, row.description)
    show(out, table)


def settings_values(settings: ModelSettings) -> dict[str, object]:
    """Return a model's settings that are not None, including the fields of rotary and placeholders."""
    parts = {"rotary": settings.rotary, "second_rotary": settings.second_rotary, "placeholders": settings.placeholders}
    names = ("image_markers", "video_markers", "start", "spatial_merge_size", "temporal_merge_size", "patch_size")
    values: dict[str, object] = {"model_type": settings.model_type, "scheme": settings.scheme.label}
    for part, inside in parts.items():
        if inside is not None:
            known = {field.name: getattr(inside, field.name) for field in fields(inside) if field.init}
            values |= {f"{part}.{name}": value for name, value in known.items()}
    values |= {name: getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def to_json_text(documents: Sequence[Document], positions: PositionTable, scheme: str) -> str:
    """Format the documents and positions of a batch as a JSON object, one key per line.

    Raises:
        LimitExceededError: the batch has more than 4,194,304 tokens.
    """
    if positions.num_tokens > _MAX_JSON_TOKENS:
        raise LimitExceededError(f"--json: got {positions.num_tokens} tokens, want at most {_MAX_JSON_TOKENS}")
    known = positions.resumable.all()
    batch: dict[str, object] = {
        "scheme": scheme,
        "axes": positions.axes,
        "documents": to_json(documents),
        "position_ids": positions.dense().tolist(),
        "next_positions": positions.next_positions.tolist() if known else None,
        "deltas": positions.deltas.tolist() if known else None,
        "cu_seqlens": positions.cu_seqlens.tolist(),
    }
    if positions.fractional:
        batch["exact_position_ids"] = [[str(value) for value in axis] for axis in zip(*exact(positions), strict=True)]
    return json_lines(batch)


def json_lines(values: Mapping[str, object]) -> str:
    """Format a JSON object with one key per line."""
    lines = (f"{json.dumps(key)}: {json.dumps(value, default=str)}" for key, value in values.items())
    return "{" + ",\n ".join(lines) + "}"


def save(option: str, path: Path, suffix: str, content: bytes) -> None:
    """Write a file whose name must end in a suffix.

    Raises:
        InvalidInputError: the path, named by its option, is a URL or has another suffix.
        OSError: the file cannot be written.
    """
    if local_path(option, path).suffix.lower() != suffix:
        raise InvalidInputError(f"{option}: got {str(path)!r}, want a file ending in {suffix}")
    with whole_file(path) as file:
        file.write(content)


def npy(positions: PositionTable) -> bytes:
    """Return the dense ids of a batch as the bytes of a .npy file."""
    file = BytesIO()
    np.save(file, positions.dense())
    return file.getvalue()


def exact(positions: PositionTable) -> list[list[Fraction]]:
    """Compute the exact (tokens, axes) positions of all tokens."""
    numerators, denominators = positions.rationals()
    rows = zip(*numerators.tolist(), denominators.tolist(), strict=True)
    return [[Fraction(value, denominator) for value in values] for *values, denominator in rows]


def position(values: Sequence[Fraction]) -> str:
    """Format a position: a number, or several in parentheses."""
    return str(values[0]) if len(values) == 1 else f"({', '.join(map(str, values))})"


def _ending(positions: PositionTable, document: int) -> str:
    """Return a line with the next position and the delta of a document, or why the document has none."""
    if not positions.resumable[document]:
        return f"no next position: in {positions.scheme} the end is not a single integer id"
    following, delta = positions.documents[[NEXT_POSITION, DELTA], document].tolist()
    return f"next position {following}, delta {delta}"


def _described(segments: SegmentTable, s: int) -> str:
    kind = segments.kind[s]
    if kind != GRID and kind < CLIP:
        return f"{'audio' if kind == AUDIO else 'text'} {segments.lengths[s]}"
    frames, height, width = segments.extents[:, s].tolist()
    sides = f"{frames}×{height}×{width}" if frames > 1 else f"{height}×{width}"
    extra = 0 if segments.extra_tokens is None else segments.extra_tokens[s]
    if kind == CLIP:
        return f"clip {sides} with audio {extra}"
    if kind > CLIP:
        after = f" and {counted(int(extra), 'token')} after it" if extra else ""
        return f"{'thumbnail' if kind == THUMBNAIL else 'tile'} {sides}{after}"
    return f"grid {sides}" + ("" if segments.row_separator is None or not segments.row_separator[s] else " + [SEP]")


def _steps(positions: PositionTable, segments: SegmentTable, segment: int, token: int) -> str:
    """Format the steps inside the segment that starts at a token, without steps of 0."""
    s = int(np.searchsorted(positions.offset, token, side="right")) - 1
    parts = [("col", positions.step_col)]
    if segments.kind[segment] >= CLIP:
        return ""  # the segment has several pieces with different steps
    if segments.kind[segment] in (TEXT, AUDIO):
        parts = [("token", positions.step_col)]
    else:
        parts.insert(0, ("row", positions.step_row))
    if segments.extents[0, segment] > 1:
        parts.insert(0, ("frame", positions.step_frame))
    steps = []
    for name, part in parts:
        values = [Fraction(value, int(positions.denominator[s])) for value in part[:, s].tolist()]
        if any(values):
            steps.append(f"{name} +{position(values[:1] if len(set(values)) == 1 else values)}")
    return ", ".join(steps)


def _dense_rows(positions: PositionTable) -> list[str]:
    """Format the ids of a few tokens, one line per axis, with right-aligned columns."""
    ids = exact(positions)
    lines = [["token", *map(str, range(len(ids)))]]
    for axis, name in enumerate(axis_names(positions.axes)):
        lines.append([name, *(str(values[axis]) for values in ids)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) for line in lines]
