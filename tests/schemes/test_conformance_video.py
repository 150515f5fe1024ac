"""Conformance: where Transformers and the serving engines part on videos, a test for each difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from itertools import groupby, pairwise
from math import floor

import numpy as np
import pytest
import torch
from layouts import CLASSES, FRAME_RATES, IMAGE, VIDEO, Answer, Array, Layout, answered, rope_index

from mmpos import Grid, Placeholders, PositionTable, Scheme, SegmentTable, Text, place
from mmpos.schemes import MRopeQwen25, MRopeTransformers

COUNT = 350
LONG = Layout(np.array([[1, 2, 3, *[VIDEO] * 20, 4]]), videos=[[5, 4, 4]])
"""Three tokens, a video of five frames of 2×2 after merging, one token."""


def by_engines(layout: Layout, timed: bool) -> Answer:
    """Place as vLLM and SGLang do, without their floats: everything goes on at the highest id so far plus one."""
    ids, deltas = np.zeros((3, *layout.input_ids.shape), np.int64), []
    images, videos = iter(layout.images or []), iter(layout.videos or [])
    if layout.apart:
        videos = iter([[1, *sides] for frames, *sides in layout.videos or [] for _ in range(frames)])
    seconds = iter([1.0] * ids.size if layout.seconds is None else layout.seconds)
    for row, real in enumerate(layout.real):
        vectors: list[list[int]] = []
        start = 0
        for kind, run in groupby(layout.kinds[row][real].tolist()):
            if kind == 0:
                vectors += [[start + k] * 3 for k, _ in enumerate(run)]
                start = vectors[-1][0] + 1
                continue
            frames, height, width = next(images if kind == 1 else videos)
            apart = Fraction(next(seconds)).limit_denominator(10**6) * layout.rate if timed and kind == 2 else 1
            vectors += [
                [start + floor(t * apart), start + i, start + j]
                for t in range(frames)
                for i in range(height // layout.merge)
                for j in range(width // layout.merge)
            ]
            start = 1 + max(vectors[-1])  # the last token has the highest id of every axis
        ids[:, row, real] = np.transpose(vectors)
        deltas.append(start - len(vectors))
    return Answer(ids, np.array(deltas))


def scheme_of_engines(model: str, rate: int) -> str | Scheme:
    """The scheme that the engines' ids of a model are claimed to be."""
    schemes: dict[str, str | Scheme] = {"qwen2_vl": "mrope", "qwen3_vl": "mrope-qwen3"}
    return schemes.get(model, MRopeQwen25(tokens_per_second=rate))


def last_text(positions: PositionTable) -> list[int]:
    return positions.dense()[:, -1].tolist()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("model", CLASSES)
def test_engines_go_on_at_the_highest_id_plus_one(model: str) -> None:
    compared = 0
    for layout, _ in answered(model, True, COUNT):
        positions = place(layout.segments(), scheme_of_engines(model, layout.rate))
        want = by_engines(layout, timed=model == "qwen2_5_vl")
        np.testing.assert_array_equal(positions.dense().reshape(want.ids.shape), want.ids)
        assert positions.deltas.tolist() == want.deltas.tolist()
        compared += 1
    assert compared == COUNT


def test_text_after_a_video_goes_on_below_its_frames_in_transformers() -> None:
    ids = rope_index("qwen2_vl", LONG).ids[:, 0]
    assert ids[0].tolist() == [0, 1, 2, *np.repeat([3, 4, 5, 6, 7], 4), 5]
    assert last_text(place(LONG.segments(), "mrope-transformers")) == ids[:, -1].tolist() == [5, 5, 5]
    assert last_text(place(LONG.segments(), "mrope")) == [8, 8, 8]


def test_the_delta_of_transformers_contradicts_its_own_last_text_id() -> None:
    answer = rope_index("qwen2_vl", LONG)
    assert answer.ids[0, 0, -1] == 5
    assert answer.deltas[0] + LONG.input_ids.size == 8  # where generation goes on: not at 6
    ours = place(LONG.segments(), "mrope-transformers")
    assert ours.next_positions.tolist() == [8]
    assert ours.deltas.tolist() == answer.deltas.tolist()
    assert place(LONG.segments(), "mrope").next_positions.tolist() == [9]


def rows_that_end_in_text(model: str) -> Iterator[tuple[bool, bool]]:
    """Of rows with a video and text last: do ids differ from the engines', does the delta contradict the last id."""
    for layout, answer in answered(model, True, COUNT):
        engines = by_engines(layout, timed=model == "qwen2_5_vl")
        for row, real in enumerate(layout.real):
            kinds = layout.kinds[row][real]
            if 2 in kinds and kinds[-1] == 0:
                ids = answer.ids[:, row, real]
                differs = (ids != engines.ids[:, row, real]).any()
                yield bool(differs), int(answer.deltas[row]) + kinds.size != int(ids[0, -1]) + 1


@pytest.mark.parametrize(
    ("model", "rows", "differing", "contradicting"),
    [("qwen2_vl", 175, 96, 6), ("qwen2_5_vl", 147, 77, 44), ("qwen3_vl", 153, 0, 0)],
)
def test_how_often_transformers_and_the_engines_differ(
    model: str, rows: int, differing: int, contradicting: int
) -> None:
    found = list(rows_that_end_in_text(model))
    differs, contradicts = zip(*found, strict=True)
    assert (len(found), sum(differs), sum(contradicts)) == (rows, differing, contradicting)


def times_of(seconds: float, rate: int, frames: int, listed: bool = False) -> Array:
    """The frame ids of one video in Transformers."""
    layout = Layout(np.full((1, frames), VIDEO), videos=[[frames, 2, 2]], rate=rate, seconds=[seconds])
    return rope_index("qwen2_5_vl", layout, listed).ids[0, 0]


def times_of_engines(seconds: float, rate: int, frames: int) -> Array:
    """The frame ids of one video in SGLang, and in vLLM up to January 2026: float32, seconds first."""
    return (torch.arange(frames) * torch.tensor(seconds) * rate).long().numpy()


def times_of_newer_vllm(seconds: float, rate: int, frames: int) -> Array:
    """The same in vLLM since: float64, of seconds that were float32."""
    return (np.arange(frames) * (torch.tensor(seconds).item() * rate)).astype(np.int64)


def times_of_binary(seconds: float, rate: int, frames: int) -> Array:
    """Exact floors of the value that the float has, which is not the one that is meant."""
    return np.array([floor(t * Fraction(seconds) * rate) for t in range(frames)])


def exact_times(seconds: float, rate: int, frames: int) -> Array:
    """Ours, in both schemes."""
    segments = SegmentTable.from_documents([[Grid(1, 1, frames=frames, seconds_per_frame=seconds)]])
    schemes = MRopeTransformers(tokens_per_second=rate), MRopeQwen25(tokens_per_second=rate)
    first, second = (place(segments, scheme).dense()[0] for scheme in schemes)
    np.testing.assert_array_equal(first, second)
    return first


def test_floors_of_exact_products_are_those_of_transformers_at_every_frame_rate() -> None:
    frames = 384
    others: dict[str, Callable[[float, int, int], Array]] = {
        "tensor": times_of,
        "list": partial(times_of, listed=True),
        "engines": times_of_engines,
        "newer vLLM": times_of_newer_vllm,
        "binary": times_of_binary,
    }
    wrong = dict.fromkeys(others, 0)
    for rate in (2, 4, 25):
        for seconds in (2 / fps for fps in FRAME_RATES):
            exact = exact_times(seconds, rate, frames)
            for name, times in others.items():
                wrong[name] += int((exact != times(seconds, rate, frames)).sum())
    assert 3 * len(FRAME_RATES) * frames == 21_888
    assert wrong == {"tensor": 0, "list": 86, "engines": 160, "newer vLLM": 826, "binary": 1929}


def test_at_25_frames_per_second_floats_of_the_engines_lose_ids() -> None:
    video = (2 / 25, 25, 6)
    assert exact_times(*video).tolist() == times_of(*video).tolist() == [0, 2, 4, 6, 8, 10]
    assert times_of_engines(*video).tolist() == [0, 2, 4, 6, 8, 9]
    assert times_of_newer_vllm(*video).tolist() == [0, 1, 3, 5, 7, 9]


def test_frames_of_less_than_a_second_stay_apart() -> None:
    theirs = times_of(0.5, 2, 4)
    assert theirs.tolist() == [0, 1, 2, 3]  # older versions floored the seconds: 0, 0, 0, 0
    segments = SegmentTable.from_documents([[Grid(1, 1, frames=4, seconds_per_frame=0.5), Text(1)]])
    ours = place(segments, MRopeTransformers(tokens_per_second=2))
    assert ours.dense()[0].tolist() == [0, 1, 2, 3, 1]
    assert exact_times(1e-6, 2, 4).tolist() == [0, 0, 0, 0]


def test_an_image_of_several_frames_has_no_time_in_transformers() -> None:
    image = Layout(np.array([[1, *[IMAGE] * 3, 2]]), images=[[3, 2, 2]], rate=4)
    assert rope_index("qwen2_5_vl", image).ids[0, 0].tolist() == [0, 1, 2, 3, 2]
    assert place(image.segments(), "mrope-transformers").dense()[0].tolist() == [0, 1, 2, 3, 2]
    assert place(image.segments(), MRopeTransformers(tokens_per_second=4)).dense()[0].tolist() == [0, 1, 5, 9, 2]


def test_packed_documents_do_not_restart_in_transformers() -> None:
    packed = Layout(np.array([[1, 2, IMAGE, 3, 1, IMAGE, 2]]), images=[[1, 2, 2]] * 2)
    assert rope_index("qwen2_vl", packed).ids[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    ours = SegmentTable.from_input_ids(
        packed.input_ids[0], Placeholders(image=IMAGE), packed.images, spatial_merge_size=2, cu_seqlens=[0, 4, 7]
    )
    positions = place(ours, "mrope")
    cuts = positions.cu_seqlens.tolist()
    assert [positions.dense()[0, a:b].tolist() for a, b in pairwise(cuts)] == [[0, 1, 2, 3], [0, 1, 2]]
