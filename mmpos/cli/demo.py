"""The demo: two photographs in a sentence, from parts to ids to a picture."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from mmpos.analysis.plot import plot_positions
from mmpos.cli import report
from mmpos.images import ImageProcessor
from mmpos.schemes import Scheme
from mmpos.segments.table import GRID
from mmpos.sequence.builder import InterleavedSequence, SequenceBuilder
from mmpos.sequence.tokenizers import ByteTokenizer


def run_demo(out: Console, scheme: Scheme, path: Path) -> None:
    """Print the sequence, its ids, its next position and delta, and draw its picture.

    Args:
        out: where to print.
        scheme: how to place it.
        path: where the picture goes, .png or .svg.
    """
    processor = ImageProcessor(backend="pillow", max_tokens=128)
    builder = SequenceBuilder(ByteTokenizer(), images=processor, scheme=scheme)
    photos = resources.files("mmpos") / "photos"
    coffee, cat = ((photos / name).read_bytes() for name in ("coffee.jpg", "chelsea.jpg"))
    sequence = builder.build(["A photo of a coffee: ", coffee, " and one of a cat: ", cat, "."])

    positions = sequence.positions
    plot_positions(positions, path, pictures=list(_pixels(sequence, processor)))

    texts, kinds = list(_texts(builder, sequence)), sequence.segments.kind
    names = [text.strip() if kind == GRID else repr(text) for text, kind in zip(texts, kinds, strict=True)]
    _line(out, "Sequence", "".join(texts))
    out.print()
    _line(out, "Ids", report.heading(positions, 0))
    out.print()
    report.show(out, report.segment_table(sequence.segments, positions, 0, names))
    out.print()
    if positions.resumable.all():
        (following,), (delta,) = positions.next_positions.tolist(), positions.deltas.tolist()
        _line(out, "Next", f"position {following} on every axis: there the answer begins")
        _line(out, "Delta", f"{delta}: while decoding, a token's id is its index plus this")
    _line(out, "Picture", str(path))


def _line(out: Console, name: str, text: str) -> None:
    out.print(f"{name:<10}", style="bold", end="")
    out.print(text, soft_wrap=True)


def _texts(builder: SequenceBuilder, sequence: InterleavedSequence) -> Iterator[str]:
    """Each segment in words."""
    stops = np.cumsum(sequence.segments.lengths)
    for s, stop in enumerate(stops.tolist()):
        _, height, width = sequence.segments.extents[:, s].tolist()
        if sequence.segments.kind[s] == GRID:
            yield f" {height}×{width} patches "
        else:
            yield builder.tokenizer.decode(sequence.input_ids[stop - width : stop].tolist())


def _pixels(sequence: InterleavedSequence, processor: ImageProcessor) -> Iterator[npt.NDArray[np.uint8]]:
    """(height, width, 3) each image as the model sees it, put together from its patches."""
    patches: npt.NDArray[Any] = np.zeros(0) if sequence.patches is None else sequence.patches
    side, merge = processor.patch_size, processor.spatial_merge_size
    done = 0
    for _, height, width in sequence.grid_thw.tolist():
        rows, columns = height * merge, width * merge
        image = patches[done : done + rows * columns].reshape(rows, columns, side, side, 3)
        done += rows * columns
        yield image.swapaxes(1, 2).reshape(rows * side, columns * side, 3)
