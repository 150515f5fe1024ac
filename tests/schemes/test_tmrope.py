"""TMRoPE: ids of video and audio, compared with literals and a loop over tokens; next positions and refusals."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import groupby, product, zip_longest
from math import floor
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import exact, placed, settled
from refusals import assert_refused

from mmpos import (
    Grid,
    InvalidInputError,
    LimitExceededError,
    MmposError,
    PositionTable,
    Scheme,
    SegmentTable,
    Text,
    UnsupportedError,
    place,
)
from mmpos.positions.table_rows import NO_POSITION
from mmpos.schemes import TMRope, TMRopeQwen3
from mmpos.segments import Audio, Clip
from mmpos.segments.kinds import Segment

F = Fraction
THIRDS, SECONDS = (Grid(1, 1, frames=n, seconds_per_frame=seconds) for n, seconds in ((3, F(2, 3)), (2, 1)))


def times(positions: PositionTable) -> list[Any]:
    """Return the ids on the first axis."""
    return [position[0] for position in exact(positions)]


CLIP = Clip(1, 2, frames=2, audio=4, seconds_per_frame=F(2, 13))  # frames at 0 and 2
CHUNKED = Clip(1, 1, frames=3, audio=5, seconds_per_frame=1)  # at 2 ids per second, frames at 0, 2 and 4; chunks of 4
TALL = Clip(9, 1, frames=1, audio=2)

# The ids of each document on the time axis, and its next position.
BY_HAND: list[tuple[str | Scheme, list[Segment], str, int | None]] = [
    ("tmrope-qwen3", [THIRDS, Text(1)], "0 26/3 52/3 55/3", None),
    (TMRopeQwen3(engine="serving"), [THIRDS, Text(1)], "0 8 17 18", 19),
    ("tmrope", [THIRDS, Text(1)], "0 16 33 34", 35),
    # tokens:                                 t [ [ v v a a v v a a ] ] t
    ("tmrope-qwen3", [Text(1), CLIP, Text(1)], "0 1 2 3 3 3 4 5 5 5 6 7 8 9", 10),
    (TMRopeQwen3(engine="serving"), [Text(1), CLIP, Text(1)], "0 1 1 2 2 2 3 4 4 4 5 6 6 7", 8),
    # tokens:                                                    t [ [ v v a a a a v a ] ] t
    (TMRope(tokens_per_second=2), [Text(1), CHUNKED, Text(1)], "0 1 1 2 4 2 3 4 5 6 6 7 7 8", 9),
    (TMRope(2, engine="serving"), [Text(1), CHUNKED, Text(1)], "0 1 2 3 5 3 4 5 6 7 7 8 9 10", 11),
    # Text continues after the last run, and generation after the highest id: rows reach 10.
    ("tmrope", [Text(1), TALL, Text(1)], "0 1 1 2 2 2 2 2 2 2 2 2 2 3 4 4 5", 11),
    (TMRope(engine="serving"), [Text(1), TALL, Text(1)], "0 1 2 3 3 3 3 3 3 3 3 3 3 4 12 13 14", 15),
    ("tmrope", [Clip(1, 1, frames=1, audio=1)], "0 0 1 1 2 2", 3),  # ids of 0 are not padding
]


@pytest.mark.parametrize(("scheme", "document", "ids", "following"), BY_HAND)
def test_ids_of_clips_equal_handwritten_ids(
    scheme: str | Scheme, document: list[Segment], ids: str, following: int | None
) -> None:
    positions = placed(document, scheme)
    assert times(positions) == [*map(F, ids.split())]
    assert positions.documents[2].tolist() == [NO_POSITION if following is None else following]
    assert not positions.is_padding.any()


def test_a_document_that_ends_at_a_fractional_id_has_no_next_position() -> None:
    segments = SegmentTable.from_documents([[THIRDS, Text(1)], [Text(2), SECONDS, Text(1)], [Text(3)]])
    positions = place(segments, "tmrope-qwen3", start=[0, 5, 1])
    assert positions.resumable.tolist() == [False, True, True]
    assert positions.documents[2:, 1:].tolist() == [[22, 4], [12, 0]]
    assert times(positions)[4:] == [5, 6, 7, 20, 21, 1, 2, 3]
    with pytest.raises(UnsupportedError, match="next_positions: got document 0 of tmrope-qwen3, whose end is not one"):
        _ = positions.next_positions
    assert positions.slice(4, 9).num_documents == 3


SCHEMES: list[Scheme] = [
    TMRope(),
    TMRope(tokens_per_second=3, seconds_per_chunk=F(2, 3)),
    TMRope(engine="serving"),
    TMRopeQwen3(),
    TMRopeQwen3(tokens_per_second=F(7, 2)),
    TMRopeQwen3(engine="serving"),
]


def patches_by_a_loop(part: Grid | Clip, scheme: Any) -> list[Any]:
    """Return the ids of patches, relative to those of the first."""
    rate = F(part.seconds_per_frame or 0) * scheme.tokens_per_second
    exactly = isinstance(scheme, TMRopeQwen3) and scheme.engine == "transformers"
    times = [t * rate if exactly else F(floor(t * rate)) for t in range(part.frames)]
    return [*product(times, range(part.height), range(part.width))]


def clip_by_a_loop(clip: Clip, cursor: Fraction, scheme: Any) -> tuple[list[Any], Fraction, Fraction]:
    """Return the ids of a clip's tokens, the cursor after it, and the highest id plus one."""
    shared = isinstance(scheme, TMRope) == (scheme.engine == "transformers")
    apart = 0 if shared else 1
    base, patches, audio = cursor + 1 + apart, patches_by_a_loop(clip, scheme), [(F(k),) * 3 for k in range(clip.audio)]
    runs: list[list[Any]]
    if isinstance(scheme, TMRope):
        size = int(scheme.tokens_per_second * scheme.seconds_per_chunk)
        runs = [run for pair in zip_longest(chunks(patches, size), chunks(audio, size)) for run in pair if run]
    else:  # in the order of time, a patch before audio
        merged = sorted([(*token, 0) for token in patches] + [(*token, 1) for token in audio], key=itemgetter(0))
        runs = [[token[:3] for token in run] for _, run in groupby(merged, key=itemgetter(3))]
    counted = runs if scheme.engine == "serving" else runs[-1:]
    after = base + max(max(token) for run in counted for token in run) + 1
    ids: list[Any] = [(cursor,) * 3, (cursor + apart,) * 3]
    ids += [tuple(base + number for number in token) for run in runs for token in run]
    highest = max(max(token) for token in ids)
    ids += [(after,) * 3, (after + apart,) * 3]
    following = after + 1 + apart
    return ids, following, max(highest + 1, following) if scheme.engine == "transformers" else following


def chunks(tokens: list[Any], size: int) -> list[list[Any]]:
    """Cut tokens where their time reaches the next chunk; each token opens at most one chunk."""
    parts: list[list[Any]] = [[]]
    for token in tokens:
        if token[0] >= len(parts) * size:
            parts.append([])
        parts[-1].append(token)
    return parts


def document_by_a_loop(document: list[Segment], scheme: Any, start: int) -> tuple[list[Any], Fraction]:
    ids: list[Any] = []
    cursor, highest = F(start), F(start)
    for part in document:
        if isinstance(part, Clip):
            placed_ids, cursor, after = clip_by_a_loop(part, cursor, scheme)
            ids += placed_ids
            highest = max(highest, after)
        elif isinstance(part, Grid):
            tokens = [tuple(cursor + number for number in patch) for patch in patches_by_a_loop(part, scheme)]
            ids += tokens
            cursor = max(map(max, tokens)) + 1
        else:
            assert isinstance(part, Text | Audio)
            ids += [(cursor + k,) * 3 for k in range(part.length)]
            cursor += part.length
        highest = max(highest, cursor)
    return ids, highest


@st.composite
def parts(draw: st.DrawFn) -> Segment:
    sides, seconds = st.integers(1, 4), st.fractions(F(1, 4), 9, max_denominator=6)
    kind = draw(st.sampled_from([Text, Audio, Grid, Clip]))
    if kind in (Text, Audio):
        return kind(draw(st.integers(1, 4)))
    frames = draw(st.integers(1, 5))
    options: Any = {"frames": frames, "seconds_per_frame": draw(seconds if frames > 1 else st.none() | seconds)}
    if kind is Clip:
        options["audio"] = draw(st.integers(1, 70))
    return kind(draw(sides), draw(sides), **options)


BATCHES = st.lists(st.lists(parts(), min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_ids_of_clips_equal_those_of_a_loop_over_tokens(scheme: Scheme) -> None:
    @settled
    @given(BATCHES, st.integers(-40, 40))
    def check(batch: list[list[Segment]], start: int) -> None:
        positions = place(SegmentTable.from_documents(batch), scheme, start)
        loops = [document_by_a_loop(document, scheme, start) for document in batch]
        assert exact(positions) == [token for ids, _ in loops for token in ids]
        for (ids, following), resumable, (next_position, delta) in zip(
            loops, positions.resumable, positions.documents[2:].T.tolist(), strict=True
        ):
            assert resumable == (following.denominator == 1)
            if resumable:
                assert (next_position, delta) == (following, following - start - len(ids))

    check()


def short(frames: int, seconds: Fraction | int) -> Grid:
    return Grid(1, 1, frames=frames, seconds_per_frame=seconds)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: TMRope(0), InvalidInputError, "TMRope.tokens_per_second: got 0, want an integer or"),
        (lambda: TMRope(seconds_per_chunk=F(1, 99)), InvalidInputError, "TMRope.seconds_per_chunk: got 1/99, want at"),
        (lambda: TMRope(seconds_per_chunk=-1), InvalidInputError, "TMRope.seconds_per_chunk: got -1, want an"),
        (lambda: TMRopeQwen3(engine="vllm"), InvalidInputError, "TMRopeQwen3.engine: got 'vllm', want one of"),  # type: ignore[arg-type]
        (lambda: placed([short(2, F(1, prime)) for prime in (65537, 65539)], "tmrope-qwen3"), LimitExceededError,
         "documents[0]: got times without a common denominator below 2**31, want times with one"),
        (lambda: placed([short(2**27, F(2**31 - 1, 2))], "tmrope-qwen3"), LimitExceededError,
         "scheme 'tmrope-qwen3': got ids beyond 2**61 in units of their times, want smaller ids"),
    ],
)  # fmt: skip
def test_invalid_schemes_and_times_are_refused(make: Callable[[], object], error: type[MmposError], words: str) -> None:
    assert_refused(words, make, error)


def test_documents_with_different_times_require_no_common_denominator() -> None:
    documents = SegmentTable.from_documents([[short(2, F(1, prime)), Text(1)] for prime in (65537, 65539)])
    positions = place(documents, "tmrope-qwen3")
    assert times(positions) == [0, F(13, 65537), 1 + F(13, 65537), 0, F(13, 65539), 1 + F(13, 65539)]
    np.testing.assert_array_equal(positions.resumable, [False, False])
