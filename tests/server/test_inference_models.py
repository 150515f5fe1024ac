"""Compare the answers of the Open Inference Protocol models with the library's results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from open_inference import Infer, TritonClient, ask, refusal

from mmpos import Grid, ImageProcessor, SegmentTable, SequenceBuilder, Text, place
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary, apply_rotary
from mmpos.schemes import RopeTieFractional
from mmpos_server.inference import open_inference_pb2 as pb

PHOTO = (Path(__file__).parents[2] / "mmpos" / "photos" / "coffee.jpg").read_bytes()


# Positions.


def assert_same(outputs: dict[str, object], wanted: PositionTable) -> None:
    """Check that the outputs equal these positions, including dtypes."""
    arrays = {
        "position_ids": wanted.dense(),
        "cu_seqlens": wanted.cu_seqlens,
        "table": wanted.table,
        "table_documents": wanted.documents,
    }
    if wanted.documents[2].min(initial=0) > -(2**63):
        arrays |= {"next_positions": wanted.next_positions, "deltas": wanted.deltas}
    assert set(outputs) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(outputs[name], array, err_msg=name, strict=True)


def test_random_batches_of_spans_and_input_ids_match_the_library(client: TritonClient) -> None:
    random = np.random.default_rng(7)
    for _ in range(10):
        documents: list[list[Text | Grid]] = []
        for _ in range(random.integers(1, 5)):
            grids = [Grid(*map(int, random.integers(1, 6, 2))) for _ in range(random.integers(0, 4))]
            pieces: list[list[Text | Grid]] = [[Text(int(random.integers(1, 9))), grid] for grid in grids]
            documents.append([*(part for piece in pieces for part in piece), Text(2)])
        segments = SegmentTable.from_documents(documents)
        starts = random.integers(0, 1000, len(documents))
        wanted = place(segments, start=starts)
        is_grid = segments.kind == 1
        first = np.cumsum(segments.lengths) - segments.lengths
        document = np.repeat(np.arange(len(documents)), np.diff(segments.segment_offsets))
        spans = {
            "lengths": np.diff(wanted.cu_seqlens).astype(np.int64),
            "offsets": (first - wanted.cu_seqlens[document])[is_grid],
            "grid_thw": segments.extents.T[is_grid],
            "documents": document[is_grid],
            "start": starts,
        }
        assert_same(ask(client, "positions", spans), wanted)
        ids = {
            "input_ids": np.repeat(np.where(is_grid, 7, 1), segments.lengths).astype(np.int32),
            "cu_seqlens": wanted.cu_seqlens,
            "image_grid_thw": segments.extents.T[is_grid] * [1, 2, 2],
            "start": starts,
        }
        parameters = {"image_token_id": 7, "spatial_merge_size": 2}
        assert_same(ask(client, "positions", ids, parameters=parameters), wanted)


def test_a_padded_batch_is_placed_with_its_attention_mask(client: TritonClient) -> None:
    padded = ask(
        client,
        "positions",
        {
            "input_ids": [[9, 5, 5, 9], [0, 0, 9, 9]],
            "image_grid_thw": [[1, 1, 2]],
            "attention_mask": [[1] * 4, [0, 0, 1, 1]],
        },
        parameters={"image_token_id": 5},
    )
    one = place(SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(1)]])).dense()
    assert padded["position_ids"][:, :4].tolist() == one.tolist()
    assert padded["position_ids"][:, 4:].tolist() == [[0, 0, 0, 1]] * 2
    assert padded["cu_seqlens"].tolist() == [0, 4, 8]


def test_views_are_sent_as_json_messages_of_our_own_protocol(client: TritonClient) -> None:
    wanted = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]]))
    spans = {"lengths": [11, 4], "offsets": [3], "grid_thw": [[1, 2, 3]], "documents": [0]}
    views = [
        (
            {"window": {"documents": [1, 0], "starts": ["0", "2"], "lengths": [6, 4]}},
            wanted.window([1, 0], [0, 2], [6, 4]),
        ),
        ({"decode": {"stepsPerDocument": [2, 1]}}, wanted.decode([2, 1])),
        ({"shard": {"rank": 1, "worldSize": 2, "layout": "SHARD_LAYOUT_CONTIGUOUS"}}, None),
        ({"pad": {"side": "SIDE_LEFT", "length": 12}}, wanted.pad(12, "left")),
        ({"take": {"starts": [2, 12], "stops": [5, 14]}}, wanted.take([2, 12], [5, 14])),
    ]
    for view, table in views:
        if table is not None:
            assert_same(ask(client, "positions", spans, parameters={"views": json.dumps([view])}), table)
    both = json.dumps([views[3][0], {"shard": {"rank": 1, "worldSize": 2, "layout": "SHARD_LAYOUT_ZIGZAG"}}])
    assert_same(ask(client, "positions", spans, parameters={"views": both}), wanted.pad(12, "left").shard(1, 2))


def test_typed_contents_give_the_same_answer_as_raw_bytes(infer: Infer) -> None:
    contents = {
        "input_ids": ("INT32", [4], pb.InferTensorContents(int_contents=[1, 5, 5, 1])),
        "image_grid_thw": ("INT64", [1, 3], pb.InferTensorContents(int64_contents=[1, 2, 1])),
        "video_grid_thw": ("INT64", [0, 3], None),
    }
    request = pb.ModelInferRequest(model_name="positions")
    request.outputs.add(name="position_ids")
    for name, (datatype, shape, numbers) in contents.items():
        request.inputs.add(name=name, datatype=datatype, shape=shape, contents=numbers)
    request.parameters["image_token_id"].int64_param = 5
    request.parameters["video_token_id"].int64_param = 6
    answer = infer(request)
    wanted = place(SegmentTable.from_documents([[Text(1), Grid(2, 1), Text(1)]])).dense()
    assert [(o.name, o.datatype, list(o.shape), o.HasField("contents")) for o in answer.outputs] == [
        ("position_ids", "INT32", [2, 4], False)
    ]
    assert list(answer.raw_output_contents) == [wanted.astype("<i4").tobytes()]


def test_a_version_defines_its_placeholder_and_merge_size(client: TritonClient) -> None:
    ids = {"input_ids": [1, 258, 1], "image_grid_thw": [[1, 2, 2]]}
    wanted = place(SegmentTable.from_documents([[Text(1), Grid(1, 1), Text(1)]]), RopeTieFractional(axes=3))
    assert_same(ask(client, "positions", ids, model_version="halves"), wanted)
    message = "placeholders.image: got None, want the placeholder id of image_grid_thw"
    assert refusal(lambda: ask(client, "positions", ids)) == ("INVALID_ARGUMENT", message)


# Sequences.


def test_sequences_match_the_packed_results_of_the_builder(client: TritonClient) -> None:
    builder = SequenceBuilder(images=ImageProcessor(backend="pillow"))
    documents: list[list[str | bytes]] = [["A cup: ", PHOTO, " é"], ["b"], [PHOTO, "c", PHOTO]]
    parts = [part.encode() if isinstance(part, str) else part for document in documents for part in document]
    result = ask(
        client,
        "sequences",
        {
            "parts": parts,
            "kinds": [b"text" if isinstance(part, str) else b"image" for document in documents for part in document],
            "parts_per_document": [3, 1, 3],
        },
        parameters={"start": 5, "scheme": "mrope"},
    )
    builder = SequenceBuilder(images=builder.images, start=5, scheme="mrope")
    built = [builder.build(document) for document in documents]
    positions = PositionTable.concatenate([sequence.positions for sequence in built])
    starts = positions.cu_seqlens[:-1].astype(np.int64)
    arrays = {
        "input_ids": np.concatenate([sequence.input_ids for sequence in built]),
        "grid_thw": np.concatenate([sequence.grid_thw for sequence in built]),
        "image_spans": np.concatenate([s.image_spans + start for s, start in zip(built, starts, strict=True)]),
        "patches": np.concatenate([s.patches for s in built if s.patches is not None]),
    }
    for name, array in arrays.items():
        np.testing.assert_array_equal(result.pop(name), array, err_msg=name, strict=True)
    assert_same(result, positions)


def test_parts_without_kinds_are_read_as_the_texts_of_one_document(client: TritonClient) -> None:
    result = ask(client, "sequences", {"parts": [b"ab", "é".encode()]}, ["input_ids", "cu_seqlens", "patches"])
    assert {name: array.tolist() for name, array in result.items()} == {
        "input_ids": list("abé".encode()),
        "cu_seqlens": [0, 4],
        "patches": [],
    }
    assert result["patches"].shape == (0, 14, 14, 3)


def test_a_batch_can_be_empty(client: TritonClient) -> None:
    nothing = {"parts": np.empty(0, object), "parts_per_document": np.empty(0, np.int64)}
    result = ask(client, "sequences", nothing, ["input_ids", "cu_seqlens", "position_ids"])
    assert {name: array.shape for name, array in result.items()} == {
        "input_ids": (0,),
        "cu_seqlens": (1,),
        "position_ids": (2, 0),
    }


def test_images_are_decoded_only_if_patches_are_requested(client: TritonClient) -> None:
    truncated = {"parts": [b"a", PHOTO[:1000]], "kinds": [b"text", b"image"]}
    assert ask(client, "sequences", truncated, ["grid_thw"])["grid_thw"].shape == (1, 3)
    status, message = refusal(lambda: ask(client, "sequences", truncated, ["patches"]))
    assert status == "INVALID_ARGUMENT"
    assert message.startswith("documents[0].parts[1]: image: got a truncated or corrupt JPEG")


# Rotations.

TABLE = place(SegmentTable.from_documents([[Text(2), Grid(2, 2), Text(1)]]), "rope-tie-fractional")


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16"])
@pytest.mark.parametrize("by", ["table", "ids"])
def test_rotations_match_the_library_results(infer: Infer, datatype: str, by: str) -> None:
    dtype = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}[datatype]
    torch.manual_seed(3)
    tensors = {"q": torch.randn(7, 4, 16).to(dtype), "k": torch.randn(7, 2, 16).to(dtype)}
    request = pb.ModelInferRequest(model_name="rotate")
    request.parameters["conjugate"].bool_param = True
    for name, tensor in tensors.items():
        request.inputs.add(name=name, datatype=datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.view(torch.uint8).numpy().tobytes())
    arrays = (
        {"table": TABLE.table, "table_documents": TABLE.documents} if by == "table" else {"position_ids": TABLE.dense()}
    )
    for name, array in arrays.items():
        request.inputs.add(name=name, datatype="FP64" if name == "position_ids" else "INT64", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    answer = infer(request)
    wanted = apply_rotary(tensors["q"], tensors["k"], TABLE, Rotary(head_dim=16), conjugate=True)
    assert [(output.name, output.datatype, list(output.shape)) for output in answer.outputs] == [
        ("q", datatype, [7, 4, 16]),
        ("k", datatype, [7, 2, 16]),
    ]
    assert list(answer.raw_output_contents) == [
        tensor.view(torch.uint8).numpy().tobytes() for tensor in wanted if tensor is not None
    ]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_batch_is_rotated_with_the_rotary_settings_in_the_request(client: TritonClient, layout: str) -> None:
    rotary = Rotary(head_dim=8, theta=500.0, pairing="adjacent")
    positions = place(SegmentTable.from_documents([[Text(1), Grid(1, 2)], [Text(3)]]))
    q = np.random.default_rng(3).standard_normal((2, 3, 5, 8) if layout == "bshd" else (2, 5, 3, 8)).astype(np.float32)
    for source in (
        {"table": positions.table, "table_documents": positions.documents},
        {"position_ids": positions.dense().reshape(2, 2, 3)},
        {"position_ids": positions.dense(dtype=np.int64).reshape(2, 2, 3)},
    ):
        parameters = {"layout": layout, "rotary": json.dumps(rotary.to_dict())}
        result = ask(client, "rotate", {"q": q, **source}, parameters=parameters)
        wanted, _ = apply_rotary(torch.from_numpy(q), None, positions, rotary, layout=layout)  # type: ignore[arg-type]
        assert list(result) == ["q"]
        np.testing.assert_array_equal(result["q"], wanted.numpy(), strict=True)
