"""Refusals of the models of the Open Inference Protocol: by name, as the client's fault, before the work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from open_inference import Infer, TritonClient, ask, config, given, refusal

from mmpos import LimitExceededError, SegmentTable, Text, place
from mmpos_server.admission import Admission, Call, Clients
from mmpos_server.config import ClientLimits, Concurrency, Limits, Pools
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.messages import Request
from mmpos_server.inference.models import check_outputs
from mmpos_server.testing import running

PHOTO = (Path(__file__).parents[2] / "mmpos" / "photos" / "coffee.jpg").read_bytes()
LIMITS = {"documents": 3, "images": 3, "segments": 20, "tokens": 10_000, "views": 2, "response_bytes": 200_000}


@pytest.fixture(scope="module")
def small() -> Iterator[TritonClient]:
    """A client of a server with small limits."""
    with running(config(limits=LIMITS)) as address, triton.InferenceServerClient(address) as client:
        yield client


def bare(*inputs: dict[str, Any], raw: list[bytes] | None = None, model: str = "positions") -> pb.ModelInferRequest:
    """A request of these inputs."""
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[pb.ModelInferRequest.InferInputTensor(**fields) for fields in inputs],
        raw_input_contents=raw or [],
    )


def one(name: str, datatype: str, shape: list[int], raw: bytes | None = None, **contents: Any) -> pb.ModelInferRequest:
    """A request of "positions" with one input."""
    request = pb.ModelInferRequest(model_name="positions", raw_input_contents=[] if raw is None else [raw])
    tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
    if contents:
        tensor.contents.MergeFrom(pb.InferTensorContents(**contents))
    return request


def twice(request: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """A request with its first input and its raw bytes once more."""
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])
    return request


def parts(*elements: bytes, raw: bytes | None = None, **others: object) -> pb.ModelInferRequest:
    """A request of "sequences" with raw parts."""
    request = pb.ModelInferRequest(model_name="sequences")
    request.inputs.add(name="parts", datatype="BYTES", shape=[len(elements)])
    framed = b"".join(len(element).to_bytes(4, "little") + element for element in elements)
    request.raw_input_contents.append(framed if raw is None else raw)
    for name, values in others.items():
        array = np.array(values, np.int64)
        request.inputs.add(name=name, datatype="INT64", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


EIGHT = (3).to_bytes(8, "little")
INPUTS = (
    "lengths, offsets, grid_thw, documents, "
    "input_ids, image_grid_thw, video_grid_thw, attention_mask, cu_seqlens, start"
)
MALFORMED: dict[str, tuple[pb.ModelInferRequest, str]] = {
    "bytes of another shape": (
        one("lengths", "INT64", [2], EIGHT),
        "lengths: got 8 bytes, want 16 for INT64 of shape (2,)",
    ),
    "more axes than an error can tell": (
        one("lengths", "INT64", [1] * 100_000, EIGHT),
        "lengths.shape: got 100000 axes, want (-1,)",
    ),
    "a type of many words": (
        one("lengths", "INT" * 1000, [1], EIGHT),
        f"lengths.datatype: got {('INT' * 1000)[:100]!r}, want INT64",
    ),
    "no numbers": (one("lengths", "INT64", [1]), "lengths.contents: got 0 elements, want 1 for (1,)"),
    "numbers of another shape": (
        one("lengths", "INT64", [1], int64_contents=[1, 2]),
        "lengths.contents: got 2 elements, want 1 for (1,)",
    ),
    "numbers of another type": (
        one("lengths", "INT64", [1], int_contents=[1]),
        "lengths.contents: got int_contents, want int64_contents",
    ),
    "numbers too large": (
        bare(
            {
                "name": "input_ids",
                "datatype": "INT64",
                "shape": [1, 1],
                "contents": pb.InferTensorContents(int64_contents=[1]),
            },
            {
                "name": "attention_mask",
                "datatype": "UINT8",
                "shape": [1, 1],
                "contents": pb.InferTensorContents(uint_contents=[256]),
            },
        ),
        "attention_mask.contents: got 256, want what UINT8 holds",
    ),
    "raw and one by one": (
        one("lengths", "INT64", [1], EIGHT, int64_contents=[1]),
        "lengths: got contents and raw_input_contents, want one of them",
    ),
    "raw for some": (
        bare(
            {"name": "lengths", "datatype": "INT64", "shape": [1]},
            {"name": "start", "datatype": "INT64", "shape": [1]},
            raw=[EIGHT],
        ),
        "raw_input_contents: got 1, want 2, one for each input outside shared memory",
    ),
    "raw for none": (
        bare(raw=[EIGHT]),
        "raw_input_contents: got 1, want 0, one for each input outside shared memory",
    ),
    "a type that it does not take": (one("lengths", "INT32", [1], EIGHT), "lengths.datatype: got 'INT32', want INT64"),
    "no type": (one("input_ids", "", [1], EIGHT), "input_ids.datatype: got '', want INT64 or INT32"),
    "other axes": (one("lengths", "INT64", [1, 1], EIGHT), "lengths.shape: got (1, 1), want (-1,)"),
    "axes of several kinds": (
        one("input_ids", "INT64", [1, 1, 1], EIGHT),
        "input_ids.shape: got (1, 1, 1), want (-1,) or 2 axes",
    ),
    "another size": (one("grid_thw", "INT64", [1, 1], EIGHT), "grid_thw.shape: got (1, 1), want (-1, 3)"),
    "a size below 0": (
        one("lengths", "INT64", [-1], b""),
        "lengths.shape: got (-1,), want sizes that an array can have",
    ),
    "a size that no array has": (
        one("attention_mask", "INT64", [0, 2**62], b""),
        f"attention_mask.shape: got (0, {2**62}), want sizes that an array can have",
    ),
    "an unknown input": (one("ids", "INT64", [1], EIGHT), f"inputs[0].name: got 'ids', want one of {INPUTS}"),
    "an input twice": (twice(one("lengths", "INT64", [1], EIGHT)), "inputs[1].name: got 'lengths' again, want it once"),
    "very many inputs": (
        bare(*[{"name": "lengths"}] * 11),
        "inputs: got 11 tensors, want at most 10",
    ),
    "no input": (
        bare(),
        "inputs: got [], want lengths or input_ids among them",
    ),
    "no parts": (bare(model="sequences"), "inputs: got none of name 'parts', want it"),
    "an element cut off": (parts(b"ab", raw=b"\3\0\0\0ab"), "parts: got 6 bytes, want 7 or more for element 0"),
    "a length cut off": (parts(b"ab", raw=b"\3\0\0"), "parts: got 3 bytes, want 4 or more for element 0"),
    "too few elements": (
        parts(b"a", b"b", raw=b"\1\0\0\0a"),
        "parts: got 1 elements in 5 of 5 bytes, want 2 for shape (2,)",
    ),
    "too many elements": (
        parts(b"a", raw=b"\1\0\0\0a\1\0\0\0b"),
        "parts: got 1 elements in 5 of 10 bytes, want 1 for shape (1,)",
    ),
    "text that is none": (
        parts(b"a", b"\xff"),
        "documents[0].parts[1]: got bytes that are not UTF-8 (invalid start byte), want text",
    ),
    "other numbers of parts": (
        parts(b"a", b"b", parts_per_document=[1]),
        "parts_per_document: got [1], want a sum of 2 like parts",
    ),
    "numbers of parts below 0": (
        parts(b"a", parts_per_document=[2, -1]),
        "parts_per_document: got [2, -1], want a sum of 1 like parts",
    ),
    "an empty document": (
        parts(b"a", parts_per_document=[1, 0]),
        "documents[1].parts: got no tokens, want at least one",
    ),
}


@pytest.mark.parametrize(("request_", "message"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_refused_by_name(infer: Infer, request_: pb.ModelInferRequest, message: str) -> None:
    assert refusal(lambda: infer(request_)) == ("INVALID_ARGUMENT", message)


Q = np.zeros((2, 1, 16), np.float32)
AMONG = "want position_ids, or table and table_documents, among them"
WRONG: dict[str, tuple[str, dict[str, object], dict[str, object], str]] = {
    "both kinds": (
        "positions",
        {"lengths": [1], "input_ids": [1]},
        {},
        "inputs: got 'input_ids' beside 'lengths', want one or the other",
    ),
    "spans of ids": (
        "positions",
        {"input_ids": [1], "offsets": [1]},
        {},
        "inputs: got 'offsets' beside 'input_ids', want one or the other",
    ),
    "views that are no JSON": (
        "positions",
        {"lengths": [1]},
        {"views": "["},
        "parameters['views']: got '[', want JSON (Expecting value: line 1 column 2 (char 1))",
    ),
    "views that are no list": (
        "positions",
        {"lengths": [1]},
        {"views": "{}"},
        "parameters['views']: got '{}', want a JSON list of views",
    ),
    "a view of nothing": (
        "positions",
        {"lengths": [1]},
        {"views": "[{}]"},
        "views[0]: got none, want one of take, window, decode, shard, pad",
    ),
    "a scheme of another name": (
        "positions",
        {"lengths": [1]},
        {"scheme": '{"name": "x"}'},
        "scheme: got 'x', want a Scheme or one of ",
    ),
    "a parameter of another kind": (
        "positions",
        {"lengths": [1]},
        {"strict": 1},
        "parameters['strict']: got int64_param, want bool_param",
    ),
    "a field of no view": (
        "positions",
        {"lengths": [1]},
        {"views": '[{"tale": {}}]'},
        "views[0]: got {'tale': {}}, want message View as JSON (",
    ),
    "other kinds": (
        "sequences",
        {"parts": [b"a"], "kinds": [b"video"]},
        {},
        "documents[0].parts[0]: got kind b'video', want b'text' or b'image'",
    ),
    "kinds of more parts": (
        "sequences",
        {"parts": [b"a"], "kinds": [b"text"] * 2},
        {},
        "kinds: got 2, want 1 like parts",
    ),
    "no positions": ("rotate", {"q": Q}, {}, f"inputs: got ['q'], {AMONG}"),
    "half a table": ("rotate", {"q": Q, "table": [[1]]}, {}, f"inputs: got ['q', 'table'], {AMONG}"),
    "a table of other rows": (
        "rotate",
        {"q": Q, "table": [[0]], "table_documents": [[0]] * 4},
        {},
        "table: got 1 rows, want 5 + 4·axes for 1 to 16 axes",
    ),
    "a rotation that is none": (
        "rotate",
        {"q": Q, "position_ids": [[0, 1]] * 2},
        {"rotary": "[]"},
        "parameters['rotary']: got '[]', want a JSON object",
    ),
    "a rotation of an odd size": (
        "rotate",
        {"q": Q, "position_ids": [[0, 1]] * 2},
        {"rotary": '{"head_dim": 3}'},
        "parameters['rotary']: head_dim: got 3, want ",
    ),
    "another layout": ("rotate", {"q": Q, "position_ids": [[0, 1]] * 2}, {"layout": "hd"}, "layout: got 'hd', want "),
}


@pytest.mark.parametrize(("model", "inputs", "parameters", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_by_name(
    client: TritonClient, model: str, inputs: dict[str, object], parameters: dict[str, object], message: str
) -> None:
    status, said = refusal(lambda: ask(client, model, inputs, parameters=parameters))
    assert (status, said[: len(message)]) == ("INVALID_ARGUMENT", message)


def test_what_is_not_known_is_not_found(client: TritonClient) -> None:
    models = "model: got 'x', want one of 'sequences', 'positions', 'rotate'"
    versions = "version of 'positions': got '1', want one of 'default', 'halves', 'flat'"
    asks: list[Callable[[str, str], object]] = [
        lambda name, version: client.infer(name, [given("lengths", [1])], version),
        client.get_model_metadata,
        client.get_model_config,
        client.get_inference_statistics,
    ]
    for call in asks:
        assert refusal(partial(call, "x", "")) == ("NOT_FOUND", models)
        assert refusal(partial(call, "positions", "1")) == ("NOT_FOUND", versions)


def test_what_there_is_no_such_thing_of_is_unsupported(client: TritonClient) -> None:
    known = "want scheme or strict or views or image_token_id or video_token_id or spatial_merge_size or "
    known += "row_token_id or last_row_token_id"
    answers: dict[str, dict[str, Any]] = {
        f"parameters: got 'sequence_end', {known}": {"sequence_id": 1},
        f"parameters: got 'timeout', {known}": {"timeout": 5},
        f"parameters: got 'stride', {known}": {"parameters": {"stride": 5}},
        f"parameters: got 1000 of them, {known}": {"parameters": {str(number): 5 for number in range(1000)}},
    }
    for message, options in answers.items():
        assert refusal(partial(ask, client, "positions", {"lengths": [1]}, **options)) == (
            "UNIMPLEMENTED",
            message,
        )
    kept = "position_ids, cu_seqlens, table, table_documents"
    image = {"lengths": [2], "offsets": [0], "grid_thw": [[1, 1, 2]]}
    assert refusal(lambda: ask(client, "positions", image, ["cu_seqlens", "deltas"], model_version="flat")) == (
        "UNIMPLEMENTED",
        f"outputs[1].name: got 'deltas', want one of {kept} for this request",
    )
    assert refusal(lambda: ask(client, "rotate", {"q": Q, "position_ids": [[0, 1]] * 2}, ["k"])) == (
        "UNIMPLEMENTED",
        "outputs[0].name: got 'k', want one of q for this request",
    )
    output = triton.InferRequestedOutput("deltas", class_count=1)
    assert refusal(lambda: client.infer("positions", [given("lengths", [1])], outputs=[output])) == (
        "UNIMPLEMENTED",
        "outputs[0].parameters: got 'classification', want shared_memory_region or shared_memory_byte_size or "
        "shared_memory_offset",
    )


def test_outputs_are_known_and_asked_for_once(client: TritonClient) -> None:
    spans = {"lengths": [1]}
    names = "position_ids, next_positions, deltas, cu_seqlens, table, table_documents"
    assert refusal(lambda: ask(client, "positions", spans, ["ids"])) == (
        "INVALID_ARGUMENT",
        f"outputs[0].name: got 'ids', want one of {names}",
    )
    assert refusal(lambda: ask(client, "positions", spans, ["table"] * 7)) == (
        "INVALID_ARGUMENT",
        "outputs: got 7 tensors, want at most 6",
    )
    assert refusal(lambda: ask(client, "positions", spans, ["table", "table"])) == (
        "INVALID_ARGUMENT",
        "outputs[1].name: got 'table' again, want it once",
    )


BEYOND: dict[str, tuple[str, dict[str, object], dict[str, object], str]] = {
    # Each has a mistake besides, which would be found by work that is not done.
    "documents of spans": ("positions", {"lengths": [0] * 4}, {}, "documents: got 4, want at most 3"),
    "documents of ids": ("positions", {"input_ids": [[1]] * 4}, {}, "documents: got 4, want at most 3"),
    "packed documents": (
        "positions",
        {"input_ids": [1] * 4, "cu_seqlens": [0, 1, 2, 3, 9]},
        {"image_token_id": 5},
        "documents: got 4, want at most 3",
    ),
    "images of spans": (
        "positions",
        {"lengths": [9], "offsets": [9] * 4, "grid_thw": [[1, 1, 1]] * 4},
        {},
        "images: got 4, want at most 3",
    ),
    "images of ids": (
        "positions",
        {"input_ids": [5], "image_grid_thw": [[1, 1, 1]] * 2, "video_grid_thw": [[1, 1, 1]] * 2},
        {"image_token_id": 5},
        "images: got 4, want at most 3",
    ),
    "views": (
        "positions",
        {"lengths": [1]},
        {"views": '[{"decode": {}}, {"decode": {}}, {"decode": {}}]'},
        "views: got 3, want at most 2",
    ),
    "tokens": ("positions", {"lengths": [10_001]}, {}, "tokens: got 10001, want at most 10000"),
    "tokens of a view": (
        "positions",
        {"lengths": [1]},
        {"views": '[{"decode": {"steps": 10001}}]'},
        "tokens: got 10001, want at most 10000",
    ),
    "parts": ("sequences", {"parts": [b"a"] * 21}, {}, "segments: got 21, want at most 20"),
    "documents of parts": (
        "sequences",
        {"parts": [b"a"] * 4, "parts_per_document": [1] * 4},
        {},
        "documents: got 4, want at most 3",
    ),
    "images of parts": (
        "sequences",
        {"parts": [b"a"] * 4, "kinds": [b"image"] * 4},
        {},
        "images: got 4, want at most 3",
    ),
    "characters": ("sequences", {"parts": [b"a" * 10_001]}, {}, "tokens: got 10001, want at most 10000"),
    "tokens of a tokenizer": (
        "sequences",
        {"parts": ["é".encode() * 3000] * 2, "parts_per_document": [1, 1]},
        {},
        "tokens: got 12000, want at most 10000",
    ),
    "patches": ("sequences", {"parts": [PHOTO] * 3, "kinds": [b"image"] * 3}, {}, "response_bytes: got "),
    "bytes of q": (
        "rotate",
        {"q": np.zeros((10_000, 1, 16), np.float32), "position_ids": [[0] * 10_000] * 2},
        {},
        "response_bytes: got 640000, want",
    ),
    "tokens of ids": ("rotate", {"q": Q, "position_ids": [[0] * 10_001]}, {}, "tokens: got 10001, want at most 10000"),
    "tokens of a table": (
        "rotate",
        {"q": np.zeros((10_001, 1, 2), np.float32), "table": [[0]] * 9, "table_documents": [[0]] * 4},
        {},
        "tokens: got 10001, want at most 10000",
    ),
    **{
        f"characters of {name}": (
            "rotate" if name == "rotary" else "positions",
            {"q": Q, "position_ids": [[0, 1]] * 2} if name == "rotary" else {"lengths": [1]},
            {name: "{" + " " * 2**20},
            f"parameters[{name!r}]: got 1048577 characters, want at most {most}",
        )
        for name, most in (("scheme", 4096), ("views", 2**20), ("rotary", 2**20))
    },
    "channels": (
        "rotate",
        {"q": Q, "position_ids": [[0, 1]] * 2},
        {"rotary": '{"head_dim": 1026}'},
        "rotary.head_dim: got 1026, want at most 1024",
    ),
}


@pytest.mark.parametrize(("model", "inputs", "parameters", "message"), BEYOND.values(), ids=BEYOND)
def test_what_is_beyond_a_limit_is_refused_by_its_name(
    small: TritonClient, model: str, inputs: dict[str, object], parameters: dict[str, object], message: str
) -> None:
    status, said = refusal(lambda: ask(small, model, inputs, parameters=parameters))
    assert (status, said[: len(message)]) == ("RESOURCE_EXHAUSTED", message)


def test_outputs_are_weighed_if_they_are_wanted(small: TritonClient) -> None:
    spans, scheme = {"lengths": [10_000]}, {"scheme": '{"name": "rope-tie-v2", "axes": 3}'}
    assert ask(small, "positions", spans, ["cu_seqlens"], parameters=scheme)["cu_seqlens"].tolist() == [0, 10_000]
    status, message = refusal(partial(ask, small, "positions", spans, ["position_ids"], parameters=scheme))
    assert (status, message.partition(",")[0]) == ("RESOURCE_EXHAUSTED", "response_bytes: got 240000")
    # A table of 20 segments is small: that of more is asked of the function.
    table = place(SegmentTable.from_documents([[Text(1)]] * 100))
    profile: Any = None
    asked = Call("a", Admission(Concurrency(), Pools()), Clients(ClientLimits()).lease("a"))
    for output in ("table", "table_documents", "cu_seqlens"):
        request = Request(profile, False, {}, {}, {output: None}, 0)
        if output == "cu_seqlens":
            check_outputs(table, request, asked, Limits(response_bytes=1024))
            continue
        with pytest.raises(LimitExceededError, match="response_bytes: got 13600, want at most 1024"):
            check_outputs(table, request, asked, Limits(response_bytes=1024))
