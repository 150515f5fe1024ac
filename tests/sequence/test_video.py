"""Videos: frames with times become text, image, text, image …, and later frames do not change earlier tokens."""

from __future__ import annotations

import pickle
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CASES, Case, exact, settled
from results import assert_equal

from mmpos import (
    Grid,
    ImageProcessor,
    ImageSize,
    InvalidInputError,
    LimitExceededError,
    SequenceBuilder,
    Video,
)
from mmpos.segments import Audio, Tile
from mmpos.sequence.video import timestamps

PROCESSOR = ImageProcessor(backend="pillow", patch_size=4, min_pixels=64)
GRID = Grid(1, 1)
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3), np.uint8)


def test_a_video_becomes_frames_that_each_follow_their_timestamp() -> None:
    video = Video([Grid(1, 2), Grid(1, 1)], times=[0, 0.5], timestamp="{seconds:.1f}s")
    sequence = SequenceBuilder().build(["a", video, "b"])
    assert sequence.input_ids.tolist() == [97, *b"0.0s", 256, 258, 258, 257, *b"0.5s", 256, 258, 257, 98]
    assert sequence.grid_thw.tolist() == [[1, 1, 2], [1, 1, 1]]
    assert sequence.image_spans.tolist() == [[6, 8], [14, 15]]
    assert sequence.part_offsets.tolist() == [0, 1, 16, 17]
    # Text ends at L = 5, so the image has K = 5 + 3·2 = 11; text from 11 to 16, so the next has K = 16 + 2·2 = 20.
    rows = [0, 1, 2, 3, 4, 5, 8, 8, 11, 12, 13, 14, 15, 16, 18, 20, 21]
    cols = [0, 1, 2, 3, 4, 5, 7, 9, 11, 12, 13, 14, 15, 16, 18, 20, 21]
    assert sequence.positions.dense().tolist() == [rows, cols]


def test_a_video_equals_the_list_of_its_frames() -> None:
    builder = SequenceBuilder(images=PROCESSOR)
    sequence = builder.build(["a", Video(PIXELS, seconds_per_frame=Fraction(1, 3)), PIXELS[0]])
    plain = ["<0.0 seconds>", PIXELS[0], "<0.3 seconds>", PIXELS[1], "<0.7 seconds>", PIXELS[2]]
    want = builder.build(["a", *plain, PIXELS[0]])
    assert_equal(sequence, replace(want, part_offsets=want.part_offsets[[0, 1, 7, 8]]))


def test_frames_may_be_images_of_any_kind() -> None:
    tensor = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    builder = SequenceBuilder(images=PROCESSOR)
    want = builder.build([Video(PIXELS, times=range(3))])
    for frames in (tensor, list(PIXELS), iter(tensor)):
        sequence = builder.build([Video(frames, times=torch.arange(3))])
        np.testing.assert_array_equal(sequence.patches, want.patches)
    sizes = builder.build([Video([ImageSize(16, 24)] * 3, times=range(3))])
    np.testing.assert_array_equal(sizes.input_ids, want.input_ids)


@settings(settled, max_examples=5)
@given(data=st.data())
@pytest.mark.parametrize("case", [case for case in CASES if case.text], ids=lambda case: case.label)
def test_adding_a_frame_changes_nothing_before_it(case: Case, data: st.DataObject) -> None:
    sides = st.integers(1, 4)
    frames = data.draw(st.lists(st.builds(Grid, sides, sides), min_size=2, max_size=4))
    seconds = data.draw(st.lists(st.fractions(0, 9, max_denominator=9), min_size=len(frames), max_size=len(frames)))
    times = sorted(seconds)
    builder = SequenceBuilder(scheme=case.scheme)
    less = builder.build(["a", Video(frames[:-1], times=times[:-1])])
    more = builder.build(["a", Video(frames, times=times), "b"])
    tokens = less.input_ids.size
    np.testing.assert_array_equal(more.input_ids[:tokens], less.input_ids)
    assert exact(more.positions)[:tokens] == exact(less.positions)


@pytest.mark.parametrize(
    ("seconds", "timestamp", "text"),
    [
        (3, "<{seconds:.1f} seconds>", "<3.0 seconds>"),
        (Fraction(1, 3), "{seconds:.3f}", "0.333"),
        (Fraction(1, 20), "{seconds:.1f}", "0.0"),  # halves round to even; the float 0.05 exceeds 1/20
        (Fraction(3, 20), "{seconds:.1f}", "0.2"),  # the float 0.15 is below 3/20
        (0.15, "{seconds:.1f}", "0.2"),
        (Fraction(5, 4), "{seconds:.1f}", "1.2"),
        (0.1 + 0.2, "{seconds:.9f}", "0.300000000"),
        (90, "{seconds:.0f} s", "90 s"),
        (2.5, "at {seconds:06.2f}, {{s}}", "at 002.50, {s}"),
        (2400.123457, "{seconds:.1f}", "2400.1"),
        (Fraction(86400000001, 10**6), "{seconds:.1f}", "86400.0"),
        (2**31 - 1, "{seconds:.1f}", "2147483647.0"),
        (Fraction(1, 10**5000), "{seconds:.2f}", "0.00"),
        (2, "", ""),
        (75, lambda time: f"{time // 60}:{int(time % 60):02}", "1:15"),
    ],
)
def test_a_timestamp_is_formatted_from_the_exact_time(seconds: Any, timestamp: Any, text: str) -> None:
    assert Video([Grid(1, 1)], times=[seconds], timestamp=timestamp).timestamps == (text,)


@settled
@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(0, 12))
def test_the_digits_of_a_timestamp_are_within_half_a_unit(numerator: int, denominator: int, decimals: int) -> None:
    time = Fraction(numerator, denominator)
    (text,) = timestamps("timestamp", f"{{seconds:.{decimals}f}}", [time])
    assert abs(Fraction(text) - time) <= Fraction(1, 2 * 10**decimals)
    assert len(text.partition(".")[2]) == decimals


@pytest.mark.parametrize(
    ("frames", "arguments", "times"),
    [
        (3, {"seconds_per_frame": Fraction(1001, 30000)}, [0, Fraction(1001, 30000), Fraction(1001, 15000)]),
        (2, {"seconds_per_frame": 0.1}, [0, Fraction(1, 10)]),
        (3, {"times": np.array([0, 0.1, 0.1])}, [0, Fraction(1, 10), Fraction(1, 10)]),
        (2, {"times": [2400.123457, Fraction(86400000001, 10**6)]},
         [Fraction(2400123457, 10**6), Fraction(86400000001, 10**6)]),
        (1, {"times": [2**31 - 1]}, [2**31 - 1]),
    ],
)  # fmt: skip
def test_frames_have_exact_times(frames: int, arguments: dict[str, Any], times: list[Any]) -> None:
    assert Video([GRID] * frames, **arguments).times == tuple(times)


def test_a_video_has_a_repr_and_can_be_pickled() -> None:
    video = Video([Grid(1, 1), Grid(1, 2)], seconds_per_frame=2)
    again = pickle.loads(pickle.dumps(video))
    assert repr(video) == repr(again) == "Video(2 frames, '<0.0 seconds>' to '<2.0 seconds>')"
    assert (again.frames, again.times, again.timestamps) == (video.frames, video.times, video.timestamps)


FIELDS, PART = "want only fields such as {seconds:.1f}", "want an image or a Grid"
WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "Video: want either times or seconds_per_frame, got neither": ([GRID], {}),
    "Video: want either times or seconds_per_frame, got both": ([GRID], {"times": [0], "seconds_per_frame": 1}),
    "Video.frames: got no frames, want at least one": ([], {"times": []}),
    "Video.frames: got bytes, want a list of images": (b"photo", {"times": [0]}),
    "Video.frames: got Grid, want a list of images": (GRID, {"times": [0]}),
    "Video.frames: got shape (16, 24, 3), want a list of images, or (frames, height, width, channels)": (
        PIXELS[0],
        {"times": [0]},
    ),
    f"Video.frames[1]: got str, {PART}": ([GRID, "a"], {"times": [0, 1]}),
    f"Video.frames[0]: got Tile, {PART}": ([Tile(1, 1)], {"times": [0]}),
    f"Video.frames[0]: got Audio, {PART}": ([Audio(1)], {"times": [0]}),
    f"Video.frames[0]: got list, {PART}": ([[7]], {"times": [0]}),
    f"Video.frames[0]: got ndarray, {PART}": ([np.array([7])], {"times": [0]}),
    f"Video.frames[1]: got Video, {PART}": ([GRID, Video([GRID], times=[0])], {"times": [0, 1]}),
    "Video.frames[1]: got a grid of 2 frames, want 1 frame": ([GRID, Grid(1, 1, frames=2)], {"times": [0, 1]}),
    "Video.times: got 2 times, want 3, one per frame": ([GRID] * 3, {"times": [0, 1]}),
    "Video.times: got 3, want a list of seconds": ([GRID], {"times": 3}),
    "Video.times[2]: got 2, want >= 5/2, the time of the previous frame": ([GRID] * 3, {"times": [0, 2.5, 2]}),
    "Video.times[0]: got -0.5, want >= 0": ([GRID], {"times": [-0.5]}),
    "Video.times[0]: got None, want a number of seconds": ([GRID], {"times": [None]}),
    "Video.times[0]: got '1', want a number of seconds": ([GRID], {"times": ["1"]}),
    "Video.times[0]: got nan, want a number of seconds": ([GRID], {"times": [float("nan")]}),
    "Video.times[0]: got 2147483648, want <= 2147483647 seconds": ([GRID], {"times": [2**31]}),
    "Video.seconds_per_frame: got 0, want > 0 (a float: >= 1e-06)": ([GRID], {"seconds_per_frame": 0}),
    **{
        f"Video.timestamp: got {text!r}, {FIELDS}": ([GRID], {"times": [0], "timestamp": text})
        for text in ("{second:.1f}", "{seconds:.١f}", "{seconds}", "{seconds!r:.1f}")
    },
    "Video.timestamp: got '{', want a format of seconds (Single '{' encountered in format string)": (
        [GRID],
        {"times": [0], "timestamp": "{"},
    ),
    "Video.timestamp: got 3, want a format of seconds or a callable": ([GRID], {"times": [0], "timestamp": 3}),
    "Video.timestamp: got a callable that returns 0.0, want text": ([GRID], {"times": [0], "timestamp": float}),
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_videos_are_refused(message: str) -> None:
    frames, options = WRONG[message]
    with pytest.raises(LimitExceededError if "2147483648" in message else InvalidInputError) as caught:
        Video(frames, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("threads", [1, 3])
def test_a_broken_frame_is_reported(threads: int) -> None:
    builder = SequenceBuilder(images=PROCESSOR)
    parts = ["a", Video([PIXELS[0], b"broken", PIXELS[1]], times=[0, 1, 2])]
    with pytest.raises(InvalidInputError, match=r"^parts\[1\]\.frames\[1\]: image: got a file"):
        builder.build(parts)
    with pytest.raises(InvalidInputError, match=r"^documents\[1\]\.parts\[1\]\.frames\[1\]: image: got a file"):
        builder.build_batch([[PIXELS[0]], parts], threads=threads)
    with pytest.raises(InvalidInputError, match=r"^parts\[0\]\.times\[1\]: got text with a lone surrogate"):
        builder.build([Video([GRID] * 2, times=[0, 1], timestamp=lambda time: "\ud800" if time else "")])
