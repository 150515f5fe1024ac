"""Plots of placed tables and of attention kernels: contents, pixels, equal bytes for equal tables, and the gallery."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import pixels, table, texts
from PIL import Image
from tolerance import EXACT, assert_within, gamma, printed, rotations

from mmpos.__main__ import main
from mmpos.analysis.plot import Kernel, attention_kernel, plot_attention, plot_positions, read_plane
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary
from mmpos.schemes import SCHEMES, LatentScheme, TMRope
from mmpos.segments.kinds import Audio, Clip, Grid, Text, Thumbnail, Tile
from mmpos.segments.table import SegmentTable

matplotlib = pytest.importorskip("matplotlib")

SEGMENTS: Any = SegmentTable.from_documents([[Text(3), Grid(2, 3)]])
KERNEL: Any = attention_kernel(table("1,2x2,1"), Rotary(8))
PLACED: Any = table("2x2")
OTHER: Any = 8
BLUE, VERMILLION, TEXT = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x22, 0x22, 0x22)


def test_columns_are_drawn_rightwards_and_rows_downwards() -> None:
    plane = read_plane(table("3,2x3,2"), 0)
    assert plane.text.tolist() == [[0, 1, 2, 14, 15], [0, 1, 2, 14, 15]]
    (image,) = plane.images
    assert image.points.tolist() == [[5, 8, 11, 5, 8, 11], [6, 6, 6, 10, 10, 10]]
    assert (image.square, image.spacing.tolist()) == ((2, 14), [3, 4])
    assert plane.end.tolist() == [[16], [16]]
    assert plane.bounds.tolist() == [[0, 16], [0, 16]]


@pytest.mark.parametrize(
    ("spec", "scheme", "gaps", "square"),
    [
        ("3,2x3,2", "rope-tie", ["gap (4, 3) on both sides"], (2, 14)),
        ("1,2x3,2", "rope-tie-fractional", ["gap (7/3, 7/4) on both sides"], (0, 7)),
        ("4,4x10,4", "naive-2d", ["gaps (1, 1) and (7, 1)"], (3, 14)),
        ("3,2x3", "rope-tie", [], None),
        ("2x3,2", "rope-tie", [], None),
        ("1,2x2,1", "rows", [], None),  # text is off the diagonal
        ("1,2x1x3,1", "mrope", ["gaps (1, 1) and (3, 1)"], (0, 4)),
        ("1,2x2,1x2,1", "mrope", [], None),  # no text between the images
    ],
)
def test_the_gaps_around_an_image_are_described(spec: str, scheme: str, gaps: list[str], square: Any) -> None:
    plane = read_plane(table(spec, scheme=scheme), 0)
    assert (plane.notes[:-1], plane.images[0].square) == (gaps, square)


def test_ids_on_a_single_axis_are_plotted_against_tokens() -> None:
    plane = read_plane(table("1", "1,1x2,1", scheme="v2pe"), 1)
    assert plane.names == ("token", "position id")
    assert (plane.text.tolist(), plane.end.tolist()) == ([[0, 3], [0, 2]], [[4], [3]])
    assert [image.points.tolist() for image in plane.images] == [[[1, 2], [0.25, 0.5]]]


def test_tables_with_padding_and_cut_images_can_be_read() -> None:
    plane = read_plane(table("3,2x3,2").slice(0, 7).pad(12), 0)
    assert plane.text.shape == (2, 3)
    assert [image.points.tolist() for image in plane.images] == [[[5, 8, 11, 5], [6, 6, 6, 10]]]


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if SCHEMES[name].text])
def test_every_token_of_every_scheme_is_drawn(scheme: str) -> None:
    plane = read_plane(table("2,2x3,1", scheme=scheme), 0)
    assert (plane.text.shape[1], sum(image.points.shape[1] for image in plane.images)) == (3, 6)
    assert bool(plane.end.size) == (scheme != "rows" and not issubclass(SCHEMES[scheme], LatentScheme))


def test_a_png_has_every_part_in_its_colour(tmp_path: Path) -> None:
    red = np.zeros((8, 8, 3), np.uint8) + np.array([255, 0, 0], np.uint8)
    plot_positions(table("20,24x24,10,16x36,12,4x4,2"), tmp_path / "ids.png", pictures=[red])
    with Image.open(tmp_path / "ids.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1320, 1360))
        assert "Software" not in picture.info
    red, green, blue = np.moveaxis(pixels(tmp_path / "ids.png"), 2, 0)
    for colour in (BLUE, VERMILLION, TEXT):
        assert ((red == colour[0]) & (green == colour[1]) & (blue == colour[2])).sum() > 200
    behind = (red > 240) & (green == blue) & (green > 40) & (green < 90)
    assert behind.sum() > 20_000  # behind the first image


def test_equal_tables_give_equal_bytes_whatever_settings_the_caller_uses(tmp_path: Path) -> None:
    for kind, start in (("svg", b"<?xml "), ("png", b"\x89PNG"), ("pdf", b"%PDF-")):
        plot_positions(table("3,2x3,2"), tmp_path / f"a.{kind}")
        with matplotlib.rc_context({"font.size": 30.0, "svg.fonttype": "path", "axes.facecolor": "red"}):
            plot_positions(table("3,2x3,2"), tmp_path / f"b.{kind}")
            assert matplotlib.rcParams["font.size"] == 30.0
        data = (tmp_path / f"a.{kind}").read_bytes()
        assert data.startswith(start)
        assert data == (tmp_path / f"b.{kind}").read_bytes()
        assert not any(word in data for word in (b"dc:date", b"CreationDate"))


@pytest.mark.parametrize("schemes", [["mrope"], ["rope-tie"], ["rope-tie", "mrope"]])
@pytest.mark.parametrize("spec", ["3,2x3,2", "7,3x5,7,6x2,2", "1,2x2,1,2x3,1,2x2,1,3x3,1,2x2,1"])
def test_the_legend_fits_the_picture(spec: str, schemes: list[str]) -> None:
    figure = plot_positions([table(spec, scheme=scheme) for scheme in schemes])
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width


def test_documents_with_the_same_index_are_drawn_side_by_side(tmp_path: Path) -> None:
    tables = [table("3", "1,2x2,1,2x3,1", scheme=scheme) for scheme in ("rope-tie", "mrope")]
    plot_positions(tables, tmp_path / "ids.svg")
    labels = texts(tmp_path / "ids.svg")
    heads = [word for word in labels if word.startswith("document")]
    assert heads == ["document 1, rope-tie", "document 1, mrope", "document 2, rope-tie", "document 2, mrope"]
    assert [word for word in labels if word.startswith("image")] == ["image 1", "image 2"]


def test_panels_of_one_kind_share_their_scale_by_default() -> None:
    tables = [table("4,4x6,4", scheme=scheme) for scheme in ("rope-tie", "mrope", "flatten")]
    for same, ends in ((True, [42, 42, 32]), (False, [42, 14, 32])):
        figure = plot_positions(tables, same_scale=same)
        assert [
            round(axes.get_xlim()[1] - max(0.8, end * 0.05)) for axes, end in zip(figure.axes, ends, strict=True)
        ] == ends


DRAWS: list[Callable[[Path | None], Any]] = [
    lambda path: plot_positions(table("3,2x3,2"), path),
    lambda path: plot_attention([KERNEL], path),
]


def test_a_plot_is_a_figure_that_notebooks_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures = [draw(None) for draw in DRAWS]
    assert list(tmp_path.iterdir()) == []
    for draw, figure in zip(DRAWS, figures, strict=True):
        draw(Path("a.png"))
        with Image.open(BytesIO(figure._repr_png_())) as small, Image.open("a.png") as large:
            assert (small.format, small.size) == ("PNG", (large.width // 2, large.height // 2))


TABLE = "want a PositionTable, as returned by mmpos.place"
CUT = "positions: got a cut image at token {}, want a complete one"


def kernel_of(positions: PositionTable, token: int | None = None) -> Callable[[], object]:
    return lambda: attention_kernel(positions, Rotary(8), token)


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: plot_positions(table("3"), "ids.bmp"), "path: got 'ids.bmp', want a file ending in .png, .svg or .pdf"),
    (lambda: plot_positions([], "ids.png"), "positions: got no document, want at least one"),
    (lambda: plot_positions(table(*["3"] * 10), "ids.png"), "positions: got 10 documents, want at most 9"),
    (lambda: plot_positions(table("1048577")), "positions: got 1048577 tokens, want at most 1048576"),
    (lambda: plot_positions([PLACED, table("1048577")]), "positions[1]: got 1048577 tokens, want at most 1048576"),
    (lambda: plot_positions(SEGMENTS), f"positions: got SegmentTable, {TABLE}"),
    (lambda: plot_positions([table("3"), SEGMENTS]), f"positions[1]: got SegmentTable, {TABLE}"),
    (lambda: plot_positions(PLACED, segments=SEGMENTS), "segments: got 9 tokens, want 4"),
    (lambda: attention_kernel(SEGMENTS, Rotary(8)), f"positions: got SegmentTable, {TABLE}"),
    (lambda: attention_kernel(PLACED, OTHER), "rotary: got int, want a Rotary, as returned by mmpos.rotary.Rotary"),
    (lambda: plot_attention(PLACED), "kernels: got PositionTable, want a list of Kernel"),
    (lambda: plot_attention(KERNEL), "kernels: got Kernel, want a list of Kernel"),
    (lambda: plot_attention([]), "kernels: got none, want at least one"),
    (lambda: plot_attention([KERNEL] * 7), "kernels: got 7, want at most 6"),
    (lambda: plot_attention([OTHER]), "kernels[0]: got int, want a Kernel, as returned by attention_kernel"),
    (kernel_of(table("1", "2x2")), "positions: got 2 documents, want 1"),
    (kernel_of(table("3")), "positions: got no image, want at least one"),
    (kernel_of(table("3,2x2"), 2), "token: got 2, which is text, want a patch of an image"),
    (kernel_of(table("3,2x2"), 7), "token: got 7, want <= 6"),
    (kernel_of(table("3,2x2").slice(0, 6)), CUT.format(3)),
    (kernel_of(table("3,2x2").slice(4, 7), 0), CUT.format(0)),
    (kernel_of(table("3x2x2", scheme="grid-2d").slice(2, 10), 0), CUT.format(0)),
    (kernel_of(table("3,2x2", scheme="mrope")), "positions: got 3 axes, want 2 as in rotary"),
    (kernel_of(table("65536,2x2")), "positions: got 65540 tokens, want at most 65536"),
]


@pytest.mark.parametrize(("draw", "message"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_arguments_are_refused(draw: Callable[[], object], message: str) -> None:
    with pytest.raises(LimitExceededError if "want at most" in message else InvalidInputError) as raised:
        draw()
    assert str(raised.value) == message


SPOKEN = SegmentTable.from_documents(
    [[Text(2), Audio(2), Clip(1, 2, frames=2, audio=3, seconds_per_frame=1), Text(1), Grid(1, 2), Text(1)]]
)
TILED = SegmentTable.from_documents([[Text(3), Thumbnail(4, 4), Tile(3, 3), Tile(3, 3, tokens_after=1), Text(3)]])


def test_segments_distinguish_audio_and_clips_from_text() -> None:
    plane = read_plane(place(SPOKEN, TMRope(tokens_per_second=2, seconds_per_chunk=1)), 0, SPOKEN)
    # Both markers before the clip are at 4, both after it at 8, and its last audio token is at 7.
    assert plane.text.tolist() == [[0, 1, 4, 4, 8, 8, 9, 12]] * 2
    assert plane.audio.tolist() == [[2, 3, 5, 6, 7]] * 2
    clip, image = plane.images
    assert (clip.noun, clip.square) == ("clip", None)
    assert clip.points.tolist() == [[5, 6, 5, 6], [5, 5, 5, 5]]
    assert (image.noun, image.square) == ("image", (9, 12))


def test_segments_distinguish_thumbnails_from_tiles() -> None:
    plane = read_plane(place(TILED, "mrope-canvas"), 0, TILED)
    thumbnail, left, right = plane.images
    assert [(image.noun, image.square) for image in plane.images] == [("thumbnail", None), *[("tile", None)] * 2]
    assert thumbnail.points.tolist() == [[3, 5, 6, 8] * 4, [*[3] * 4, *[4] * 8, *[5] * 4]]
    assert left.points.tolist() == [[3, 4, 5] * 3, [3, 3, 3, 4, 4, 4, 5, 5, 5]]
    assert right.points.tolist() == [[6, 7, 8] * 3, [3, 3, 3, 4, 4, 4, 5, 5, 5]]
    # Markers of the thumbnail and of each tile, and the token after the last tile.
    rows_and_columns = [[2, 6, 3, 5, 3, 5, 3], [2, 9, 3, 5, 6, 8, 3]]
    assert plane.text.tolist() == [[0, 1, 2, *line, 10, 11, 12] for line in reversed(rows_and_columns)]


def test_a_video_placed_in_pieces_is_one_image_if_segments_are_passed() -> None:
    segments = SegmentTable.from_documents([[Text(1), Grid(1, 2, frames=3, seconds_per_frame=1), Text(1)]])
    placed = place(segments, "tmrope")
    assert [image.points.shape for image in read_plane(placed, 0).images] == [(2, 2)] * 3
    (image,) = read_plane(placed, 0, segments).images
    assert (image.noun, image.points.tolist()) == ("image", [[1, 2] * 3, [1, 1] * 3])


def test_legends_list_audio_clips_thumbnails_and_tiles(tmp_path: Path) -> None:
    path = tmp_path / "ids.svg"
    plot_positions(place(SPOKEN, "tmrope"), path, segments=SPOKEN)
    assert [word for word in texts(path) if word.partition(" ")[0] in ("text", "audio", "clip", "image")][-4:] == [
        "text", "audio", "clip 1", "image 2",
    ]  # fmt: skip
    plot_positions(place(TILED, "mrope-canvas"), path, segments=TILED)
    assert {"thumbnail 1", "tile 2", "tile 3"} <= set(texts(path))


def test_a_kernel_is_the_mean_cosine_over_pairs() -> None:
    # θ = 1, .01; text (0, 0), patches (3, 2) (3, 4), text (6, 6); rows rotate the first pair, columns the second.
    computed = attention_kernel(table("1,1x2,1"), Rotary(4))
    assert (computed.label, computed.query) == ("rope-tie, interleaved", (0, 1))
    assert computed.patches.tolist() == [[printed("0.9999000033"), 1.0]]
    assert computed.before.tolist() == [printed("0.0046038050")]  # (cos 3 + cos .04) / 2
    assert computed.after.tolist() == [printed("0.0049037550")]  # (cos 3 + cos .02) / 2


@pytest.mark.parametrize(
    ("scheme", "rotary"),
    [
        ("rope-tie", Rotary(32, theta=500000.0)),
        ("rope-tie-v2", Rotary(32, allocation="split")),
        ("flatten", Rotary(32, axes=1)),
        ("mrope", Rotary(32, allocation="sections", mrope_section=[4, 6, 6])),
        ("mrope", Rotary(32, allocation=[1, 2] * 6 + [-1] * 4)),
        ("mrope", Rotary(32, allocation="heads", head_axes=[2, 0, -1, 1])),
    ],
)
def test_a_kernel_equals_the_scores_of_rotated_queries_and_keys(scheme: str, rotary: Rotary) -> None:
    torch = pytest.importorskip("torch")
    from mmpos.rotary import apply_rotary

    placed = table("5,3x4,6", scheme=scheme)
    computed = attention_kernel(placed, rotary, token=9)
    x = torch.zeros(placed.num_tokens, len(rotary.head_axes or (0,)), 32)
    x[..., :16] = 1  # the same direction in every pair
    q, _ = apply_rotary(x, None, placed, rotary)
    scores = (q[9] * q).sum(-1).mean(1).double().numpy() / 16
    assert computed.query == (1, 0)
    # A score is the mean over 16 pairs, each the sum of two products of rotated channels, which are below 2.
    bound = 8 * float(rotations(q, EXACT).max()) + 2 * gamma(32)
    assert_within(np.concatenate([computed.before[::-1], computed.patches.ravel(), computed.after]), scores, bound)


def test_the_default_query_is_the_middle_patch_of_the_first_images_middle_frame() -> None:
    rotary = Rotary(12, axes=3)
    assert attention_kernel(table("2,4x4,1,3x3,1", scheme="mrope"), rotary).query == (2, 2)
    computed = attention_kernel(table("2,3x2x4,1", scheme="mrope"), rotary)
    assert (computed.query, computed.patches.shape, computed.patches[1, 2]) == ((1, 2), (2, 4), 1)
    same = attention_kernel(table("2,3x2x4,1", scheme="mrope"), rotary, token=2 + 8 + 6)
    assert (computed.patches == same.patches).all()
    assert (computed.before == same.before).all()


def test_a_kernel_covers_only_the_text_next_to_the_image() -> None:
    computed = attention_kernel(table("7,2x2,3,2x3,5"), Rotary(8), token=16)
    assert (computed.query, computed.patches.shape, computed.before.size, computed.after.size) == ((0, 2), (2, 3), 3, 5)
    padded = attention_kernel(table("7,2x2,3").pad(20), Rotary(8))
    assert (padded.before.size, padded.after.size) == (7, 3)


def kernel(label: str, **changed: Any) -> Kernel:
    patches = np.linspace(0.2, 1, 12).reshape(3, 4)
    values = {"query": (2, 3), "patches": patches, "before": patches[0], "after": patches[1]}
    return Kernel(label, **{**values, **changed})


def test_maps_share_one_scale_from_the_smallest_cosine_to_one() -> None:
    flat = kernel("flat", patches=np.full((3, 4), 0.6))
    figure = plot_attention([kernel("low"), *[flat] * 4])  # two rows, the last one incomplete
    maps = [axes.images[0] for axes in figure.axes if axes.images]
    assert [image.get_clim() for image in maps] == [(0.2, 1)] * 5
    assert [np.asarray(image.get_array()).tolist() for image in maps][1] == [[0.6] * 4] * 3


DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "gallery.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in PAGE.splitlines() if line.startswith("mmpos plot ")]


def test_every_command_is_followed_by_its_picture() -> None:
    blocks = re.findall(r"^```sh\nmmpos plot .* -o (\S+)\n```\n\n!\[.+\]\(gallery/(\S+)\)$", PAGE, re.MULTILINE)
    assert [written for written, _ in blocks] == [shown for _, shown in blocks]
    assert len(blocks) == len(COMMANDS) == PAGE.count("```sh") == PAGE.count("![")
    assert sorted(path.name for path in (DOCS / "gallery").iterdir()) == sorted(written for written, _ in blocks)


@pytest.mark.skipif(matplotlib.__version_info__ < (3, 11), reason="Matplotlib 3.10 draws text a little otherwise")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command[-1]))
def test_a_command_draws_the_picture_below_it(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command[1:]) == 0
    drawn, kept = pixels(tmp_path / command[-1]), pixels(DOCS / "gallery" / command[-1])
    # Cosines computed on another processor may change a shade slightly; one extra letter changes a hundred times as
    # much.
    assert drawn.shape == kept.shape
    assert np.abs(drawn.astype(np.int16) - kept).mean() < 2e-4


def test_pictures_are_small() -> None:
    assert sum(path.stat().st_size for path in (DOCS / "gallery").iterdir()) < 1_700_000
