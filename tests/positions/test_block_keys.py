"""Block keys are equal if and only if everything up to the end of the block is, as a loop over tokens finds."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CASES, SECONDS, Case, Document, grids, place_document, separated

from mmpos import (
    Grid,
    InvalidInputError,
    PositionTable,
    SegmentTable,
    SequenceBuilder,
    Text,
    block_keys,
    place,
)
from mmpos.schemes import get_scheme
from mmpos.segments import Placeholders

PATCH = 9


@dataclasses.dataclass(frozen=True)
class Request:
    """A document with the ids of its text and the contents of its grids."""

    document: Document
    case: Case
    start: int = 0
    texts: tuple[int, ...] = (1,)
    contents: tuple[str, ...] = ("cat",)

    def ids(self) -> list[int]:
        """Return the id of every token; text ids depend on the index, so a change leaves other text as it is."""
        kinds = [isinstance(part, Text) for part in self.document for _ in range(tokens_of(part))]
        return [self.texts[i % len(self.texts)] if is_text else PATCH for i, is_text in enumerate(kinds)]

    def hashes(self) -> list[str]:
        grids = sum(isinstance(part, Grid) for part in self.document)
        return [self.contents[i % len(self.contents)] for i in range(grids)]

    def tokens(self) -> list[tuple[Any, ...]]:
        """List, in a plain loop, everything that determines the key and the value of every token."""
        contents: list[tuple[Any, ...]] = []
        positions = place_document(self.document, self.case.name, self.start, **self.case.params).ids
        hashes, ids = iter(self.hashes()), self.ids()
        for part in self.document:
            shape = () if isinstance(part, Text) else (*part.extents, part.row_separator, next(hashes))
            for index in range(tokens_of(part)):
                here = (index, *shape) if shape else ()
                contents.append((positions[len(contents)], ids[len(contents)], here))
        return contents

    def keys(self, block_size: int) -> list[bytes]:
        segments = SegmentTable.from_documents([self.document])
        positions = place(segments, self.case.scheme, self.start)
        (keys,) = block_keys(segments, positions, block_size, input_ids=self.ids(), image_hashes=self.hashes())
        return keys


def tokens_of(part: Text | Grid) -> int:
    if isinstance(part, Text):
        return part.length
    return part.frames * part.height * (part.width + part.row_separator)


@st.composite
def relatives(draw: st.DrawFn) -> list[Request]:
    """Draw requests that often begin alike, since their parts, starts, ids and contents are from small pools."""
    case = draw(st.sampled_from(CASES))
    grid, other = draw(grids(case)), draw(grids(case))
    pool: list[Text | Grid] = [Text(1), Text(2), Text(3)] if case.text else []
    pool += [grid, other, dataclasses.replace(grid, seconds_per_frame=draw(st.sampled_from(SECONDS[1:])))]
    pool += [dataclasses.replace(grid, height=grid.width, width=grid.height)]
    if get_scheme(case.scheme).row_separators:
        pool += [dataclasses.replace(grid, row_separator=not grid.row_separator)]
    parts = st.lists(st.sampled_from(pool), min_size=1, max_size=5)
    # Text may have the id of a patch, so that only grids distinguish text from patches.
    texts = st.sampled_from([(1,), (1,), (PATCH,), (1, PATCH)])
    contents = st.sampled_from([("cat", "dog"), ("cat", "dog"), ("cat",), ("dog", "cat")])
    document = parts if case.adjacent else parts.map(separated)
    request = st.builds(Request, document, st.just(case), st.sampled_from([0, 0, 1]), texts, contents)
    return draw(st.lists(request, min_size=2, max_size=5))


@settings(max_examples=50)
@given(relatives(), st.integers(1, 5))
def test_keys_are_equal_if_and_only_if_everything_up_to_the_end_of_the_block_is_equal(
    requests: list[Request], block_size: int
) -> None:
    keys = [request.keys(block_size) for request in requests]
    tokens = [request.tokens() for request in requests]
    for own, all_tokens in zip(keys, tokens, strict=True):
        assert len(own) == len(all_tokens) // block_size
    for (a, b), (i, j) in product(product(range(len(requests)), repeat=2), product(range(4), repeat=2)):
        if i < len(keys[a]) and j < len(keys[b]):
            same = tokens[a][: (i + 1) * block_size] == tokens[b][: (j + 1) * block_size]
            assert (keys[a][i] == keys[b][j]) == same


def test_a_key_hashes_these_bytes() -> None:
    """The grid ends with the second block, so the third block contains no part of it."""
    segments = SegmentTable.from_documents([[Text(2), Grid(2, 3), Text(4)]])
    positions = place(segments, "rope-tie-v2")
    assert positions.dense()[1].tolist() == [0, 1, 3.5, 4.5, 5.5, 3.5, 4.5, 5.5, 8, 9, 10, 11]
    ids = [5, 6, *[9] * 6, 1, 2, 3, 4]
    keys = block_keys(segments, positions, 4, input_ids=ids, image_hashes=["cat"], salt="adapter")
    half, content = 1 << 61, hashlib.sha256(b"cat").digest()
    key = hashlib.sha256(b"mmpos.block_keys 1" + struct.pack("<4q", 4, 2, 1, 1) + b"adapter").digest()
    want = []
    for block in (
        struct.pack("<8i4q2q", 0, 1, 4, 4, 0, 1, 3, 4, 5, 6, 9, 9, 1, 1)
        + struct.pack("<8q5q", *[0] * 6, half, half, 2, 1, 2, 3, 0)
        + content,
        struct.pack("<8i4q2q", 4, 5, 5, 5, 5, 3, 4, 5, 9, 9, 9, 9, 1, 1)
        + struct.pack("<8q5q", *[0] * 4, *[half] * 4, -2, 1, 2, 3, 0)
        + content,
        struct.pack("<8i4q2q", 8, 9, 10, 11, 8, 9, 10, 11, 1, 2, 3, 4, 0, 0),
    ):
        key = hashlib.sha256(key + block).digest()
        want.append(key)
    assert keys == block_keys(segments, positions, 4, input_ids=ids, image_hashes=[b"cat"], salt=b"adapter") == [want]


def test_nearly_equal_fractions_have_different_keys() -> None:
    segments = SegmentTable.from_documents([[Text(1)]])
    keys = set()
    for numerator, denominator in ((1, 2**31 - 1), (1, 2**31 - 2), (2, 2**31 - 1), (2**31 - 2, 2**31 - 1), (0, 1)):
        table = place(segments, "v2pe").table.copy()
        table[4], table[5] = denominator, 5 * denominator + numerator
        positions = PositionTable(table, place(segments, "v2pe").documents, 1, True, "v2pe")
        keys.add(block_keys(segments, positions, 1)[0][0])
    assert len(keys) == 5


def test_documents_have_the_same_keys_alone_and_in_a_batch() -> None:
    batch: list[Document] = [
        [Text(5), Grid(2, 2), Text(1)],
        [Text(1)],
        [Grid(3, 2), Text(1), Grid(2, 2, row_separator=True)],
        [Text(2), Grid(2, 2), Text(7)],
    ]
    contents = [["a"], [], ["b", "c"], ["d"]]
    segments = SegmentTable.from_documents(batch)
    positions = place(segments)
    ids = np.arange(positions.num_tokens)
    starts = positions.cu_seqlens
    together = block_keys(segments, positions, 3, input_ids=ids, image_hashes=[*"abcd"])
    alone = []
    for d, document in enumerate(batch):
        one = SegmentTable.from_documents([document])
        own_ids = ids[starts[d] : starts[d + 1]]
        alone += block_keys(one, place(one), 3, input_ids=own_ids, image_hashes=contents[d])
    assert together == alone
    assert [len(keys) for keys in together] == [3, 0, 4, 4]
    known = [together[0][:1], [], together[2], together[3][:2]]
    assert block_keys(segments, positions, 3, input_ids=ids, image_hashes=[*"abcd"], known=known) == together
    assert [len(keys) for keys in known] == [1, 0, 4, 2]
    nothing = SegmentTable.from_documents([])
    assert block_keys(nothing, place(nothing), 3) == []


def test_known_keys_are_continued_and_not_recomputed() -> None:
    segments = SegmentTable.from_documents([[Text(6)]])
    made_up = bytes(32)
    first, second = block_keys(segments, place(segments), 3, known=[[made_up]])[0]
    assert first == made_up
    assert second not in block_keys(segments, place(segments), 3)[0]


def build(*parts: Any, contents: tuple[str, ...] = ("cat", "dog")) -> Any:
    sequence = SequenceBuilder().build(list(parts))
    return dataclasses.replace(sequence, image_hashes=contents[: len(sequence.grid_thw)])


def test_a_sequence_uses_its_own_ids_and_image_hashes() -> None:
    one = build("ab", Grid(2, 3), "c", Grid(1, 2))
    (want,) = block_keys(one.segments, one.positions, 4, input_ids=one.input_ids, image_hashes=["cat", "dog"], salt="s")
    assert one.block_keys(4, salt="s") == want
    other = build("ab", Grid(2, 3), "c", Grid(1, 2), contents=("cat", "fox"))
    same = [a == b for a, b in zip(one.block_keys(5), other.block_keys(5), strict=True)]
    assert same == [True, True, False]


def test_generated_tokens_extend_the_keys_of_the_prompt() -> None:
    prompt, whole = build("ab", Grid(2, 3), "c"), build("ab", Grid(2, 3), "cdefghijk")
    keys = prompt.block_keys(4)
    generated = list(b"defghijk")
    assert prompt.block_keys(4, generated=generated) == whole.block_keys(4)
    assert prompt.block_keys(4, generated=generated, known=keys) == whole.block_keys(4)
    assert keys == whole.block_keys(4)[: len(keys)]


def test_an_image_given_only_by_its_size_has_no_keys() -> None:
    message = r"^image_hashes\[1\]: got None, want the hash of an image that came with its content$"
    sequence = dataclasses.replace(build("ab", Grid(1, 1), Grid(2, 3)), image_hashes=("cat", None))
    with pytest.raises(InvalidInputError, match=message):
        sequence.block_keys(4)


SEGMENTS = SegmentTable.from_documents([[Text(2), Grid(1, 2)], [Text(3)]])
POSITIONS = place(SEGMENTS)
PADDED = SegmentTable.from_input_ids(
    [[1, 2, 3], [1, 0, 0]], Placeholders(image=9), attention_mask=[[1, 1, 1], [1, 0, 0]]
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size: got 0, want >= 1"),
        ({"segments": [[Text(2)]]}, "segments: got list, want a SegmentTable"),
        ({"positions": POSITIONS.dense()}, "positions: got ndarray, want a PositionTable"),
        ({"positions": POSITIONS.window([0], [0], [4])}, "positions: got 1 document, want 2 as in segments"),
        ({"positions": POSITIONS.slice(0, 6)}, "positions: got 2 tokens in document 1, want at least 3 as in segments"),
        ({"positions": POSITIONS.pad()}, "positions: got padding in segment 3, want documents without padding"),
        ({"segments": PADDED}, "segments: got padding in segment 2, want documents without padding"),
        ({"input_ids": [1, 2]}, r"input_ids: got shape \(2,\), want \(7,\)"),
        ({"image_hashes": "x"}, "image_hashes: got str, want a list"),
        ({"image_hashes": []}, "image_hashes: got 0, want 1, one per grid$"),
        ({"image_hashes": [7]}, r"image_hashes\[0\]: got 7, want str or bytes"),
        ({"image_hashes": [""]}, r"image_hashes\[0\]: got nothing, want a hash of the content"),
        ({"salt": None}, "salt: got None, want str or bytes"),
        ({"salt": "\ud800"}, "salt: got text with a lone surrogate .*, want Unicode text"),
        ({"known": 1}, "known: got int, want a list"),
        ({"known": [bytes(32), []]}, r"known\[0\]: got bytes, want a list"),
        ({"known": [[]]}, "known: got lists for 1 document, want 2"),
        ({"known": [[], [bytes(32), bytes(32)]]}, r"known\[1\]: got 2 keys, want at most 1, one per full block"),
        ({"known": [[b"short"], []]}, r"known\[0\]\[0\]: got b'short', want 32 bytes"),
        ({"known": [["text"], []]}, r"known\[0\]\[0\]: got 'text', want 32 bytes"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    valid: dict[str, Any] = {"segments": SEGMENTS, "positions": POSITIONS, "block_size": 2}
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        block_keys(**(valid | arguments))
