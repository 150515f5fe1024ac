"""Engine identities: slices, windows, padding, shards and decoded tokens have the same ids as in the whole table."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CASES, RESUMABLE, Case, Document, Id, batches, documents, exact

from mmpos import Grid, PositionTable, SegmentTable, place
from mmpos.positions.table import LAYOUTS, Layout
from mmpos.positions.table_rows import NEXT_POSITION
from mmpos.schemes import XDRope

settled = settings(max_examples=60)


@st.composite
def tables(draw: st.DrawFn, cases: tuple[Case, ...] = CASES, min_size: int = 0) -> PositionTable:
    """Draw a placed batch of any scheme."""
    case = draw(st.sampled_from(cases))
    batch: list[Document] = draw(batches(case, min_size))
    return place(SegmentTable.from_documents(batch), case.scheme, draw(st.integers(-9, 1000)))


def per_document(positions: PositionTable) -> list[list[Id]]:
    """Return the ids of each document."""
    ids, cuts = exact(positions), positions.cu_seqlens.tolist()
    return [ids[begin:end] for begin, end in pairwise(cuts)]


def header(positions: PositionTable) -> list[list[int]]:
    """Return the next positions and the deltas."""
    return [positions.next_positions.tolist(), positions.deltas.tolist()]


@settled
@given(tables(RESUMABLE), st.data())
def test_decoded_tokens_continue_at_the_next_position(positions: PositionTable, data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(0, 3), min_size=positions.num_documents, max_size=positions.num_documents))
    decoded = positions.decode(steps)
    nexts = positions.next_positions.tolist()
    want = [[(n + k,) * positions.axes for k in range(count)] for n, count in zip(nexts, steps, strict=True)]
    assert per_document(decoded) == want
    assert header(decoded) == [
        [n + count for n, count in zip(nexts, steps, strict=True)],
        positions.deltas.tolist(),
    ]
    assert per_document(positions.decode(2)) == [[(n,) * positions.axes, (n + 1,) * positions.axes] for n in nexts]
    assert exact(decoded.decode(1)) == [(n + count,) * positions.axes for n, count in zip(nexts, steps, strict=True)]


@settled
@given(tables(), st.data())
def test_take_selects_columns_of_the_whole_table(positions: PositionTable, data: st.DataObject) -> None:
    """Ranges may overlap, repeat, go backwards within a document, cross documents or be empty."""
    n = positions.num_tokens
    owner = np.repeat(np.arange(positions.num_documents), positions.lengths)
    starts: list[int] = []
    stops: list[int] = []
    indices: list[int] = []
    for start, stop in data.draw(st.lists(st.tuples(st.integers(0, n), st.integers(0, n)), max_size=8)):
        if start < stop and indices and owner[start] < owner[indices[-1]]:
            continue
        starts.append(start)
        stops.append(max(start, stop))
        indices += range(start, stop)
    taken = positions.take(starts, stops)
    whole = exact(positions)
    assert exact(taken) == [whole[i] for i in indices]
    np.testing.assert_array_equal(taken.dense(), positions.dense()[:, np.array(indices, np.int64)])
    counts = np.bincount(owner[indices], minlength=positions.num_documents) if indices else 0 * positions.lengths
    np.testing.assert_array_equal(taken.lengths, counts)
    np.testing.assert_array_equal(taken.documents[2:], positions.documents[2:])


@settled
@given(tables(RESUMABLE, min_size=1), st.data())
def test_windows_continue_past_the_end(positions: PositionTable, data: st.DataObject) -> None:
    entry = st.tuples(st.integers(0, positions.num_documents - 1), st.integers(0, 40), st.integers(0, 12))
    entries = data.draw(st.lists(entry, max_size=5))
    windows = positions.window(*(list(column) for column in zip(*entries, strict=True)) if entries else ([], [], []))
    known, nexts, deltas = per_document(positions), *header(positions)
    want, want_next, want_delta = [], [], []
    for document, start, length in entries:
        ids = known[document]
        continuation = [(nexts[document] + k,) * positions.axes for k in range(60)]
        want.append([*ids, *continuation][start : start + length])
        past = max(0, start + length - len(ids)) if length else 0
        want_next.append(nexts[document] + past)
        want_delta.append(deltas[document])
    assert per_document(windows) == want
    assert header(windows) == [want_next, want_delta]


@settled
@given(st.sampled_from(CASES), st.data())
def test_an_updated_batch_equals_its_documents_concatenated_again(case: Case, data: st.DataObject) -> None:
    start, tokens = st.integers(-9, 1000), st.integers(0, 20)

    def table(count: int) -> PositionTable:
        batch = [data.draw(documents(case)) for _ in range(count)]
        placed = place(SegmentTable.from_documents(batch), case.scheme, data.draw(start))
        return placed.pad(placed.max_seqlen + 1) if data.draw(st.booleans()) else placed.slice(0, placed.num_tokens)

    positions = table(data.draw(st.integers(0, 4)))
    positions = positions.take([data.draw(tokens) % (positions.num_tokens + 1)], [positions.num_tokens])
    changes = [data.draw(st.sampled_from(["keep", "remove", "replace"])) for _ in range(positions.num_documents)]
    remove = data.draw(st.permutations([d for d, change in enumerate(changes) if change == "remove"]))
    replace = {d: table(1) for d, change in reversed([*enumerate(changes)]) if change == "replace"}
    add = [table(data.draw(st.integers(0, 2))) for _ in range(data.draw(st.integers(0, 2)))]
    own = [positions.window([d], [0], [length]) for d, length in enumerate(positions.lengths)]
    kept = [replace.get(d, one) for d, one in enumerate(own) if d not in remove]
    updated = positions.updated(remove=remove, replace=replace, add=add)
    assert updated == PositionTable.concatenate([positions.window([], [], []), *kept, *add])
    assert per_document(updated) == [ids for table in (*kept, *add) for ids in per_document(table)]


@settled
@given(tables(), st.integers(1, 3), st.sampled_from(LAYOUTS))
def test_shards_together_equal_the_whole(positions: PositionTable, world_size: int, layout: Layout) -> None:
    """Shards take blocks of every document, or of all documents as one sequence whose boundaries are ignored."""
    blocks = 2 * world_size if layout.startswith("zigzag") else world_size
    lengths = positions.lengths.tolist()
    if not layout.endswith("sequence"):
        lengths = [-(-length // blocks) * blocks for length in lengths]
    elif lengths:
        lengths[-1] += -sum(lengths) % blocks
    padded = positions.pad(lengths)
    tokens = [(document, token) for document, ids in enumerate(per_document(padded)) for token in ids]
    wholes = [(0, len(tokens))] if layout.endswith("sequence") else [*pairwise(padded.cu_seqlens.tolist())]
    seen: list[int] = []
    for rank in range(world_size):
        mine = [rank, 2 * world_size - 1 - rank] if layout.startswith("zigzag") else [rank]
        want = []
        for begin, end in wholes:
            size = (end - begin) // blocks
            want += [token for block in mine for token in range(begin + block * size, begin + (block + 1) * size)]
        shard = padded.shard(rank, world_size, layout)
        assert padded.shard_indices(rank, world_size, layout).tolist() == want
        assert [(d, token) for d, ids in enumerate(per_document(shard)) for token in ids] == [tokens[i] for i in want]
        counts = [sum(tokens[i][0] == document for i in want) for document in range(len(lengths))]
        assert shard.cu_seqlens.tolist() == [sum(counts[:document]) for document in range(len(lengths) + 1)]
        assert shard.documents[NEXT_POSITION:].tolist() == padded.documents[NEXT_POSITION:].tolist()
        seen += want
    assert sorted(seen) == list(range(len(tokens)))


@settled
@given(tables(), st.integers(0, 3), st.sampled_from(["left", "right"]))
def test_padding_has_id_zero_and_shifts_no_tokens(
    positions: PositionTable, more: int, side: Literal["left", "right"]
) -> None:
    length = positions.max_seqlen + more
    table = positions.pad(length, side)
    zero = (0,) * positions.axes
    want, ones = [], []
    for real in per_document(positions):
        gap = [zero] * (length - len(real))
        want.append([*gap, *real] if side == "left" else [*real, *gap])
        ones.append(sorted([0] * len(gap) + [1] * len(real), reverse=side == "right"))
    assert per_document(table) == want
    np.testing.assert_array_equal(table.documents[2:], positions.documents[2:])
    ids, mask = positions.padded(length, side)
    np.testing.assert_array_equal(ids, table.dense().reshape(positions.axes, len(want), length))
    np.testing.assert_array_equal(mask, np.array(ones, np.int64).reshape(len(ones), length), strict=True)


PREFIX_STABLE = [case for case in RESUMABLE if case.name != "mrope-transformers"]


@pytest.mark.parametrize("case", PREFIX_STABLE, ids=lambda case: case.label)
@settings(max_examples=25)
@given(data=st.data())
def test_a_suffix_depends_on_its_prefix_only_through_the_cursor(case: Case, data: st.DataObject) -> None:
    document = data.draw(documents(case).filter(lambda parts: len(parts) > 1))
    cut = data.draw(st.integers(1, len(document) - 1))
    start = data.draw(st.integers(-9, 1000))
    whole, prefix = (
        place(SegmentTable.from_documents([parts]), case.scheme, start) for parts in (document, document[:cut])
    )
    scheme = case.scheme
    if isinstance(scheme, XDRope):  # the scheme's state includes the number of images
        scheme = replace(
            scheme, first_image=scheme.first_image + sum(isinstance(part, Grid) for part in document[:cut])
        )
    suffix = place(SegmentTable.from_documents([document[cut:]]), scheme, prefix.next_positions)
    assert exact(prefix) + exact(suffix) == exact(whole)
    assert suffix.next_positions.tolist() == whole.next_positions.tolist()
    assert (prefix.deltas + suffix.deltas).tolist() == whole.deltas.tolist()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("scheme", ["mrope", "rope-tie-v2", "rows"])
def test_zero_documents_are_accepted_by_every_method(scheme: str) -> None:
    positions = place(SegmentTable.from_documents([]), scheme)
    views = [positions.take([], []), positions.slice(0, 0), positions.window([], [], []), positions.decode(3)]
    views += [positions.shard(0, 2, layout) for layout in LAYOUTS] + [positions.pad(), positions.pad(5, "left")]
    assert views == [positions] * len(views)
    assert positions.dense().shape == positions.rationals()[0].shape == (positions.axes, 0)
    assert (positions.cu_seqlens.tolist(), positions.max_seqlen, positions.num_documents) == ([0], 0, 0)
    assert positions.next_positions.shape == positions.deltas.shape == positions.shard_indices(0, 2).shape == (0,)
    for length, width in ((None, 0), (4, 4)):
        ids, mask = positions.padded(length)
        assert (ids.shape, mask.shape) == ((positions.axes, 0, width), (0, width))
