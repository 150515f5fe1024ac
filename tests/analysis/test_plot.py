"""Pictures of placed tables: what is drawn, that it is really there, and that it is the same every time."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import pixels, table, texts
from PIL import Image

from mmpos.analysis.plot import (
    PhaseErrors,
    attention_kernel,
    id_growth,
    plot_attention,
    plot_growth,
    plot_phase_error,
    plot_positions,
)
from mmpos.analysis.plot.canvas import COLOURS
from mmpos.analysis.plot.positions import read_plane
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.place import place
from mmpos.rotary import Rotary
from mmpos.schemes import SCHEMES, Grid2D, TMRope
from mmpos.segments.kinds import Audio, Clip, Grid, Text, Thumbnail, Tile
from mmpos.segments.table import SegmentTable

pytest.importorskip("matplotlib")

SEGMENTS: Any = SegmentTable.from_documents([[Text(3), Grid(2, 3)]])
KERNEL: Any = attention_kernel(table("1,2x2,1"), Rotary(8))
PLACED: Any = table("2x2")
OTHER: Any = 8
BLUE, VERMILLION, TEXT = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x22, 0x22, 0x22)


def colours(path: Path) -> dict[tuple[int, int, int], int]:
    red, green, blue = np.moveaxis(pixels(path).astype(np.int64), 2, 0)
    codes = np.bincount((red << 16 | green << 8 | blue).ravel())
    return {(code >> 16, code >> 8 & 255, code & 255): int(codes[code]) for code in np.flatnonzero(codes).tolist()}


def test_the_plane_holds_columns_right_and_rows_down() -> None:
    plane = read_plane(table("3,2x3,2"), 0)
    assert plane.text.tolist() == [[0, 1, 2, 14, 15], [0, 1, 2, 14, 15]]
    (image,) = plane.images
    assert image.points.tolist() == [[5, 8, 11, 5, 8, 11], [6, 6, 6, 10, 10, 10]]
    assert (image.sides, image.square, image.upright, image.spacing) == ((2, 3, 1), (2, 14), True, 3)
    assert image.gaps == ((Fraction(4), Fraction(3)),) * 2
    assert image.label == "2×3\ngap (4, 3) on both sides"
    assert plane.end.tolist() == [[16], [16]]
    assert plane.bounds.tolist() == [[0, 16], [0, 16]]


def test_gaps_are_exact_fractions() -> None:
    (image,) = read_plane(table("1,2x3,2", scheme="rope-tie-fractional"), 0).images
    assert image.gaps == ((Fraction(7, 3), Fraction(7, 4)),) * 2


def test_gaps_that_differ_are_both_named() -> None:
    (image,) = read_plane(table("4,4x10,4", scheme="naive-2d"), 0).images
    assert image.label == "4×10\ngaps (1, 1) and (7, 1)"


def test_an_image_at_the_end_reaches_to_the_next_position() -> None:
    (image,) = read_plane(table("3,2x3"), 0).images
    assert image.square == (2, 14)


def test_an_image_at_the_start_has_no_text_before() -> None:
    (image,) = read_plane(table("2x3,2"), 0).images
    assert (image.square, image.label) == (None, "2×3")


def test_one_axis_is_drawn_over_tokens() -> None:
    plane = read_plane(table("1", "1,1x2,1", scheme="v2pe"), 1)
    assert plane.names == ("token", "position id")
    assert (plane.text.tolist(), plane.end.tolist()) == ([[0, 3], [0, 2]], [[4], [3]])
    assert [image.points.tolist() for image in plane.images] == [[[1, 2], [0.25, 0.5]]]


def test_three_axes_are_drawn_as_rows_and_columns() -> None:
    (image,) = read_plane(table("1,2x1x3", scheme="mrope"), 0).images
    assert image.points.tolist() == [[1, 2, 3, 1, 2, 3], [1, 1, 1, 1, 1, 1]]
    assert image.label.startswith("2×1×3\n")


def test_padding_and_cut_images_are_read() -> None:
    plane = read_plane(table("3,2x3,2").slice(0, 7).pad(12), 0)
    assert plane.text.shape == (2, 3)
    assert [image.points.tolist() for image in plane.images] == [[[5, 8, 11, 5], [6, 6, 6, 10]]]


def test_text_of_schemes_off_the_diagonal_is_text() -> None:
    plane = read_plane(table("3,2x2,2", scheme="rows"), 0)
    assert plane.text.tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 3, 3]]
    assert plane.end.shape == (2, 0)


def test_a_png_holds_every_part_in_its_colour(tmp_path: Path) -> None:
    plot_positions(table("20,24x24,10,16x36,12"), tmp_path / "ids.png")
    with Image.open(tmp_path / "ids.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1600, 1160))
        assert "Software" not in picture.info
    found = colours(tmp_path / "ids.png")
    assert [found.get(colour, 0) > 200 for colour in (BLUE, VERMILLION, TEXT)] == [True, True, True]


def test_an_svg_names_axes_images_and_next_position(tmp_path: Path) -> None:
    plot_positions(table("3,2x3,2"), tmp_path / "ids.svg", title="Three words")
    words = texts(tmp_path / "ids.svg")
    for line in (
        "column id",
        "row id (downwards, as in an image)",
        "text: 5 tokens",
        "gap (4, 3) on both sides",
        "next position: 16",
        "Three words",
    ):
        assert line in words


def test_the_same_table_gives_the_same_bytes(tmp_path: Path) -> None:
    positions = table("3,2x3,2")
    for kind, start in (("svg", b"<?xml "), ("png", b"\x89PNG"), ("pdf", b"%PDF-")):
        for name in ("a", "b"):
            plot_positions(positions, tmp_path / f"{name}.{kind}")
        data = (tmp_path / f"a.{kind}").read_bytes()
        assert data.startswith(start)
        assert data == (tmp_path / f"b.{kind}").read_bytes()
        assert not any(word in data for word in (b"dc:date", b"CreationDate"))


def test_settings_of_the_caller_change_nothing_and_stay(tmp_path: Path) -> None:
    import matplotlib

    plot_positions(table("3"), tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 30.0, "svg.fonttype": "path"}):
        plot_positions(table("3"), tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 30.0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "grid-2d"])
def test_every_scheme_can_be_drawn(tmp_path: Path, scheme: str) -> None:
    plot_positions(table("2,2x3,1", scheme=scheme), tmp_path / "ids.svg")
    words = texts(tmp_path / "ids.svg")
    assert f"{scheme}: 9 tokens" in words
    assert "text: 3 tokens" in words


def test_documents_are_drawn_one_below_the_other(tmp_path: Path) -> None:
    plot_positions(table("3", "2,4x4", "1"), tmp_path / "ids.png")
    with Image.open(tmp_path / "ids.png") as picture:
        assert picture.size in ((1600, 3480), (1600, 3479))  # matplotlib 3.10 cuts off what 3.11 rounds


def test_fine_images_are_thinned_and_say_so(tmp_path: Path) -> None:
    plot_positions(table("3,128x128,3,100x128,1000"), tmp_path / "ids.svg")
    assert texts(tmp_path / "ids.svg").count("(1 in 2 rows and columns)") == 2
    plot_positions(table("3,128x128,3"), tmp_path / "whole.svg")
    assert not any("rows and columns" in line for line in texts(tmp_path / "whole.svg"))


def test_points_that_would_melt_together_are_a_block(tmp_path: Path) -> None:
    plot_positions(table("9,8x8,9", scheme="rope-tie-v2"), tmp_path / "points.svg")
    assert (tmp_path / "points.svg").read_text().count("<use ") > 18 + 64
    plot_positions(table("900,8x8,9", scheme="rope-tie-v2"), tmp_path / "block.svg")
    assert 909 < (tmp_path / "block.svg").read_text().count("<use ") < 909 + 64
    assert "8×8" in " ".join(texts(tmp_path / "block.svg"))


def test_many_images_are_counted_in_the_legend(tmp_path: Path) -> None:
    plot_positions(table(",".join(["9,8x8"] * 12)), tmp_path / "ids.svg")
    assert "and 5 more images" in texts(tmp_path / "ids.svg")


def test_pictures_lie_under_their_images(tmp_path: Path) -> None:
    red = np.zeros((8, 8, 3), np.uint8) + np.array([255, 0, 0], np.uint8)
    plot_positions(table("3,4x4,3"), tmp_path / "ids.png", pictures=[red])
    reddish = sum(n for (r, g, b), n in colours(tmp_path / "ids.png").items() if r > 240 and 40 < g == b < 90)
    assert reddish > 20_000


@pytest.mark.parametrize(
    ("specs", "path", "error", "message"),
    [
        (["3"], "ids.bmp", InvalidInputError, "path: got '.*ids.bmp', want a file ending in .png, .svg or .pdf"),
        (["3"], "no/ids.png", FileNotFoundError, r"No such file or directory: '.*no/ids.png'"),
        ([], "ids.png", InvalidInputError, "positions: got no document, want at least one to draw"),
        (["3"] * 9, "ids.png", LimitExceededError, "positions: got 9 documents, want at most 8"),
        (["1048577"], "ids.png", LimitExceededError, "positions: got 1048577 tokens, want at most 1048576"),
    ],
)
def test_what_cannot_be_drawn(
    tmp_path: Path, specs: list[str], path: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plot_positions(table(*specs), tmp_path / path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("\ud800", "title: got text with a lone surrogate"),
        ("a\0b", "title: got 'a.x00b', want text without control characters"),
        (3, "title: got int, want text"),
    ],
)
def test_a_title_that_cannot_be_written(tmp_path: Path, title: object, message: str) -> None:
    target = tmp_path / "a.svg"
    for draw in DRAWS:
        with pytest.raises(InvalidInputError, match=f"^{message}"):
            draw(target, title)
    assert not target.exists()


DRAWS: list[Callable[[Path | None, Any], Any]] = [
    lambda path, title: plot_positions(table("3,2x3,2"), path, title),
    lambda path, title: plot_positions([table("3"), table("3", scheme="mrope")], path, title),
    lambda path, title: plot_attention([attention_kernel(table("1,2x2,1"), Rotary(8))], path, title),
    lambda path, title: plot_phase_error(PhaseErrors(np.array([1, 10]), *np.ones((3, 2))), path, title),
    lambda path, title: plot_growth(id_growth(["rope-tie"], [1, 2]), path, title),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_picture_is_a_figure_that_notebooks_show(
    draw: Callable[[Path | None, Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    from mmpos.analysis.plot.picture import Picture

    monkeypatch.chdir(tmp_path)
    figure = draw(None, "Hello")
    assert isinstance(figure, Picture)
    assert list(tmp_path.iterdir()) == []
    assert draw(Path("a.png"), "Hello").png() == figure.png() == Path("a.png").read_bytes()
    with matplotlib.rc_context({"font.size": 30.0, "axes.facecolor": "red"}):
        shown = figure._repr_png_()
    with Image.open(BytesIO(shown)) as small, Image.open("a.png") as large:
        assert (small.format, small.size) == ("PNG", (large.width // 2, large.height // 2))


def test_a_title_is_text_and_no_formula(tmp_path: Path) -> None:
    for title in ("$\\frac{$", "a $x$ and $y$", "costs 5$"):
        plot_positions(table("3"), tmp_path / "a.svg", title)
        assert title in texts(tmp_path / "a.svg")


TABLE = "want a PositionTable, as mmpos.place gives it"


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_positions(SEGMENTS), f"positions: got SegmentTable, {TABLE}"),
        (lambda: plot_positions(OTHER), f"positions: got int, {TABLE}"),
        (lambda: plot_positions([OTHER]), f"positions[0]: got int, {TABLE}"),
        (lambda: plot_positions([table("3"), SEGMENTS]), f"positions[1]: got SegmentTable, {TABLE}"),
        (lambda: attention_kernel(SEGMENTS, Rotary(8)), f"positions: got SegmentTable, {TABLE}"),
        (lambda: attention_kernel(PLACED, OTHER), "rotary: got int, want a Rotary, as mmpos.rotary.Rotary gives it"),
        (lambda: plot_attention(PLACED), "kernels: got PositionTable, want a list of Kernel"),
        (lambda: plot_attention(KERNEL), "kernels: got Kernel, want a list of Kernel"),
        (
            lambda: plot_attention([KERNEL, PLACED]),
            "kernels[1]: got PositionTable, want a Kernel, as attention_kernel gives it",
        ),
        (lambda: plot_growth(PLACED), "growth: got PositionTable, want a Growth, as id_growth gives it"),
        (lambda: plot_phase_error(OTHER), "errors: got int, want a PhaseErrors, as phase_errors gives it"),
    ],
)
def test_things_of_other_kinds_are_refused_by_name(draw: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        draw()
    assert str(raised.value) == message


def test_an_empty_document_of_a_view_is_an_empty_square(tmp_path: Path) -> None:
    empty = table("3", "2").take([3], [5])
    plot_positions(empty, tmp_path / "ids.svg")
    assert "document 1, rope-tie: 0 tokens" in texts(tmp_path / "ids.svg")


SPOKEN = SegmentTable.from_documents(
    [[Text(2), Audio(2), Clip(1, 2, frames=2, audio=3, seconds_per_frame=1), Text(1), Grid(1, 2), Text(1)]]
)


def test_segments_tell_audio_and_clips_apart() -> None:
    plane = read_plane(place(SPOKEN, TMRope(tokens_per_second=2, seconds_per_chunk=1)), 0, SPOKEN)
    # Both markers before the clip are at 4, those after it at 8, where its last audio token is at 7.
    assert plane.text.tolist() == [[0, 1, 4, 4, 8, 8, 9, 12]] * 2
    assert plane.audio.tolist() == [[2, 3, 5, 6, 7]] * 2
    clip, image = plane.images
    assert (clip.noun, clip.sides, clip.label, clip.square) == ("clip", (1, 2, 2), "2×1×2", None)
    assert clip.points.tolist() == [[5, 6, 5, 6], [5, 5, 5, 5]]
    assert (image.noun, image.square) == ("image", (9, 12))


def test_audio_of_one_axis_is_told_apart_in_each_document() -> None:
    segments = SegmentTable.from_documents([[Text(2)], [Audio(1), Text(1), Audio(2)]])
    planes = [read_plane(place(segments, "flatten"), d, segments) for d in range(2)]
    assert [plane.text.tolist() for plane in planes] == [[[0, 1], [0, 1]], [[1], [1]]]
    assert [plane.audio.tolist() for plane in planes] == [[[], []], [[0, 2, 3], [0, 2, 3]]]


def test_legends_name_audio_and_clips(tmp_path: Path) -> None:
    path = tmp_path / "ids.svg"
    placed = place(SPOKEN, "tmrope")
    plot_positions(placed, path, segments=SPOKEN)
    words = texts(path)
    assert words[words.index("text: 8 tokens") :][:3] == ["text: 8 tokens", "audio: 5 tokens", "clip 1: 2×1×2"]
    plot_positions([placed, place(SPOKEN, "tmrope-qwen3")], path, segments=SPOKEN)
    names = ["text", "audio", "clip 1", "image 2"]
    assert [word for word in texts(path) if word in names] == names


TILED = SegmentTable.from_documents([[Text(3), Thumbnail(4, 4), Tile(3, 3), Tile(3, 3, tokens_after=1), Text(3)]])


def test_segments_tell_thumbnails_and_tiles_apart() -> None:
    plane = read_plane(place(TILED, "mrope-canvas"), 0, TILED)
    thumbnail, left, right = plane.images
    names = [(image.noun, image.label, image.square, image.upright) for image in plane.images]
    assert names == [("thumbnail", "4×4", None, True), *[("tile", "3×3", None, True)] * 2]
    assert thumbnail.points.tolist() == [[3, 5, 6, 8] * 4, [*[3] * 4, *[4] * 8, *[5] * 4]]
    assert (thumbnail.column.tolist(), thumbnail.row.tolist()) == ([5 / 3, 0], [0, 2 / 3])
    assert left.points.tolist() == [[3, 4, 5] * 3, [3, 3, 3, 4, 4, 4, 5, 5, 5]]
    assert right.points.tolist() == [[6, 7, 8] * 3, [3, 3, 3, 4, 4, 4, 5, 5, 5]]
    # Markers of the thumbnail, of each tile, and the token after the last.
    rows_and_columns = [[2, 6, 3, 5, 3, 5, 3], [2, 9, 3, 5, 6, 8, 3]]
    assert plane.text.tolist() == [[0, 1, 2, *line, 10, 11, 12] for line in reversed(rows_and_columns)]


def test_a_video_in_pieces_is_one_image_with_its_segments() -> None:
    segments = SegmentTable.from_documents([[Text(1), Grid(1, 2, frames=3, seconds_per_frame=1), Text(1)]])
    placed = place(segments, "tmrope")
    assert [image.label for image in read_plane(placed, 0).images] == ["1×2"] * 3
    (image,) = read_plane(placed, 0, segments).images
    assert (image.noun, image.label, image.points.tolist()) == ("image", "3×1×2", [[1, 2] * 3, [1, 1] * 3])


def test_patches_in_blocks_are_read_by_blocks() -> None:
    segments = SegmentTable.from_documents([[Grid(2, 4)]])
    placed = place(segments, Grid2D(order="merged", spatial_merge_size=2))
    (band,) = read_plane(placed, 0, segments).images
    assert (band.label, band.points.tolist()) == ("2×2×2", [[0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 1, 1] * 2])


def test_a_thumbnail_is_rings_around_the_patches_of_its_tiles(tmp_path: Path) -> None:
    figure = plot_positions(place(TILED, "mrope-canvas"), tmp_path / "ids.svg", segments=TILED)
    words = texts(tmp_path / "ids.svg")
    assert words[words.index("thumbnail 1: 4×4") :][:3] == ["thumbnail 1: 4×4", "tile 2: 3×3", "tile 3: 3×3"]
    (axes,) = figure.axes
    drawn = {len(np.asarray(line.get_xdata())): line for line in axes.lines if line.get_marker() == "o"}
    ring, dots = drawn[16], drawn[9]
    assert (ring.get_markerfacecolor(), dots.get_markerfacecolor()) == ("none", COLOURS[2])
    assert ring.get_markersize() > dots.get_markersize()
    assert ring.get_zorder() > dots.get_zorder()
    plot_positions([place(TILED, "mrope-canvas"), place(TILED, "mrope-canvas", 5)], tmp_path / "b.svg", segments=TILED)
    names = ["thumbnail 1", "tile 2", "tile 3"]
    assert [word for word in texts(tmp_path / "b.svg") if word in names] == names


def test_a_thumbnail_too_fine_for_rings_hides_no_tile(tmp_path: Path) -> None:
    segments = SegmentTable.from_documents([[Text(900), Thumbnail(8, 8), Tile(8, 8), Text(9)]])
    figure = plot_positions(place(segments, "mrope-canvas"), tmp_path / "ids.svg", segments=segments)
    (axes,) = figure.axes
    rings = [line for line in axes.lines if len(np.asarray(line.get_xdata())) == 64]
    assert (len(axes.collections), [line.get_markerfacecolor() for line in rings]) == (1, ["none"])  # a block: the tile


def test_the_legend_of_panels_stays_on_the_page() -> None:
    figure = plot_positions([place(SPOKEN, "tmrope"), place(SPOKEN, "tmrope-qwen3")], segments=SPOKEN)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 7
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert legend.get_window_extent().y1 <= min(box.y0 for box in boxes if box is not None)


def test_segments_of_other_documents_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^segments: got 9 tokens, want 4$"):
        plot_positions(PLACED, segments=SEGMENTS)
