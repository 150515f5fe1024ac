"""Positions: from lists, spans and token ids to dense ids, tables from a table, and how all of it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.schemes import MRopeTransformers, Scheme
from mmpos.segments.kinds import Grid, Segment, Text, Thumbnail, Tile
from mmpos.segments.placeholders import Placeholders
from mmpos.segments.table import GRID, SegmentTable
from mmpos.support.checks import counted
from mmpos_bench.peers.positions import engine_loop, load_method, load_rope_index
from mmpos_bench.results import Point
from mmpos_bench.suites import Comparison, Lineup, Role, SuiteOptions, giving, limit
from mmpos_bench.timing import Budget
from mmpos_bench.workloads import WORKLOADS, Document, counts, loop_ids, tokens_of, workload

Dtype = type[np.int32 | np.int64 | np.float64]
IntArray = npt.NDArray[np.int64]
LineUp = Callable[[list[Document]], Lineup]

_TEXT, _IMAGE, _MERGE = 1, 7, 2  # token ids; patches merged along each side
_RANKS, _PADDING, _RANGES, _RANGE = 2, 64, 16, 100
_CURVE = Budget(0.25, 11)


def cases(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield every case; the workloads are no smaller when it is quick, the curves are shorter."""
    groups: list[tuple[str, LineUp, str]] = [
        ("from lists to dense ids", partial(from_lists, options=options), "tokens"),
        ("dense(out=), rope-tie, int32", partial(filled, scheme="rope-tie", dtype=np.int32), "tokens"),
        ("dense(out=), mrope, int32", partial(filled, scheme="mrope", dtype=np.int32), "tokens"),
        ("dense(out=), rope-tie, int64", partial(filled, scheme="rope-tie", dtype=np.int64), "tokens"),
        ("dense(out=), rope-tie-v2, float64", partial(filled, scheme="rope-tie-v2", dtype=np.float64), "tokens"),
        ("dense() in a new array", fresh, "tokens"),
        ("from token ids to dense ids", partial(from_ids, options=options), "tokens"),
        ("tables from a table", views, "segments"),
        ("padded ids and mask", padded, "tokens"),
    ]
    for group, line_up, unit in groups:
        yield from (Comparison(group, name, partial(line_up, documents), unit) for name, documents in WORKLOADS.items())
    yield from curves(options)
    if options.peer("Transformers", load_rope_index):
        tokens = 2**12 if options.quick else 2**15
        for name, beside in _OTHER_METHODS.items():
            yield Comparison("rope_index, of other methods", name, partial(beside, tokens))


def from_lists(documents: list[Document], options: SuiteOptions) -> Lineup:
    """Line up all that a caller pays for, and its parts: the table from Python lists, the positions, the ids."""
    make = partial(SegmentTable.from_documents, documents)
    tie, mrope = loop_ids(documents, "rope-tie"), loop_ids(documents, "mrope")
    table, out = place(make(), "rope-tie"), np.empty(tie.shape, np.int32)
    contestants = [
        limit("fill of two axes", partial(out.fill, 1)),
        giving("mmpos, rope-tie", lambda: place(make(), "rope-tie").dense(), tie),
        giving("mmpos, mrope", lambda: place(make(), "mrope").dense(), mrope),
        giving("table, a part", make, tie, Role.PART, lambda made: place(made, "rope-tie").dense()),
        giving("place, a part", partial(place, make(), "rope-tie"), tie, Role.PART, PositionTable.dense),
        giving("dense, a part", table.dense, tie, Role.PART),
    ]
    if options.peers:
        want = mrope, place(make(), "mrope").deltas
        contestants.append(giving("loop per image", partial(engine_loop, documents), want, Role.PEER))
    return Lineup(contestants, counts(documents) | {"bytes": out.nbytes})


def filled(documents: list[Document], scheme: str, dtype: Dtype) -> Lineup:
    """Line up ids into memory that is there, against filling the memory with one number."""
    segments, want = SegmentTable.from_documents(documents), loop_ids(documents, scheme)
    out = np.zeros(want.shape, dtype)
    ours = giving("dense(out=)", partial(place(segments, scheme).dense, out), want)
    return Lineup([limit("fill", partial(out.fill, 1)), ours], counts(documents) | {"bytes": out.nbytes})


def placed(documents: list[Document], scheme: str = "rope-tie") -> Lineup:
    """Line up ids into memory that is there, and placing alone."""
    known, make = filled(documents, scheme, np.int32), partial(place, SegmentTable.from_documents(documents), scheme)
    part = giving("place, a part", make, loop_ids(documents, scheme), Role.PART, PositionTable.dense)
    return Lineup([*known.contestants, part], {**known.work, "ids": known.work["bytes"] // 4})


def fresh(documents: list[Document]) -> Lineup:
    """Line up ids into a new array, against a new array filled with one number."""
    table, want = place(SegmentTable.from_documents(documents), "rope-tie"), loop_ids(documents, "rope-tie")
    fill = limit("fill of a new array", partial(np.full, want.shape, 1, np.int32))
    return Lineup([fill, giving("dense()", table.dense, want)], counts(documents) | {"bytes": want.size * 4})


def from_ids(documents: list[Document], options: SuiteOptions) -> Lineup:
    """Line up ids from the token ids of a batch, as a tokenizer and a processor leave them, against reading them and
    writing as many bytes as the result has, and against Transformers.
    """
    input_ids, grid_thw = token_ids_of(documents)
    mrope = loop_ids(documents, "mrope")
    read, written = np.empty_like(input_ids), np.empty(mrope.shape, np.int32)

    def ours(scheme: str) -> npt.NDArray[np.number]:
        segments = SegmentTable.from_input_ids(
            input_ids, Placeholders(image=_IMAGE), grid_thw, spatial_merge_size=_MERGE
        )
        return place(segments, scheme).dense()

    contestants = [
        limit("copy of token ids, and fill", partial(copy_and_fill, read, input_ids, written)),
        giving("mmpos, mrope", partial(ours, "mrope"), mrope),
        giving("mmpos, rope-tie", partial(ours, "rope-tie"), loop_ids(documents, "rope-tie")),
    ]
    if rope_index := options.peer("Transformers", load_rope_index):
        contestants.append(giving("Transformers", rope_index(input_ids, _IMAGE, grid_thw), mrope, Role.PEER))
    return Lineup(contestants, counts(documents) | {"bytes": read.nbytes + written.nbytes})


def token_ids_of(documents: list[Document]) -> tuple[IntArray, IntArray]:
    """Make (batch, seq) token ids of documents of equal length, and (images, 3) grids before merging."""
    parts = [part for document in documents for part in document]
    kinds = np.array([_IMAGE if isinstance(part, Grid) else _TEXT for part in parts], np.int64)
    before_merging = [(1, part.height * _MERGE, part.width * _MERGE) for part in parts if isinstance(part, Grid)]
    input_ids = kinds.repeat(list(map(tokens_of, parts))).reshape(len(documents), -1)
    return input_ids, np.array(before_merging, np.int64).reshape(-1, 3)


def copy_and_fill(read: IntArray, input_ids: IntArray, written: npt.NDArray[np.integer]) -> None:
    """Read token ids, and write as many bytes as their ids take."""
    np.copyto(read, input_ids)
    written.fill(1)


def in_place_of_theirs(documents: list[Document], options: SuiteOptions) -> Lineup:
    """Line up ``rope_index``, which has the tensors and the results of Transformers' method, against that."""
    import torch

    from mmpos.integrations.hf import rope_index

    input_ids, grid_thw = token_ids_of(documents)
    mrope = loop_ids(documents, "mrope")
    read, written = np.empty_like(input_ids), np.empty(mrope.shape, np.int64)
    function = rope_index({"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": _MERGE}})
    ids, grids = torch.from_numpy(input_ids), torch.from_numpy(grid_thw)
    types = (ids == _IMAGE).int()
    contestants = [
        limit("copy of token ids, and fill", partial(copy_and_fill, read, input_ids, written)),
        giving("mmpos, rope_index", lambda: function(ids, types, grids)[0].reshape(3, -1).numpy(), mrope),
    ]
    if theirs := options.peer("Transformers", load_rope_index):
        contestants.append(giving("Transformers", theirs(input_ids, _IMAGE, grid_thw), mrope, Role.PEER))
    return Lineup(contestants, counts(documents) | {"bytes": read.nbytes + written.nbytes})


def canvases(tokens: int) -> Lineup:
    """Line up pictures of MiniCPM-V 4.7, in each 1,310 tokens one of 8×8 over four slices of 16×16."""
    kinds = "image_token_id", "image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"
    patch, begin, end, first, last, newline = range(20, 26)
    tile = [first, *[patch] * 256, last]
    picture = [begin, *[patch] * 64, end, *tile, *tile, newline, *tile, *tile]
    parts: list[Segment] = [Thumbnail(8, 8), Tile(16, 16), Tile(16, 16, tokens_after=1), Tile(16, 16), Tile(16, 16)]
    count = tokens // 1310
    rest = tokens - count * len(picture)
    fields: dict[str, object] = dict(zip(kinds, range(20, 26), strict=True))
    input_ids = np.array([*picture * count, *[_TEXT] * rest])[None]
    more = {"mm_token_type_ids": input_ids == patch, "target_sizes": [[32, 32], *[[64, 64]] * 4] * count}
    return _beside_method("minicpmv4_7", fields, input_ids, more, [*(parts * count), Text(rest)], "mrope-canvas")


def generated(tokens: int) -> Lineup:
    """Line up the prompts of GLM-Image, with an image of 16×16 in every 320 tokens and one to generate."""
    patch, begin, end = 20, 21, 22
    count = tokens // 320
    row = [*[begin, *[patch] * 256, end, *[_TEXT] * 62] * count, *[_TEXT] * (tokens % 320)]
    fields: dict[str, object] = {"image_token_id": patch, "image_start_token_id": begin, "image_end_token_id": end}
    grids = [[1, 16, 16]] * (count + 1)
    more = {"image_grid_thw": grids, "images_per_sample": [count + 1], "attention_mask": np.ones((1, tokens), np.int64)}
    pair: list[Segment] = [Grid(16, 16), Text(64)]
    parts = [Text(1), *(pair * count)]
    parts[-1] = Text(tokens - 1 - 256 * count - 64 * (count - 1))
    return _beside_method("glm_image", fields, np.array([row]), more, parts, "mrope")


def timed(tokens: int) -> Lineup:
    """Line up eight videos of Qwen2.5-VL of 16 frames, half a second apart, that are three quarters of the tokens."""
    patch, side = 20, max(1, int((tokens * 3 / 4 / 128) ** 0.5))
    rest = tokens - 8 * (16 * side * side + 20)
    row = [*[*[_TEXT] * 20, *[patch] * (16 * side * side)] * 8, *[_TEXT] * rest]
    more = {
        "mm_token_type_ids": 2 * (np.array([row]) == patch),
        "video_grid_thw": [[16, _MERGE * side, _MERGE * side]] * 8,
        "second_per_grid_ts": np.full(8, 0.5, np.float32),
    }
    pair: list[Segment] = [Text(20), Grid(side, side, frames=16, seconds_per_frame=0.5)]
    parts = [*(pair * 8), Text(rest)]
    return _beside_method("qwen2_5_vl", {"video_token_id": patch}, np.array([row]), more, parts, MRopeTransformers(4))


_OTHER_METHODS: dict[str, Callable[[int], Lineup]] = {
    "MiniCPM-V 4.7, pictures of four slices": canvases,
    "GLM-Image, prompts with images": generated,
    "Qwen2.5-VL, 8 videos": timed,
}


def _beside_method(
    model_type: str,
    fields: dict[str, object],
    input_ids: IntArray,
    more: dict[str, Any],
    parts: list[Segment],
    scheme: str | Scheme,
) -> Lineup:
    """Line up ``rope_index`` and the method of a model, whose ids are also those of a table."""
    import torch

    from mmpos.integrations.hf import rope_index

    config, method = load_method(model_type, fields)
    function = rope_index(config)
    asked = {"input_ids": torch.from_numpy(input_ids)} | {key: torch.as_tensor(more[key]) for key in more}
    asked = {key: value.int() if key == "mm_token_type_ids" else value for key, value in asked.items()}
    want = place(SegmentTable.from_documents([parts]), scheme).dense()
    read, written = np.empty_like(input_ids), np.empty(want.shape, np.int64)

    def ids(call: Callable[..., Any]) -> npt.NDArray[np.number]:
        made: npt.NDArray[np.number] = call(**asked)[0].reshape(3, -1).numpy()
        return made

    contestants = [
        limit("copy of token ids, and fill", partial(copy_and_fill, read, input_ids, written)),
        giving("mmpos, rope_index", partial(ids, function), want),
        giving("Transformers", partial(ids, method), want, Role.PEER),
    ]
    return Lineup(contestants, {"tokens": input_ids.size, "bytes": read.nbytes + written.nbytes})


def views(documents: list[Document]) -> Lineup:
    """Line up tables from a table, against a copy of it; documents are of equal length, and end in text."""
    table, ids = place(SegmentTable.from_documents(documents), "rope-tie"), loop_ids(documents, "rope-tie")
    tokens, axes = table.num_tokens, len(ids)
    length, begin, stop = tokens // len(documents), tokens // 4, tokens // 2
    per_document = ids.reshape(axes, len(documents), length)
    starts = np.arange(_RANGES) * (tokens // _RANGES)
    stops = starts + _RANGE
    taken = np.concatenate([ids[:, a:b] for a, b in zip(starts, stops, strict=True)], axis=1)
    block = length // (2 * _RANKS)
    zigzag = np.concatenate([per_document[:, :, :block], per_document[:, :, -block:]], axis=2).reshape(axes, -1)
    longer = np.pad(per_document, ((0, 0), (0, 0), (0, _PADDING))).reshape(axes, -1)
    # Parts, since each is another question: none of them is faster than another.
    part = partial(giving, role=Role.PART, read=PositionTable.dense)
    contestants = [
        limit("copy of the table", table.table.copy),
        part("slice of a quarter", lambda: table.slice(begin, stop), ids[:, begin:stop]),
        part(f"take of {_RANGES} ranges of {_RANGE}", lambda: table.take(starts, stops), taken),
        # The next token follows the text on all axes.
        part("decode of a token each", table.decode, per_document[:, :, -1] + 1),
        part(f"shard, 1 of {_RANKS}", lambda: table.shard(0, _RANKS), zigzag),
        part(f"pad by {_PADDING} tokens each", lambda: table.pad(length + _PADDING), longer),
    ]
    return Lineup(contestants, counts(documents) | {"segments": table.num_segments, "bytes": table.table.nbytes})


def padded(documents: list[Document]) -> Lineup:
    """Line up the ids and the mask of a padded batch, against filling both."""
    table, ids = place(SegmentTable.from_documents(documents), "rope-tie"), loop_ids(documents, "rope-tie")
    length = table.max_seqlen + _PADDING
    ids = np.pad(ids.reshape(len(ids), len(documents), -1), ((0, 0), (0, 0), (_PADDING, 0)))
    mask = np.pad(np.ones((len(documents), length - _PADDING), np.int64), ((0, 0), (_PADDING, 0)))
    contestants = (
        limit("fill of new ids and mask", lambda: (np.full(ids.shape, 1, np.int32), np.full(mask.shape, 1, np.int64))),
        giving("padded()", lambda: table.padded(length, "left"), (ids, mask)),
    )
    return Lineup(contestants, counts(documents) | {"bytes": ids.size * 4 + mask.nbytes})


def curves(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield time per token over tokens, images, their size, documents and axes; a quick curve has two points."""
    most = 2 if options.quick else None
    million = 2**14 if options.quick else 2**20
    lists, token_ids = partial(lists_or_spans, options=options), partial(from_ids, options=options)
    in_place = partial(in_place_of_theirs, options=options)

    def case(
        group: str, name: str, line_up: LineUp, axis: str, value: int, sizes: tuple[int, int, int, int], unit: str
    ) -> Comparison:
        return Comparison(group, name, lambda: line_up(workload(*sizes)), unit, Point(axis, value), _CURVE)

    axis = "tokens, an image of 16×16 in every 320"
    for n in [2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22][:most]:
        name, sizes = f"{n:,} tokens", (1, n, n // 320, 16)
        yield case("dense(out=) over tokens", name, placed, axis, n, sizes, "tokens")
        yield case("from token ids, over tokens", name, token_ids, axis, n, sizes, "tokens")
    for n in [2**10, 2**12, 2**15, 2**17][:most] if find_spec("torch") else ():
        name, sizes = f"{n:,} tokens", (1, n, n // 320, 16)
        yield case("rope_index, over tokens", name, in_place, axis, n, sizes, "tokens")
    axis = f"images of 8×8 in {million:,} tokens"
    for n in [0, 1, 10, 100, 1000, 10_000][:most]:
        name, sizes = counted(n, "image", ","), (1, million, n, 8)
        yield case("from lists, over images", name, lists, axis, n, sizes, "tokens")
    axis = f"side of the images that are half of {million:,} tokens"
    for n in [2, 4, 8, 16, 32, 64, 128, 256, 512][:most]:
        sizes = (1, million, max(1, million // 2 // n**2), n)
        yield case("dense(out=) over the size of images", f"{n}×{n}", placed, axis, n, sizes, "tokens")
    axis = f"documents of one image of 8×8, {million:,} tokens in all"
    for n in [1, 4, 16, 64, 256, 1024, 4096][:most]:
        name, sizes = counted(n, "document", ","), (n, million // n, 1, 8)
        yield case("from lists, over documents", name, lists, axis, n, sizes, "tokens")
    for n, scheme in enumerate(("flatten", "rope-tie", "mrope"), 1):
        line_up, sizes = partial(placed, scheme=scheme), (1, million, million // 640, 16)
        yield case("dense(out=) over axes", f"{n}: {scheme}", line_up, "axes", n, sizes, "ids")


def lists_or_spans(documents: list[Document], options: SuiteOptions) -> Lineup:
    """Line up new ids from Python lists and from spans, against a fill and the loop per image."""
    want, segments = loop_ids(documents, "mrope"), SegmentTable.from_documents(documents)
    out, held = np.empty(want.shape, np.int32), spans(segments)
    contestants = [
        limit("fill", partial(out.fill, 1)),
        giving("mmpos, from lists", lambda: place(SegmentTable.from_documents(documents), "mrope").dense(), want),
        giving("mmpos, from spans", lambda: place(SegmentTable.from_spans(*held), "mrope").dense(), want),
    ]
    if options.peers:
        loop = partial(engine_loop, documents)
        contestants.append(giving("loop per image", loop, want, Role.PEER, lambda made: made[0]))
    return Lineup(contestants, counts(documents) | {"bytes": out.nbytes})


def spans(segments: SegmentTable) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Describe documents as inference engines hold them: their lengths; offsets, grids and documents of images."""
    grids = np.flatnonzero(segments.kind == GRID)
    owner = np.repeat(np.arange(segments.num_documents), np.diff(segments.segment_offsets))[grids]
    ends = np.append(0, np.cumsum(segments.lengths))
    firsts = ends[segments.segment_offsets]
    return np.diff(firsts), ends[grids] - firsts[owner], segments.extents.T[grids].copy(), owner
