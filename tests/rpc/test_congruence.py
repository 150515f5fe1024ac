"""Clients return the same results as in-process calls, with the same types and the same errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clients import open_client
from hostile_images import encoded
from message_strategies import for_each, places
from PIL import Image
from results import assert_equal

import mmpos.rotary
from mmpos import SCHEMES, Grid, ImageSize, SegmentTable, SequenceBuilder, Text, Video, place
from mmpos.client import Client, Decode, Dense, InputIds, Pad, PositionsQuery, Shard, Spans, Take, View, Window
from mmpos.errors import InvalidInputError, LimitExceededError, MmposError
from mmpos.rotary import Rotary, YaRN, apply_rotary
from mmpos.rpc import beside
from mmpos.rpc.positions import get_query
from mmpos.rpc.v1 import positions_pb2
from mmpos.schemes import MRopeQwen25, RopeTieV2, Scheme, XDRope
from mmpos.segments import CLIP, THUMBNAIL, TILE, Audio, Clip, CropMarkers, Placeholders, Thumbnail, Tile
from mmpos_server.config import Profiles, ServerConfig
from mmpos_server.testing import running

COFFEE = Path(str(resources.files("mmpos"))) / "photos" / "coffee.jpg"
PROFILES = """
[profiles.default]
images = { backend = "pillow" }
[profiles.halves]
scheme = { name = "rope-tie-v2", axes = 3 }
images = { backend = "pillow", spatial_merge_size = 1, dtype = "float32", max_source_pixels = 1000 }
rotary = { head_dim = 32, axes = 3 }
[profiles.breaks]
markers = { row = 300 }
images = { backend = "pillow" }
[profiles.pixtral]
scheme = "flatten"
markers = { begin = "", end = "", patch = "[PATCH]", row = 300, last_row = 301 }
images = { backend = "pillow", spatial_merge_size = 1 }
[profiles.omni]
scheme = "tmrope"
markers = { video = 400, audio = 401, audio_begin = 402, audio_end = 403 }
images = { backend = "pillow" }
"""
SERVED = replace(ServerConfig.read(PROFILES), overload_ms=60_000)
LOCAL = Profiles.from_config(SERVED)
BUILDER = LOCAL.default.builder
SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(1), Grid(2, 2), Text(6)]])


@dataclass(frozen=True)
class Both:
    """Calls made by a sync client and an async client; their outcomes must be equal."""

    sync: Client
    other: Any

    def __call__(self, name: str, *arguments: object, profile: str | None = None, **options: object) -> Any:
        here, there = (
            _outcome(partial(getattr(client.with_options(profile=profile), name), *arguments, **options))
            for client in (self.sync, self.other)
        )
        assert_equal(here, there)
        if isinstance(here, MmposError):
            raise here
        return here


@pytest.fixture(scope="module")
def ask() -> Iterator[Both]:
    with (
        pytest.MonkeyPatch.context() as patch,
        running(SERVED, rotations=True) as address,
        open_client("sync", address, timeout=300) as sync,
        open_client("async", address, timeout=300) as async_client,
    ):
        patch.setattr(beside, "LEAST_BYTES", 64)
        yield Both(sync, async_client)


def _outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except MmposError as error:
        return error


def assert_alike(one: Callable[[], object], other: Callable[[], object]) -> None:
    """Assert that two calls return the same, or raise the same error."""
    assert_equal(_outcome(one), _outcome(other))


SOURCES: list[SegmentTable | Spans | InputIds] = [
    SEGMENTS,
    SegmentTable.from_documents([]),
    Spans([11, 17], [3, 0], [[1, 2, 3], [1, 4, 4]], [0, 1]),
    Spans([11], [3], [[2, 1, 3]], seconds_per_frame=[Fraction(1, 2)]),
    Spans([4], [], []),
    Spans([], [], []),
    InputIds([1, 5, 5, 1], Placeholders(image=5), [[1, 1, 2]]),
    InputIds(np.array([1, 5, 1, 5], np.int32), Placeholders(image=5), [[1, 2, 2]] * 2, spatial_merge_size=2),
    InputIds([1, 5, 7, 7, 1], Placeholders(image=5, video=7), [[1, 1, 1]], [[2, 1, 1]], seconds_per_frame=[0.5]),
    InputIds([7, 1, 7], Placeholders(image=5, video=7), None, [[2, 1, 1]], frames_apart=True),
    InputIds([1, 5, 2, 2], Placeholders(image=5), [[1, 1, 1]], cu_seqlens=[0, 2, 4]),
    InputIds([[0, 1, 5], [1, 1, 1]], Placeholders(image=5), [[1, 1, 1]], attention_mask=[[0, 1, 1], [1, 1, 1]]),
    InputIds([[0, 1]], Placeholders(image=5), attention_mask=np.array([[False, True]])),
]
MARKERS = CropMarkers(2, 3, 4, 5, 6)
CLIPS: list[SegmentTable | Spans | InputIds] = [
    SegmentTable.from_documents(
        [[Text(1), Audio(3), Clip(2, 1, frames=3, audio=20, seconds_per_frame=Fraction(2, 3))]]
    ),
    Spans([12], [1], [[2, 1, 1]], seconds_per_frame=[1], kind=[CLIP], extra_tokens=[3]),
    InputIds([1, 1, 7, 9, 9, 7, 1, 1], Placeholders(5, 7, 9), None, [[2, 1, 1]], seconds_per_frame=[1]),
    InputIds([9, 9, 1, 5], Placeholders(image=5, audio=9), [[1, 1, 1]], audio_lengths=[2]),
]
TILES: list[SegmentTable | Spans | InputIds] = [
    SegmentTable.from_documents([[Text(2), Thumbnail(1, 2, tokens_after=1), Tile(2, 3, tokens_after=2), Tile(2, 3)]]),
    Spans([11], [1, 5], [[1, 1, 2], [1, 1, 3]], kind=[THUMBNAIL, TILE], extra_tokens=[0, 1]),
    InputIds([1, 2, 9, 9, 3, 4, 9, 5, 6, 1], Placeholders(image=9, crops=MARKERS), [[1, 1, 2], [1, 1, 1]]),
]
VIDEO = Grid(1, 2, frames=3, seconds_per_frame=0.5)
KEYFRAMES = SegmentTable.from_documents(
    [[Text(2), VIDEO, Grid(1, 1, seconds_per_frame=0.5, first_frame=2)], [Grid(1, 1)]]
)
ROWS: list[SegmentTable | Spans | InputIds] = [
    Spans([12], [3], [[1, 2, 2]], row_separator=True),
    InputIds([5, 2, 5, 3, 1], Placeholders(image=5, rows=(2, 3)), [[1, 2, 1]]),
]
TOUCHING = SegmentTable.from_documents([[Grid(1, 1), Grid(1, 1)]])
VIEWS: list[list[View]] = [
    [Window([1, 0], [2, 9], [20, 1]), Decode([1, 2])], [Take([0, 5], [3, 7])], [Window([], [], [])],
    [Decode()], [Decode(3)], [Decode([2, 0])], [Decode([2, 0]), Pad()], [Pad([12, 20])],
    [Pad(18), Shard(1, 2, "contiguous")], [Pad(12), Shard(1, 3, "contiguous")], [Pad(20, "left"), Shard(0, 2)],
    [Pad(18), Shard(0, 2, "zigzag-sequence")], [Pad(18), Shard(1, 2, "contiguous-sequence")],
]  # fmt: skip
SCHEME_OBJECTS: list[str | Scheme] = [
    *(name for name in SCHEMES if SCHEMES[name].text),
    RopeTieV2(axes=3, rounding="floor"),
    MRopeQwen25(tokens_per_second=Fraction(25, 2)),
]
QUERIES = [
    *(PositionsQuery(source, "mrope-qwen2.5", strict=False) for source in SOURCES),
    *(PositionsQuery(source, "flatten") for source in ROWS),
    *(PositionsQuery(source, scheme) for source in CLIPS for scheme in ("tmrope", "tmrope-qwen3")),
    *(PositionsQuery(source, "mrope-canvas") for source in TILES),
    *(PositionsQuery(KEYFRAMES, scheme) for scheme in ("hunyuan-video", "cosmos3")),
    *(PositionsQuery(SEGMENTS, start=[5, 9], views=views) for views in VIEWS),
    *(PositionsQuery(SEGMENTS, scheme, dense=dense) for scheme in SCHEME_OBJECTS for dense in (None, Dense())),
    PositionsQuery(SegmentTable.from_documents([[Grid(2, 4)]]), "grid-2d"),
    PositionsQuery(TOUCHING, strict=False),
    PositionsQuery(SEGMENTS, start=-3, dense=Dense("int64")),
    PositionsQuery(SEGMENTS, start=-3, dense=Dense(np.float64, (1, 0, 0))),
    PositionsQuery(Spans([11, 17], [3, 0], [[1, 2, 3], [1, 4, 4]], [0, 1]), "rope-tie-fractional"),
    PositionsQuery(InputIds([1, 5, 5, 1], Placeholders(image=5), [[1, 1, 2]]), "mrope", start=[7]),
]
WRONG_VIEWS: list[View] = [
    Shard(0, 2), Shard(2, 2), Shard(0, 0), Shard(0, 1, "ring"),  # type: ignore[arg-type]
    Window([2], [0], [1]), Window([0], [0], [1, 2]), Take([3], [1]), Take([1.5], [2]),
    Decode(-1), Decode(2**40), Decode([0.5, 1]), Pad(3, "up"), Pad(9.5),  # type: ignore[arg-type]
]  # fmt: skip
WRONG_SOURCES: list[SegmentTable | Spans | InputIds] = [
    *TILES, *CLIPS[:3], KEYFRAMES, TOUCHING, Spans([4], [3], [[1, 2, 3]]), Spans([4, 4], [3], [[1, 2, 3]]),
    InputIds([258, 300], Placeholders(image=258, rows=(300, 301)), [[1, 1, 1]]), InputIds([1.5], Placeholders(image=5)),
    InputIds([1, 5, 1], Placeholders(image=5), [[1, 1, 2]]),
    InputIds([[1, 2]], Placeholders(image=5), attention_mask=[[0, 2]]),
]  # fmt: skip
WRONG = [
    *(PositionsQuery(source, "rope-tie") for source in WRONG_SOURCES),
    *(PositionsQuery(SEGMENTS, views=[view]) for view in WRONG_VIEWS),
    PositionsQuery(SEGMENTS, "mrope", views=[Decode(2), Decode(-1)]),
    *(PositionsQuery(SEGMENTS, start=start) for start in (2**31 - 5, 2**31, 0.5, [1, 2, 3])),
    *(PositionsQuery(SegmentTable.from_documents([[Grid(2, 2, frames=2)]]), name) for name in ("rope-tie", "ltx")),
    PositionsQuery(KEYFRAMES, "lumina2"),
    PositionsQuery(TOUCHING, "wan"),
    PositionsQuery(InputIds([1, 2, 9, 1], Placeholders(image=9, crops=MARKERS), [[1, 1, 1]]), "mrope-canvas"),
    PositionsQuery(InputIds([9, 9], Placeholders(image=5, audio=9), audio_lengths=[3]), "tmrope"),
    PositionsQuery(SEGMENTS, "nonsense"),
    PositionsQuery(SEGMENTS, "rows", views=[Decode()]),
    PositionsQuery(SEGMENTS, "v2pe", dense=Dense("int32")),
    PositionsQuery(SEGMENTS, dense=Dense(axes=(2,))),
    PositionsQuery(SEGMENTS, strict=1),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("query", "right"), [*((query, True) for query in QUERIES), *((query, False) for query in WRONG)]
)
def test_queries_match_local_calls(ask: Both, query: PositionsQuery, right: bool) -> None:
    want = _outcome(query.run)
    assert isinstance(want, MmposError) != right
    assert_equal(_outcome(lambda: ask("query", query)), want)


def test_random_queries_match_local_calls(ask: Both) -> None:
    def check(request: positions_pb2.PlaceRequest) -> None:
        query = get_query("query", request.query)
        assert_alike(lambda: ask.sync.query(query), query.run)

    for_each(places(), 200, check)


def test_place_accepts_views_and_refuses_lists(ask: Both) -> None:
    assert_equal(ask("place", SEGMENTS, "mrope", [5, 7], views=[Decode(2)]), place(SEGMENTS, "mrope", [5, 7]).decode(2))
    assert_alike(lambda: ask("place", [[Text(1)]]), lambda: place([[Text(1)]]))  # type: ignore[arg-type]


def test_streams_return_results_in_order_and_errors_in_place_of_failed_results(ask: Both) -> None:
    queries = [*QUERIES, *WRONG]
    results = list(ask.sync.stream(queries, errors="return"))
    assert_equal(results, [_outcome(query.run) for query in queries])


def test_the_profile_determines_scheme_placeholders_and_merge_size(ask: Both) -> None:
    result = ask("query", PositionsQuery(InputIds([1, 258, 258, 1], image_grid_thw=[[1, 2, 4]])), profile="default")
    want = InputIds([1, 258, 258, 1], Placeholders(image=258), [[1, 2, 4]], spatial_merge_size=2)
    assert_equal(result, PositionsQuery(want).run())
    scheme = ask("place", SEGMENTS, profile="halves").scheme
    assert scheme == "rope-tie-v2(axes=3)"
    with pytest.raises(InvalidInputError, match="profile: got 'x', want one of 'default', 'halves'"):
        ask("place", SEGMENTS, profile="x")


PHOTO = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
PALETTE = Image.fromarray(PHOTO).convert("P")
ROTATED = Image.fromarray(PHOTO)
ROTATED.getexif()[0x0112] = 6


FILE = encoded(Image.fromarray(PHOTO), "png")
PARTS: list[Any] = [
    ["A photo of ", COFFEE, " at dusk [IMG]"],
    ["é", [1, 2], Grid(2, 3), np.array([7])],
    [PHOTO, "and", torch.from_numpy(PHOTO).permute(2, 0, 1)],
    [FILE, memoryview(FILE), PHOTO[:, :, 0], PALETTE, ROTATED, ""],
    ["a", np.arange(40 * 30 * 4, dtype=np.uint16).reshape(40, 30, 4)],
    [ImageSize(300, 400)],
    ["a", Video([PHOTO, PHOTO[:30], COFFEE], times=[0, 0.5, 2]), "b", PHOTO],
    [Video([Grid(1, 2), ImageSize(90, 60)], seconds_per_frame=1, timestamp="")],
]
WRONG_PARTS: list[Any] = [
    [], "text", [PHOTO, ImageSize(30, 40)], ["a", Grid(1, 2, first_frame=3)], ["a", Thumbnail(1, 2)], ["a", Tile(1, 2)],
]  # fmt: skip


def test_invalid_build_arguments_are_refused(ask: Both) -> None:
    assert_alike(lambda: ask("build_batch", 5), lambda: BUILDER.build_batch(5))  # type: ignore[arg-type]
    for options, message in (
        ({"start": 0.5}, "start: got 0.5, want an integer"),
        ({"start": 2**63}, f"start: got {2**63}, want <= {2**63 - 1}"),
        ({"start": -(2**63) - 1}, f"start: got {-(2**63) - 1}, want >= {-(2**63)}"),
        ({"patches": 1}, "patches: got 1, want True or False"),
        ({"errors": "no"}, "errors: got 'no', want one of 'raise', 'return'"),
    ):
        assert str(_outcome(partial(ask, "build_batch", [], **options))) == message


BROKEN: list[Any] = [
    # Only a server refuses these parts …
    b"not a photo", [258], [-1], Grid(1, 2, row_separator=True), Video([PHOTO, b"not a photo"], times=[0, 1]),
    # … and a client cannot send these.
    "\ud800", None, 3, [1.5], Path("nowhere.png"), np.zeros((10, 10, 2), np.uint8), np.zeros((4, 4), np.float32),
    Video([PHOTO, np.zeros((10, 10, 2), np.uint8)], times=[0, 1]), Video([PHOTO], times=[0], timestamp="\ud800"),
]  # fmt: skip


def test_errors_name_the_first_of_two_broken_parts(ask: Both) -> None:
    documents = [["a", first, "b", second] for first in BROKEN for second in BROKEN]
    documents += [[Grid(1, 1), ImageSize(30, 40), PHOTO, broken] for broken in BROKEN]
    want = [_outcome(partial(BUILDER.build, parts)) for parts in documents]
    assert all(isinstance(outcome, MmposError) for outcome in want)
    assert_built(ask, BUILDER, [*documents, *PARTS[:2]])
    for parts, outcome in zip(documents[4::7], want[4::7], strict=True):
        assert_equal(_outcome(partial(ask, "build", parts)), outcome)
    for first in (4, 30, 60):
        batch = [["a"], *documents[first : first + 5]]
        assert_alike(partial(ask, "build_batch", batch), partial(BUILDER.build_batch, batch))


ROWED: list[list[Any]] = [["x", Grid(2, 3, row_separator=True)], ["x", PHOTO, Video([PHOTO] * 2, times=[0, 1])]]
PIXTRAL: list[list[Any]] = [["x", Grid(2, 3), Grid(1, 1)], [PHOTO, *ROWED[1]]]
TIMES = [Fraction(1001, 1000), None, Fraction(1)]
SPOKEN = ["a", Clip(1, 2, frames=3, audio=60, seconds_per_frame=TIMES[0]), Audio(3), Grid(1, 2)]
SPOKEN += [Clip(2, 1, frames=1, audio=1), "b", Grid(1, 1, frames=2, seconds_per_frame=1)]
SINGLE: list[list[Any]] = [["a", part] for part in (Audio(2), Clip(1, 2, frames=1, audio=2), [401])]
TIMED = ["a", Grid(1, 2, frames=2), "b", Grid(2, 1, frames=3, seconds_per_frame=0.5)]
NEIGHBOURS = ["a", Grid(1, 1), Grid(1, 1)]
BUILDS: list[tuple[Any, Any, list[Any]]] = [
    (None, None, [*PARTS, *WRONG_PARTS]),
    (None, "mrope", [TIMED, PARTS[0], ["b"], TIMED]),
    (None, "rope-tie", [["a"], NEIGHBOURS, ["b", Grid(1, 2)]]),
    (None, XDRope(counting="batch"), [PARTS[1], ["b"], PARTS[1]]),
    (None, "xd-rope", [PARTS[1], ["b"], PARTS[1]]),
    ("halves", None, [["x", PHOTO], ["y"], []]),
    *(("breaks", scheme, [["x"], *ROWED, TIMED]) for scheme in ("rope-tie", "flatten", "mrope")),
    ("pixtral", None, [*PIXTRAL, *PARTS[1:3]]),
    *(("omni", scheme, [["x"], SPOKEN, TIMED, SPOKEN, *SINGLE]) for scheme in ("tmrope", "tmrope-qwen3")),
    *((None, scheme, SINGLE) for scheme in ("mrope", "grid-2d")),
    *(("omni", scheme, SINGLE) for scheme in ("mrope", "grid-2d")),
]


def assert_built(ask: Both, builder: SequenceBuilder, documents: list[Any], **options: Any) -> None:
    """Assert that a batch of documents is built like each of them alone in this process."""
    results = ask("build_batch", documents, errors="return", **options)
    for d, (result, parts) in enumerate(zip(results, documents, strict=True)):
        want = _outcome(partial(builder.build, parts))
        assert_equal(result, type(want)(f"documents[{d}].{want}") if isinstance(want, MmposError) else want)


@pytest.mark.parametrize(("profile", "scheme", "documents"), BUILDS)
def test_builds_match_local_builds(ask: Both, profile: str | None, scheme: Any, documents: list[Any]) -> None:
    local = replace(LOCAL.get(profile).builder, start=5)
    local = local if scheme is None else replace(local, scheme=scheme)
    assert_built(ask, local, documents, profile=profile, scheme=scheme, start=5)
    alone = partial(ask, "build", documents[1], profile=profile, scheme=scheme, start=5)
    assert_alike(alone, partial(local.build, documents[1]))


def test_token_ids_of_built_sequences_have_the_positions_of_the_sequences(ask: Both) -> None:
    for parts in PIXTRAL:
        want = LOCAL.get("pixtral").builder.build(parts)
        ids = InputIds(want.input_ids, Placeholders(image=258, rows=(300, 301)), want.grid_thw)
        ids_of_profile = InputIds(want.input_ids, image_grid_thw=want.grid_thw)
        for source, profile in ((ids, None), (ids_of_profile, "pixtral")):
            result = ask("query", PositionsQuery(source, "flatten"), profile=profile)
            assert_equal(result.table.dense(), want.positions.dense())
    want = LOCAL.get("omni").builder.build(SPOKEN)
    videos = want.grid_thw[[0, 2, 3]]
    ids = InputIds(want.input_ids, Placeholders(), [[1, 1, 2]], videos, spatial_merge_size=1, seconds_per_frame=TIMES)
    result = ask("query", PositionsQuery(ids, "tmrope"), profile="omni")
    assert_equal(result.table.dense(), want.positions.dense())


def test_profiles_describe_row_separators_and_count_them_as_tokens(ask: Both) -> None:
    profiles = ask("info").profiles
    results = [(profile.begin_token_id, profile.end_token_id, [*profile.placeholders.rows]) for profile in profiles]
    marked: tuple[int, int, list[int]] = (256, 257, [])
    assert results == [marked, marked, (256, 257, [300, 300]), (-1, -1, [300, 301]), marked]
    assert [profile.placeholders.HasField("audio") for profile in profiles] == [False] * 4 + [True]
    with pytest.raises(LimitExceededError, match="tokens: got 16777218, want at most 16777216 in one request"):
        ask("build", [Grid(2**23 + 1, 1)], profile="breaks")


def test_patches_can_be_left_out(ask: Both) -> None:
    want, result = BUILDER.build(PARTS[2]), ask("build", PARTS[2], patches=False)
    assert result.patches is None
    assert result.image_hashes == want.image_hashes
    assert_equal(result.positions, want.positions)
    assert_equal(result.input_ids, want.input_ids)


TABLE = place(SEGMENTS, "rope-tie-v2")
ROTARIES = [
    Rotary(16),
    Rotary(16, allocation="split", pairing="adjacent", rotary_dim=8),
    Rotary(16, allocation="axial", axes_dim=[4, 12]),
    Rotary(16, allocation="heads", head_axes=[1, 0, -1]),
    Rotary(16, scaling=YaRN(4, 128), precision="hf"),
]


@pytest.mark.parametrize("rotary", ROTARIES, ids=repr)
@pytest.mark.parametrize("positions", [TABLE, torch.arange(60).reshape(2, 2, 15) - 9], ids=["table", "ids"])
def test_cos_sin_tables_and_angles_match_local_calls(ask: Both, rotary: Rotary, positions: Any) -> None:
    for layout in ("pairs", "transformers", "torchtitan"):
        tables: Any = partial(mmpos.rotary.cos_sin, rotary, positions, layout)
        assert_alike(partial(ask, "cos_sin", rotary, positions, layout), tables)
    assert_alike(partial(ask, "angles", rotary, positions), partial(mmpos.rotary.angles, rotary, positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotations_match_local_calls(ask: Both, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(TABLE.num_tokens, heads, 16, generator=generator).to(dtype) for heads in (4, 1))
    for options in ({}, {"conjugate": True}, {"layout": "thd"}):
        want = apply_rotary(q, k, TABLE, ROTARIES[1], **options)
        assert_equal(ask("apply_rotary", q, k, TABLE, ROTARIES[1], **options), want)
    assert ask("apply_rotary", q, None, TABLE, ROTARIES[0])[1] is None
    heads_first = q.movedim(0, 1)[None]
    want = apply_rotary(heads_first, None, TABLE, ROTARIES[1], layout="bhsd")
    assert_equal(ask("apply_rotary", heads_first, None, TABLE, ROTARIES[1], layout="bhsd"), want)
    wrong = q[1:], k, TABLE, ROTARIES[0]
    assert_alike(lambda: ask("apply_rotary", *wrong), lambda: apply_rotary(*wrong))


def test_a_missing_rotation_is_taken_from_the_profile_or_refused(ask: Both) -> None:
    positions = place(SegmentTable.from_documents([[Grid(2, 2, frames=2)]]), "mrope")
    assert_equal(ask("cos_sin", None, positions, profile="halves"), mmpos.rotary.cos_sin(Rotary(32, axes=3), positions))
    with pytest.raises(InvalidInputError, match="rotary: the request and its profile 'default' have no rotation"):
        ask("angles", None, positions)
