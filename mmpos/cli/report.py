"""The output of the commands: tables for people, at most 100 columns wide, and one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
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

if TYPE_CHECKING:
    from mmpos.integrations.models import ModelSettings

_SHORT = 24  # tokens whose ids are all printed
_MAX_DOCUMENTS, _MAX_SEGMENTS = 8, 20
_MAX_JSON_TOKENS = 2**22


def show(out: Console, table: Table) -> None:
    """Print a table without the spaces that pad its lines to one length."""
    with out.capture() as capture:
        out.print(table)
    for line in capture.get().splitlines():
        out.out(line.rstrip(), highlight=False)


@contextmanager
def progress_bar(unit: str, words: str = "", total: int | None = None) -> Iterator[Callable[..., None] | None]:
    """Show a bar on stderr while it is updated with what is done, the total and words; None without a terminal."""
    out = Console(stderr=True)
    if not out.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn(unit), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True) as bar:
        task = bar.add_task(words, total=total)

        def update(done: float, total: int, words: str = words) -> None:
            bar.update(task, completed=done, total=total, description=words)

        yield update


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Make a table without lines but one under its header; the columns in right hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def print_positions(out: Console, segments: SegmentTable, positions: PositionTable) -> None:
    """Print a table of segments per document, all ids of short ones, next position and delta."""
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
    """Name tokens, scheme and axes of a document."""
    length = int(positions.lengths[document])
    axes = ", ".join(axis_names(positions.axes))
    return f"{counted(length, 'token', ',')}, scheme {positions.scheme}, positions ({axes})"


def segment_table(
    segments: SegmentTable, positions: PositionTable, document: int, names: Sequence[str] | None = None
) -> Table:
    """Make a table with a line per segment: its tokens, what it is, its first and last position, and its steps.

    Args:
        segments: what was placed.
        positions: the placed table.
        document: which document.
        names: (segments,) what each segment of this document is; None counts tokens and patches.
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
        what = names[i] if names else _what(segments, begin + i)
        steps = _steps(positions, segments, begin + i, int(starts[i]))
        table.add_row(f"{a}" if a == b else f"{a}–{b}", what, position(ids[2 * i]), position(ids[2 * i + 1]), steps)
    return table


def schemes_table() -> Table:
    """Make a table of the schemes: axes, the ids that an image consumes, and the first line of the documentation."""
    table = new_table("scheme", "axes", "ids of\n24×24", "ids", "what it does", right=("axes", "ids of\n24×24"))
    for name, scheme in SCHEMES.items():
        try:
            consumed = str(ids_consumed(name, [Grid(24, 24)])[0])
        except UnsupportedError:
            consumed = "–"
        made = scheme()
        summary = (scheme.__doc__ or "").strip().splitlines()[0]
        table.add_row(name, str(made.axes), consumed, "fractions" if made.fractional else "integers", summary)
    return table


def settings_table(settings: ModelSettings) -> Table:
    """Make a table of the settings of a model that are not None, including the fields of rotary and placeholders."""
    parts = {"rotary": settings.rotary, "second_rotary": settings.second_rotary, "placeholders": settings.placeholders}
    names = ("image_markers", "video_markers", "start", "spatial_merge_size", "temporal_merge_size", "patch_size")
    values: dict[str, object] = {"model_type": settings.model_type, "scheme": settings.scheme.label}
    for part, inside in parts.items():
        if inside is not None:
            known = {field.name: getattr(inside, field.name) for field in fields(inside) if field.init}
            values |= {f"{part}.{name}": value for name, value in known.items()}
    values |= {name: getattr(settings, name) for name in names}
    table = new_table("setting", "value")
    for name, value in values.items():
        if value is not None:
            table.add_row(name, str(value))
    return table


def to_json_text(documents: Sequence[Document], positions: PositionTable, scheme: str) -> str:
    """Write everything about a batch as a JSON object, one key per line, with the words that name its scheme.

    Raises:
        LimitExceededError: more tokens than a JSON text should hold.
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
    """Write a JSON object with one key per line, for programs and for eyes."""
    return "{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()) + "}"


def save_ids(path: Path, positions: PositionTable) -> None:
    """Write the dense ids of a batch as a .npy file.

    Raises:
        InvalidInputError: a URL, or another suffix.
        OSError: the file cannot be written.
    """
    if local_path("--output", path).suffix.lower() != ".npy":
        raise InvalidInputError(f"--output: got {str(path)!r}, want a file ending in .npy")
    with whole_file(path) as file:
        np.save(file, positions.dense())


def save_html(option: str, path: Path, text: str) -> None:
    """Write a page that opens in any browser.

    Args:
        option: the option that names the file, for errors.
        path: the file, ending in .html.
        text: the page.

    Raises:
        InvalidInputError: a URL, or another suffix.
        OSError: the file cannot be written.
    """
    if local_path(option, path).suffix.lower() != ".html":
        raise InvalidInputError(f"{option}: got {str(path)!r}, want a file ending in .html")
    with whole_file(path) as file:
        file.write(text.encode())


def npy(positions: PositionTable) -> bytes:
    """Write the dense ids of a batch as the bytes of a .npy file."""
    file = BytesIO()
    np.save(file, positions.dense())
    return file.getvalue()


def exact(positions: PositionTable) -> list[list[Fraction]]:
    """Compute the exact position of every token, (tokens, axes)."""
    numerators, denominators = positions.rationals()
    rows = zip(*numerators.tolist(), denominators.tolist(), strict=True)
    return [[Fraction(value, denominator) for value in values] for *values, denominator in rows]


def position(values: Sequence[Fraction]) -> str:
    """Write a position as people do: a number, or several in brackets."""
    return str(values[0]) if len(values) == 1 else f"({', '.join(map(str, values))})"


def _ending(positions: PositionTable, document: int) -> str:
    """Name next position and delta of a document, or why there are none."""
    if not positions.resumable[document]:
        return f"no next position: under {positions.scheme} the end is not one whole id"
    following, delta = positions.documents[[NEXT_POSITION, DELTA], document].tolist()
    return f"next position {following}, delta {delta}"


def _what(segments: SegmentTable, s: int) -> str:
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
    """Name the moves inside a segment that starts at this token; those that move nothing are left out."""
    s = int(np.searchsorted(positions.offset, token, side="right")) - 1
    parts = [("col", positions.step_col)]
    if segments.kind[segment] >= CLIP:
        return ""  # of many pieces, each with steps of its own
    if segments.kind[segment] in (TEXT, AUDIO):
        parts = [("token", positions.step_col)]
    else:
        parts.insert(0, ("row", positions.step_row))
    if segments.extents[0, segment] > 1:
        parts.insert(0, ("frame", positions.step_frame))
    moves = []
    for name, part in parts:
        values = [Fraction(value, int(positions.denominator[s])) for value in part[:, s].tolist()]
        if any(values):
            moves.append(f"{name} +{position(values[:1] if len(set(values)) == 1 else values)}")
    return ", ".join(moves)


def _dense_rows(positions: PositionTable) -> list[str]:
    """Write the ids of a few tokens, one line per axis, columns flush right."""
    ids = exact(positions)
    lines = [["token", *map(str, range(len(ids)))]]
    for axis, name in enumerate(axis_names(positions.axes)):
        lines.append([name, *(str(values[axis]) for values in ids)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) for line in lines]
