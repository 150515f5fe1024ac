"""Refusals of the models of the Open Inference Protocol: by name, as the client's fault, before the work is done."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_calls import ending
from message_strategies import inferences
from open_inference import Infer, TritonClient, ask, config, given, refusal

from mmpos import SCHEMES, LimitExceededError, SegmentTable, Text, place
from mmpos.rpc.positions import parameters
from mmpos_server.config import Limits
from mmpos_server.exchange import Exchange
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.messages import DATATYPES, Request
from mmpos_server.inference.models import check_outputs
from mmpos_server.testing import running

PHOTO = (Path(__file__).parents[2] / "mmpos" / "photos" / "coffee.jpg").read_bytes()
LIMITS = {"documents": 3, "images": 3, "segments": 20, "tokens": 10_000, "response_bytes": 200_000}


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
    "a type that it does not take": (one("lengths", "INT32", [1], EIGHT), "lengths.datatype: got 'INT32', want INT64"),
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
DEEP = "[" * 500 + "]" * 500
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
    "half a character as a name": (
        "positions",
        {"lengths": [1]},
        {"scheme": r'{"name": "\ud800"}'},
        r"""parameters['scheme']: got '{"name": "\\ud800"}', want JSON ('utf-8' codec can't encode """,
    ),
    "infinity as a choice": (
        "positions",
        {"lengths": [1]},
        {"views": '[{"pad": {"side": Infinity}}]'},
        """parameters['views']: got '[{"pad": {"side": Infinity}}]', want JSON (Out of range float values are not """,
    ),
    "an object as a name": (
        "rotate",
        {"q": Q, "position_ids": [[0, 1]] * 2},
        {"rotary": '{"head_dim": 16, "scaling": {"type": {}}}'},
        "parameters['rotary']: scaling.type: got {}, want one of ",
    ),
    "very many digits": (
        "positions",
        {"lengths": [1]},
        {"views": '[{"decode": {"steps": ' + "9" * 5000 + "}}]"},
        """parameters['views']: got '[{"decode": {"steps": 99999""",
    ),
    "lists in lists": (
        "positions",
        {"lengths": [1]},
        {"views": f'[{{"decode": {DEEP}}}]'},
        "parameters['views']: got '[{\"decode\": [[[[[",
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
    "another layout": ("rotate", {"q": Q, "position_ids": [[0, 1]] * 2}, {"layout": "hd"}, "layout: got 'hd', want "),
}


@pytest.mark.parametrize(("model", "inputs", "options", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_by_name(
    client: TritonClient, model: str, inputs: dict[str, object], options: dict[str, object], message: str
) -> None:
    status, said = refusal(lambda: ask(client, model, inputs, parameters=options))
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
        {"views": json.dumps([{"decode": {}}] * 17)},
        "views: got 17, want at most 16",
    ),
    "tokens": ("positions", {"lengths": [10_001]}, {}, "tokens: got 10001, want at most 10000"),
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


@pytest.mark.parametrize(("model", "inputs", "options", "message"), BEYOND.values(), ids=BEYOND)
def test_what_is_beyond_a_limit_is_refused_by_its_name(
    small: TritonClient, model: str, inputs: dict[str, object], options: dict[str, object], message: str
) -> None:
    status, said = refusal(lambda: ask(small, model, inputs, parameters=options))
    assert (status, said[: len(message)]) == ("RESOURCE_EXHAUSTED", message)


def test_outputs_are_weighed_if_they_are_wanted(small: TritonClient) -> None:
    spans, scheme = {"lengths": [10_000]}, {"scheme": '{"name": "rope-tie-v2", "axes": 3}'}
    assert ask(small, "positions", spans, ["cu_seqlens"], parameters=scheme)["cu_seqlens"].tolist() == [0, 10_000]
    status, message = refusal(partial(ask, small, "positions", spans, ["position_ids"], parameters=scheme))
    assert (status, message.partition(",")[0]) == ("RESOURCE_EXHAUSTED", "response_bytes: got 240000")
    # A table of 20 segments is small: that of more is asked of the function.
    table = place(SegmentTable.from_documents([[Text(1)]] * 100))
    profile: Any = None
    asked: Any = SimpleNamespace(memory=Exchange(), answer_bytes=0)
    for output in ("table", "table_documents", "cu_seqlens"):
        request = Request(profile, False, {}, {}, {output: None}, 0)
        if output == "cu_seqlens":
            check_outputs(table, request, asked, Limits(response_bytes=1024))
            continue
        with pytest.raises(LimitExceededError, match="response_bytes: got 13600, want at most 1024"):
            check_outputs(table, request, asked, Limits(response_bytes=1024))


# JSON in parameters: whatever it says is answered or refused, never INTERNAL.

ODD = [
    *("null", "true", "0", "-1", "3", "1.5", "1e308", "1e400", "-1e400", "1e-400", "NaN", "Infinity"),
    *(str(sign * 2**bits) for bits in (31, 32, 63, 64, 70) for sign in (1, -1)),
    *("9" * 400, "9" * 5000, '""', '"x"', '"0"', r'"\ud800"', r'"\u0000"', '"' + "é" * 2000 + '"'),
    *("[]", "[null]", "[[]]", "[1]", "[1.5]", "[NaN]", r'["\ud800"]', "{}", '{"a": 1}', r'{"\udfff": {}}', "[{}]"),
    *("[" * depth + "]" * depth for depth in (20, 40, 200, 900, 960, 980, 1000, 100_000)),
    *('{"a": ' * depth + "1" + "}" * depth for depth in (40, 900, 960, 980)),
]
"""JSON of every kind, and what only resembles it."""

HERE = "here it goes"
VIEWS: list[dict[str, object]] = [
    {"take": {"starts": [0], "stops": [4]}},
    {"window": {"documents": [0], "starts": [0], "lengths": [4]}},
    {"decode": {"steps": 1}},
    {"shard": {"rank": 0, "worldSize": 1, "layout": "SHARD_LAYOUT_ZIGZAG"}},
    {"pad": {"length": 12, "side": "SIDE_LEFT"}},
]
SCALINGS: list[dict[str, object]] = [
    {"type": "linear", "factor": 2},
    {"type": "ntk", "factor": 2},
    {"type": "dynamic", "factor": 2, "original_max_position": 64},
    {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position": 64},
    {"type": "p-rope", "p": 0.5, "factor": 1.0},
    {"type": "yarn", "factor": 2, "original_max_position": 64, "beta_fast": 32, "beta_slow": 1, "truncate": True},
    {"type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8, "original_max_position": 64},
]
ROTARIES: list[dict[str, object]] = [
    {"theta": 1e4, "axes": 2, "allocation": "split", "pairing": "half", "rotary_dim": 16, "precision": "hf"},
    {"axes": 2, "allocation": "sections", "mrope_section": [4, 4]},
    {"axes": 2, "allocation": [0, -1] * 4, "inv_freq": [1.0] * 8},
    {"axes": 2, "allocation": "heads", "head_axes": [1]},
    {"axes": 2, "allocation": "axial", "axes_dim": [8, 8], "theta": [1e4, 1e3]},
    *({"axes": 2, "scaling": scaling, "length": 128} for scaling in SCALINGS),
]
RIGHT: dict[tuple[str, str], list[object]] = {
    ("positions", "views"): [[view] for view in VIEWS],
    ("positions", "scheme"): [
        {"name": name, **dict.fromkeys(parameters(scheme), 1)} for name, scheme in SCHEMES.items()
    ],
    ("sequences", "scheme"): [{"name": "v2pe", "axes": 1}],
    ("rotate", "rotary"): [{"head_dim": 16, **rotary} for rotary in ROTARIES],
    ("rotate", "layout"): ["thd"],
}


def replaced(value: object) -> Iterator[Any]:
    """The value with HERE in the place of each that is in it, one at a time, and of each key."""
    yield HERE
    if isinstance(value, list):
        for i, inner in enumerate(value[:2]):
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in replaced(inner))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: changed} for changed in replaced(inner))
        yield {**value, HERE: 1}


def odd_requests() -> Iterator[pb.ModelInferRequest]:
    """Requests with every odd value at every place of parameters that are right."""
    inputs: dict[str, dict[str, object]] = {
        "positions": {"lengths": [11], "offsets": [3], "grid_thw": [[1, 2, 3]]},
        "rotate": {"q": Q, "position_ids": [[0, 1]] * 2},
        "sequences": {"parts": [b"a"]},
    }
    quoted = json.dumps(HERE)
    for (model, name), values in RIGHT.items():
        tensors = [given(name, values) for name, values in inputs[model].items()]
        for template in (json.dumps(changed) for value in values for changed in replaced(value)):
            for odd in ODD:
                made = pb.ModelInferRequest(model_name=model)
                for tensor in tensors:
                    made.inputs.add().MergeFromString(tensor._get_tensor().SerializeToString())
                    made.raw_input_contents.append(tensor._get_content())
                # A key is a text; others are tried in its place, too, and are no JSON at all.
                made.parameters[name].string_param = template.replace(quoted, odd)
                yield made


def odd_tensors() -> Iterator[pb.ModelInferRequest]:
    """Requests that are right but for the type or the shape of one input."""
    for raw in inferences():
        for i in range(len(pb.ModelInferRequest.FromString(raw).inputs)):
            for datatype in ["", *DATATYPES]:
                for shape in ([], [0], [1, 1], [2, 1, 3], [-1], [2**62], [0, 2**62]):
                    made = pb.ModelInferRequest.FromString(raw)
                    made.inputs[i].datatype = datatype
                    made.inputs[i].shape[:] = shape
                    yield made


def odd_numbers() -> Iterator[pb.ModelInferRequest]:
    """Requests with integers of any size as parameters."""
    ids = bare({"name": "input_ids", "datatype": "INT64", "shape": [1]}, raw=[EIGHT])
    names = ("image_token_id", "video_token_id", "spatial_merge_size", "row_token_id", "last_row_token_id")
    for number in (0, -1, 1, 2**31, 2**62, 2**63 - 1, -(2**63)):
        for request, name in [*((ids, name) for name in names), (parts(b"a"), "start")]:
            made = pb.ModelInferRequest.FromString(request.SerializeToString())
            made.parameters[name].int64_param = number
            yield made


def check_answers(infer: Infer, requests: Iterable[pb.ModelInferRequest]) -> None:
    statuses = set()
    for request in requests:
        status, details = ending(partial(infer, request, timeout=60))
        assert status in ("OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"), request
        assert status == "OK" or ": got " in details, (request, details)
        statuses.add(status)
    assert "INVALID_ARGUMENT" in statuses


@pytest.mark.parametrize("odd", [odd_requests, odd_tensors, odd_numbers])
def test_odd_requests_are_answered_or_refused(infer: Infer, odd: Callable[[], Iterable[pb.ModelInferRequest]]) -> None:
    requests = list(odd())
    check_answers(infer, random.Random(7).sample(requests, min(len(requests), 300)))


@pytest.mark.slow
def test_every_odd_value_at_every_place_is_answered_or_refused(infer: Infer) -> None:
    check_answers(infer, odd_requests())
