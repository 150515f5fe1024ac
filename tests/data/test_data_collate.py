"""Batches and their masks: equal to plain loops, in C and numpy, and unchanged by sharding, pickling and pinning."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni import BUILDER, CLIP
from refusals import assert_refused
from results import assert_equal
from test_data_packing import documents as document_lists
from test_data_packing import example, examples_of
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.utils.data._utils import pin_memory as pin

from mmpos import Grid, ImageProcessor, InvalidInputError, Markers, SequenceBuilder, UnsupportedError
from mmpos.data.batch import Batch, MaskMod
from mmpos.data.collate import PackedCollator, PaddedCollator
from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.data.packing import Pack
from mmpos.positions.table import Layout, Side
from mmpos.rotary.device import DevicePositions
from mmpos.segments import Audio
from mmpos.support import native
from mmpos_bench.data import labelled

FIRST = labelled("a", ["ab", Grid(1, 2), "c"])
SECOND = labelled("b", [[7, 8, 9]])
UP: Any = "up"
PHOTO = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Return all tensors in a batch by name."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    values["device_positions"] = batch.device_positions.table
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def test_all_fields_of_a_packed_batch_are_set() -> None:
    batch = PackedCollator(multiple_of=4, pad_token_id=5)([FIRST, SECOND])
    assert batch.keys == ("a", "b")
    assert batch.input_ids.tolist() == [97, 98, 256, 258, 258, 257, 99, 5, 7, 8, 9, 5]
    assert batch.labels.tolist() == [-100, 98, 256, -100, -100, 257, 99, -100, -100, 8, 9, -100]
    assert batch.position_ids().tolist() == [
        [0, 1, 2, 5, 5, 8, 9, 0, 0, 1, 2, 0],
        [0, 1, 2, 4, 6, 8, 9, 0, 0, 1, 2, 0],
    ]
    assert batch.text_positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert (batch.cu_seqlens.tolist(), batch.cu_seqlens.dtype, batch.max_seqlen) == ([0, 8, 12], torch.int32, 8)
    assert (batch.attention_mask, batch.patches) == (None, None)
    assert batch.grid_thw.tolist() == [[1, 1, 2]]
    assert (batch.image_spans.tolist(), batch.feature_spans.tolist()) == ([[3, 5]], [[0, 2]])
    assert (batch.packed, batch.fill, batch.shifted, batch.world_size) == (True, 10 / 12, False, 1)
    table, documents = batch.positions.table, batch.positions.documents
    assert (table.flags.writeable, documents.flags.writeable) == (False, False)
    assert repr(batch) == "Batch(packed, 2 documents, 12 tokens, 1 image, fill=0.833, device=cpu)"


COLUMNS = ("input_ids", "labels", "text", "positions", "spans", "features", "mask")


def loops(examples: Sequence[Example], sizes: Sequence[int], side: str) -> dict[str, Any]:
    """Pad documents to these sizes, the last of which may be a document of padding, and collate them by token."""
    arrays: dict[str, Any] = {name: [] for name in COLUMNS}
    for one, size in zip_longest(examples, sizes):
        tokens, dense = (one.num_tokens, one.sequence.positions.dense().T.tolist()) if one else (0, [])
        before = size - tokens if side == "left" else 0
        first = len(arrays["input_ids"])
        for start, stop in one.sequence.image_spans.tolist() if one else []:
            arrays["spans"].append([first + before + start, first + before + stop])
            row = arrays["features"][-1][1] if arrays["features"] else 0
            arrays["features"].append([row, row + stop - start])
        for i in range(size):
            is_token = 0 <= i - before < tokens
            arrays["input_ids"].append(int(one.sequence.input_ids[i - before]) if is_token else 3)
            arrays["labels"].append(int(one.labels[i - before]) if is_token and i > before else IGNORE_INDEX)
            arrays["mask"].append(int(is_token))
            arrays["text"].append(max(i - before, 0))
            arrays["positions"].append(dense[i - before] if is_token else [0, 0])
    return arrays


def flat(batch: Batch) -> dict[str, Any]:
    tokens = (tensor.flatten().tolist() for tensor in (batch.input_ids, batch.labels, batch.text_positions))
    spans = (tensor.tolist() for tensor in (batch.image_spans, batch.feature_spans))
    return dict(zip(COLUMNS, (*tokens, batch.position_ids().flatten(1).T.tolist(), *spans), strict=False))


some_documents = document_lists.filter(bool)


@given(
    some_documents, st.sampled_from([1, 3, 8]), st.sampled_from(["left", "right", None]), st.none() | st.integers(0, 2)
)
def test_batches_match_plain_loops(documents: Any, multiple_of: int, side: Side | None, room: int | None) -> None:
    examples = examples_of(documents)
    sizes = [-(-one.num_tokens // multiple_of) * multiple_of for one in examples]
    more = (room or 0) * multiple_of
    if side is None:
        collate: Any = PackedCollator(multiple_of, None if room is None else sum(sizes) + more, pad_token_id=3)
        sizes += [more] * (more > 0)
    else:
        sizes = [max(sizes) + more] * len(examples)
        collate = PaddedCollator(side, multiple_of, None if room is None else sizes[0], pad_token_id=3)
    batch, want = collate(examples), loops(examples, sizes, side or "right")
    mask = want.pop("mask")
    assert flat(batch) == want
    if side is None:
        assert batch.attention_mask is None
    else:
        assert batch.attention_mask.flatten().tolist() == mask
        assert batch.input_ids.shape == batch.position_ids().shape[1:] == (len(examples), sizes[0])
    assert batch.packed == (side is None)
    assert batch.fill == pytest.approx(sum(mask) / len(mask))
    assert (batch.cu_seqlens.tolist(), batch.max_seqlen) == ([0, *np.cumsum(sizes).tolist()], max(sizes))
    assert batch.grid_thw.tolist() == [grid for one in examples for grid in one.sequence.grid_thw.tolist()]


@settings(max_examples=50)
@given(some_documents, st.sampled_from([1, 2, 3]), st.sampled_from(get_args(Layout)), st.booleans())
def test_shards_of_all_ranks_form_the_batch(documents: Any, world_size: int, layout: Layout, packed: bool) -> None:
    examples = examples_of(documents)
    collator = PackedCollator if packed or layout.endswith("sequence") else PaddedCollator
    whole = collator(multiple_of=2 * world_size)(examples)
    shifted = [IGNORE_INDEX] * whole.labels.numel()
    for start, stop in zip(whole.cu_seqlens[:-1].tolist(), whole.cu_seqlens[1:].tolist(), strict=True):
        shifted[start : stop - 1] = whole.labels.flatten()[start + 1 : stop].tolist()
    want = {**flat(whole), "labels": shifted}
    spans, features = want.pop("spans"), want.pop("features")
    reassembled: dict[str, Any] = {name: [None] * len(shifted) for name in want}
    rows: dict[int, int] = {}
    for rank in range(world_size):
        shard = whole.shard(rank, world_size, layout)
        index = whole.positions.shard_indices(rank, world_size, layout).tolist()
        for name in want:
            for i, value in zip(index, flat(shard)[name], strict=True):
                reassembled[name][i] = value
        tokens, features_here = (tensor.tolist() for tensor in shard.image_tokens())
        rows |= {index[token]: row for token, row in zip(tokens, features_here, strict=True)}
        assert shard.input_ids.shape[:-1] == whole.input_ids.shape[:-1]
        assert shard.cu_seqlens.tolist() == [sum(i < end for i in index) for end in whole.cu_seqlens.tolist()]
        assert (shard.shifted, shard.world_size) == (True, world_size)
    assert reassembled == want
    pairs = zip(spans, features, strict=True)
    assert rows == {token: row for s, f in pairs for token, row in zip(range(*s), range(*f), strict=True)}


def test_a_shard_of_a_shard_keeps_its_features() -> None:
    whole = PackedCollator(multiple_of=8)([example("a", 3, (4, 5), 8), example("b", (3, 3), 4)])
    once = whole.shard(0, 2, "contiguous")
    twice = once.shard(1, 2, "contiguous")
    index = whole.positions.shard_indices(0, 2, "contiguous")[once.positions.shard_indices(1, 2, "contiguous")]
    tokens, rows = twice.image_tokens()
    want = dict(zip(*(tensor.tolist() for tensor in whole.image_tokens()), strict=True))
    assert {int(index[t]): r for t, r in zip(tokens.tolist(), rows.tolist(), strict=True)}.items() <= want.items()
    assert twice.input_ids.tolist() == whole.input_ids[index].tolist()
    assert twice.labels.tolist() == whole.shift_labels().labels[index].tolist()
    assert twice.world_size == 4


def test_shifting_labels_is_idempotent() -> None:
    batch = PackedCollator()([FIRST, SECOND]).shift_labels()
    assert batch.labels.tolist() == [98, 256, -100, -100, 257, 99, -100, 8, 9, -100]
    assert batch.shift_labels() is batch
    own = dataclasses.replace(PackedCollator()([FIRST, SECOND]), labels=torch.arange(10))
    assert own.shift_labels().labels.tolist() == [1, 2, 3, 4, 5, 6, -100, 8, 9, -100]


def test_transformers_finds_documents_in_the_text_row() -> None:
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    batch = PackedCollator(multiple_of=4, length=24)([FIRST, SECOND, FIRST.slice(6, 7)])
    position_ids = batch.as_dict(text_row=True, batched=True)["position_ids"]
    assert position_ids.shape == (3, 1, 24)
    (cu_seqlens, _), (max_seqlen, _) = utils.prepare_fa_kwargs_from_position_ids(position_ids[0])
    assert cu_seqlens.tolist() == batch.cu_seqlens.tolist() == [0, 8, 12, 16, 24]
    assert int(max_seqlen) == batch.max_seqlen


def test_parts_of_a_split_document_keep_their_position_ids_and_start_without_a_label() -> None:
    batch = PackedCollator()([FIRST.slice(0, 6), FIRST.slice(6, 7), SECOND])
    assert batch.position_ids()[0].tolist() == [0, 1, 2, 5, 5, 8, 9, 0, 1, 2]
    assert batch.text_positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 1, 2]
    assert batch.labels.tolist() == [-100, 98, 256, -100, -100, 257, -100, -100, 8, 9]
    bare = SequenceBuilder(scheme="flatten", markers=Markers(None, None, 256)).build([Grid(1, 2), Grid(1, 1)])
    batch = PackedCollator()([Example("b", bare, bare.input_ids)] * 2)  # adjacent images have separate spans
    assert batch.image_spans.tolist() == batch.feature_spans.tolist() == [[0, 2], [2, 3], [3, 5], [5, 6]]


def with_photos(scheme: str = "rope-tie") -> list[Example]:
    builder = SequenceBuilder(images=ImageProcessor("pillow", patch_size=4, min_pixels=64), scheme=scheme)
    sequences = [builder.build(["ab", PHOTO, "c"]), builder.build(["x"]), builder.build([PHOTO[:, ::-1].copy(), "y"])]
    return [Example(f"p{i}", sequence, sequence.input_ids) for i, sequence in enumerate(sequences)]


def test_patches_are_concatenated_unchanged() -> None:
    examples = with_photos()
    batch: Any = PackedCollator()(examples)
    assert (batch.patches.dtype, batch.patches.shape) == (torch.uint8, (16, 4, 4, 3))
    want: list[Any] = [examples[0].sequence.patches, examples[2].sequence.patches]
    assert (batch.patches.numpy() == np.concatenate(want)).all()
    tokens, rows = batch.image_tokens()
    assert (batch.input_ids[tokens] == 258).all()
    assert rows.tolist() == list(range(4))  # four patches are merged into one token


@pytest.mark.parametrize("scheme", ["rope-tie", "rope-tie-fractional", "mrope"])
def test_a_batch_holds_no_floats_which_mixed_precision_would_cast(scheme: str) -> None:
    batch = PackedCollator(multiple_of=8)(with_photos(scheme))
    passed = [value for value in batch.as_dict("table").values() if isinstance(value, torch.Tensor)]
    assert not any(tensor.is_floating_point() for tensor in [*tensors(batch).values(), *passed])
    assert scheme == "rope-tie-fractional" or not batch.as_dict()["position_ids"].is_floating_point()


def test_as_dict_returns_arguments_by_name() -> None:
    batch = PackedCollator()([FIRST, SECOND])
    names = {"input_ids", "labels", "cu_seqlens", "max_seqlen", "grid_thw", "image_spans", "feature_spans"}
    arguments = batch.as_dict(batched=True)
    assert arguments.keys() == names | {"position_ids"}
    assert arguments["input_ids"].shape == arguments["labels"].shape == (1, 10)
    assert (arguments["position_ids"].shape, arguments["position_ids"].dtype) == ((2, 1, 10), torch.int64)
    assert arguments["max_seqlen"] == 7
    sharded = PaddedCollator(multiple_of=4)([SECOND, SECOND]).shard(1, 2)
    arguments = sharded.as_dict("table", batched=True)
    assert arguments.keys() == names | {"positions", "shift_labels", "attention_mask"}
    assert isinstance(arguments["positions"], DevicePositions)
    assert arguments["shift_labels"].tolist() == arguments["labels"].tolist() == [[9, -100], [9, -100]]
    assert "patches" in PackedCollator()(with_photos()).as_dict()


def test_position_ids_are_returned_in_the_requested_dtype() -> None:
    batch = PackedCollator()([FIRST, SECOND])
    assert batch.position_ids().dtype == torch.int32
    for dtype in (torch.int64, torch.float64):
        ids = batch.position_ids(dtype, text_row=True)
        assert ids.dtype == dtype
        assert ids.tolist() == [batch.text_positions.tolist(), *batch.position_ids().tolist()]
    assert torch.equal(batch.position_ids(), torch.from_numpy(batch.positions.dense()))
    assert FRACTIONAL.position_ids().dtype == torch.float64


def test_all_tensors_are_moved_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PaddedCollator()(with_photos())
    moved = batch.to("meta", non_blocking=True)
    assert {tensor.device.type for tensor in tensors(moved).values()} == {"meta"}
    assert moved.device == torch.device("meta")
    assert moved.positions is batch.positions
    pinned: list[int] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    assert_equal(pin.pin_memory(batch), batch)  # a DataLoader's pinning thread calls it
    assert sorted(pinned) == sorted(tensor.data_ptr() for tensor in tensors(batch).values())


def test_collators_and_batches_can_be_pickled_before_and_after_their_spans_are_read() -> None:
    examples = [*with_photos(), SECOND, SECOND]
    packs = [Pack(tuple(examples[:2]), 100), Pack(tuple(examples[2:]), 100)]
    padded, packed = PaddedCollator("left", multiple_of=8), PackedCollator(multiple_of=4, length=64)
    assert_equal(pickle.loads(pickle.dumps(padded))(packs), padded(examples))
    assert_equal(packed(packs), packed(examples))
    for batch in (packed(packs), packed(packs).shard(1, 2)):
        assert "image_spans" not in vars(batch)
        for _ in range(2):
            assert_equal(pickle.loads(pickle.dumps(batch)), batch)
            assert batch.image_spans is batch.image_spans
    with pytest.raises(AttributeError, match="'Batch' object has no attribute 'spans'"):
        assert batch.spans  # type: ignore[attr-defined]


WHOLE, PADDED = PackedCollator()([FIRST, SECOND]), PaddedCollator(multiple_of=4)([FIRST, SECOND])
PHOTOS, FRACTIONAL = PackedCollator()(with_photos()), PackedCollator()(with_photos("rope-tie-fractional"))
IGNORED = "got True for a batch with patches, which a Transformers model would ignore, want ModelC"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedCollator()([]), "examples: got none, want at least one"),
        (lambda: PackedCollator()(UP), "examples: got str, want a list of Examples or a Pack"),
        (lambda: PaddedCollator()([FIRST, UP]), "examples[1]: got str, want an Example or a Pack"),
        (lambda: PackedCollator(length=9)([FIRST, SECOND]), "examples: got 10 tokens in 2 documents, want at most 9"),
        (lambda: PaddedCollator(length=6)([SECOND, FIRST]), "examples[1] (a): got 7 tokens, want at most 6"),
        (lambda: PackedCollator()([*with_photos(), FIRST]),
         "examples[3] (a): patches: got no pixels, want uint8 4 4 3 as in examples[0]"),
        (lambda: PackedCollator()([FIRST, *with_photos("mrope")]),
         "examples[1] (p0): positions: got 3 axes, want 2 as in the first"),
        (lambda: PackedCollator(multiple_of=0), "multiple_of: got 0, want >= 1"),
        (lambda: PackedCollator(pad_token_id=-1), "pad_token_id: got -1, want >= 0"),
        (lambda: PackedCollator(multiple_of=4, length=9), "length: got 9, want a multiple of multiple_of=4"),
        (lambda: PaddedCollator(side=UP), "side: got 'up', want one of 'right', 'left'"),
        (lambda: dataclasses.replace(WHOLE, input_ids=WHOLE.input_ids[1:]), "input_ids: got 9 tokens, want 10 as in"),
        (lambda: dataclasses.replace(WHOLE, labels=WHOLE.labels[1:]), "labels: got shape (9,), want (10,), the shape"),
        (lambda: dataclasses.replace(WHOLE, feature_spans=WHOLE.feature_spans[1:]),
         "feature_spans: got 0 spans, want 1 as in image_spans"),
        (lambda: WHOLE.shard(0, 2), "documents[0]: got 7 tokens, want a multiple of 4"),
        *((lambda layout=layout: PADDED.shard(0, 2, layout),
           f"layout: got {layout!r} for a padded batch, want 'zigzag' or 'contiguous', row by row")
          for layout in ("zigzag-sequence", "contiguous-sequence")),
        (lambda: PHOTOS.as_dict(text_row=True), f"text_row: {IGNORED}"),
        (lambda: PHOTOS.as_dict(batched=True), f"batched: {IGNORED}"),
        (lambda: FRACTIONAL.position_ids(torch.int64), "dtype: got torch.int64, want one of torch.float64"),
        (lambda: WHOLE.mask_mod(bidirectional_images=UP), "bidirectional_images: got 'up', want True or False"),
        (lambda: PADDED.shard(1, 2).mask_mod(), "mask_mod: got a context-parallel shard, want the mask of the whole"),
        (lambda: FRACTIONAL.as_dict(), "positions: got 'ids' of a fractional scheme, want 'table'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("way")
def test_invalid_values_are_named(call: Any, message: str) -> None:
    assert_refused(message, call, (InvalidInputError, UnsupportedError))


def dense(mod: MaskMod, batch: Batch) -> torch.Tensor:
    """Evaluate the mask for all pairs of tokens as (batch, seq, seq)."""
    rows, seq = (1, batch.input_ids.numel()) if batch.packed else tuple(batch.input_ids.shape)
    return create_mask(mod, rows, 1, seq, seq, device="cpu")[:, 0]


def by_loops(lengths: list[int], sizes: list[int], side: str, spans: Any) -> torch.Tensor:
    """Return a mask (tokens, tokens) of whether each query attends to each key, both numbered across the batch."""
    starts = [0, *np.cumsum(sizes).tolist()]
    document, image = torch.full((2, starts[-1]), -1)
    for d, (length, start, stop) in enumerate(zip(lengths, starts, starts[1:], strict=False)):
        first = stop - length if side == "left" else start
        document[first : first + length] = d
    for i, (start, stop) in enumerate(spans):
        image[start:stop] = i
    token = torch.arange(starts[-1])
    same, together = (of[:, None] == of for of in (document, image))
    return same & (document >= 0) & ((token[:, None] >= token) | (together & (image >= 0)))


@settings(max_examples=20)
@given(some_documents, st.booleans(), st.sampled_from(["packed", "left", "right"]), st.sampled_from([1, 4, 8]))
def test_masks_match_plain_loops(documents: Any, bidirectional: bool, kind: Any, multiple_of: int) -> None:
    examples = examples_of(documents[:4])
    collator: Any = PackedCollator if kind == "packed" else partial(PaddedCollator, kind)
    batch = collator(multiple_of=multiple_of)(examples)
    spans = batch.image_spans.tolist() if bidirectional else []
    want = by_loops([one.num_tokens for one in examples], batch.cu_seqlens.diff().tolist(), kind, spans)
    mask = dense(batch.mask_mod(bidirectional_images=bidirectional), batch)
    rows, seq, _ = mask.shape
    for row in range(rows):
        assert torch.equal(mask[row], want.reshape(rows, seq, rows, seq)[row, :, row])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_the_mask_and_returns_zeros_for_padding() -> None:
    batch = PaddedCollator()([example("a", 3), example("b", 5)])
    block_mask = create_block_mask(batch.mask_mod(), 2, None, 5, 5, device="cpu", BLOCK_SIZE=16)
    q, k, v = (torch.ones(2, 1, 5, 16) for _ in range(3))
    out: Any = flex_attention(q, k, v, block_mask=block_mask)
    assert out[:, 0, :, 0].round().tolist() == [[1, 1, 1, 0, 0], [1] * 5]


in_c = pytest.mark.skipif(native.core is None, reason="the extension was not built")


class Watched:
    """Wrapper around the extension that counts the calls which the extension answered."""

    core, answered = native.core, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def collate(self, *arguments: Any) -> Any:
        fields = self.core.collate(*arguments)
        self.answered += fields is not None
        return fields


def pools() -> list[list[Example]]:
    """Return pools of examples with the same number of axes, covering all kinds of segments and arrays."""
    rows = SequenceBuilder(scheme="flatten", markers=Markers(None, None, 256, 257, 258)).build([Grid(2, 2), "a"])
    bare = SequenceBuilder(scheme="flatten", markers=Markers(None, None, 256)).build([Grid(1, 2), Grid(1, 1)])
    video = [CLIP, Grid(2, 2, frames=2, seconds_per_frame=1)]
    audio = [BUILDER.build(parts) for parts in ([Audio(2)], ["ab", Audio(3), CLIP, "c"], video)]
    halves = SequenceBuilder(scheme="rope-tie-fractional").build(["abc", Grid(2, 3), "d"])
    long = example("long", 5000, (20, 30), 4000)
    odd = dataclasses.replace(FIRST.sequence, input_ids=np.repeat(FIRST.sequence.input_ids, 2)[::2])
    spoken = SequenceBuilder(scheme="flatten", markers=Markers(None, None, 256, audio=259)).build([Audio(2)])
    return [
        [FIRST, SECOND, FIRST.slice(6, 7), *with_photos(), long, Example("o", odd, FIRST.labels[::-1])],
        [FIRST, SECOND, Example("h", halves, halves.input_ids), Example("i", odd, FIRST.labels.astype(np.int32))],
        [Example(f"{i}", sequence, sequence.input_ids) for i, sequence in enumerate((rows, bare, spoken))],
        [Example(f"{i}", sequence, sequence.input_ids) for i, sequence in enumerate(audio)],
        [FIRST, *with_photos("mrope")],
    ]


@in_c
def test_the_extension_matches_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, watched, all_pools = np.random.default_rng(0), Watched(), pools()
    for _ in range(400):
        pool = all_pools[rng.integers(len(all_pools))]
        examples = [pool[i] for i in rng.integers(0, len(pool), rng.integers(1, 7))]
        multiple_of, pad_token_id = (int(rng.choice(numbers)) for numbers in ([1, 1, 3, 8], [0, 7]))
        length = int(rng.choice([0, 8, 24, 96])) * multiple_of or None
        side: Any = ["left", "right"][rng.integers(2)]
        for collator in (
            PackedCollator(multiple_of, length, pad_token_id),
            PaddedCollator(side, multiple_of, length, pad_token_id),
        ):
            outcomes: list[Any] = []
            for core in (watched, None):
                with monkeypatch.context() as patch:
                    patch.setattr(native, "core", core)
                    try:
                        outcomes.append(collator(examples))
                    except InvalidInputError as error:
                        outcomes.append(error)
            assert_equal(*outcomes)
    assert watched.answered > 400


@in_c
@pytest.mark.parametrize("begin", [-1, 0, 1])
def test_an_image_that_begins_outside_its_document_is_declined(begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, sequence = Watched(), copy.copy(FIRST.sequence)
    spans = sequence.image_spans.copy()
    spans[-1] = sequence.input_ids.size + begin, sequence.input_ids.size + 9
    object.__setattr__(sequence, "image_spans", spans)
    monkeypatch.setattr(native, "core", watched)
    with suppress(IndexError):  # from numpy, if the extension declines the example
        PackedCollator()([Example("k", sequence, FIRST.labels)])
    assert watched.answered == (begin < 0)


@in_c
def test_each_scheme_is_named_once_in_order_of_appearance() -> None:
    one, _, other, _ = pools()[1]
    names = [PackedCollator()(examples).positions.scheme for examples in ([one, other, one], [other, one, one])]
    assert names == ["rope-tie + rope-tie-fractional", "rope-tie-fractional + rope-tie"]
