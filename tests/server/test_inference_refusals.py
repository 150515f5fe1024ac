"""Test that the Open Inference Protocol models refuse invalid requests by name, before they do any work."""

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
from open_inference import Infer, TritonClient, ask, config, input_tensor, refusal
from refusals import is_sentence

from mmpos import SCHEMES, LimitExceededError, SegmentTable, Text, place
from mmpos.rpc.positions import parameters
from mmpos_server.config import Limits
from mmpos_server.exchange import Exchange
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.messages import Request
from mmpos_server.inference.models import check_outputs
from mmpos_server.testing import running

PHOTO = (Path(__file__).parents[2] / "mmpos" / "photos" / "coffee.jpg").read_bytes()
LIMITS = {"documents": 3, "images": 3, "segments": 20, "tokens": 10_000, "response_bytes": 200_000}


@pytest.fixture(scope="module")
def small() -> Iterator[TritonClient]:
    """Yield a client connected to a server with small limits."""
    with running(config(limits=LIMITS)) as address, triton.InferenceServerClient(address) as client:
        yield client


def bare(*inputs: dict[str, Any], raw: list[bytes] | None = None, model: str = "positions") -> pb.ModelInferRequest:
    """Return a request with these inputs."""
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[pb.ModelInferRequest.InferInputTensor(**fields) for fields in inputs],
        raw_input_contents=raw or [],
    )


def one_input(
    name: str, datatype: str, shape: list[int], raw: bytes | None = None, **contents: Any
) -> pb.ModelInferRequest:
    """Return a request for "positions" with one input."""
    request = pb.ModelInferRequest(model_name="positions", raw_input_contents=[] if raw is None else [raw])
    tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
    if contents:
        tensor.contents.MergeFrom(pb.InferTensorContents(**contents))
    return request


def twice(request: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """Duplicate the first input and first raw bytes of a request, and return the request."""
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])
    return request


def parts(*elements: bytes, raw: bytes | None = None, **others: object) -> pb.ModelInferRequest:
    """Return a request for "sequences" with raw parts."""
    request = pb.ModelInferRequest(model_name="sequences")
    request.inputs.add(name="parts", datatype="BYTES", shape=[len(elements)])
    framed = b"".join(len(element).to_bytes(4, "little") + element for element in elements)
    request.raw_input_contents.append(framed if raw is None else raw)
    for name, values in others.items():
        array = np.array(values, np.int64)
        request.inputs.add(name=name, datatype="INT64", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


ONE_INT64 = (3).to_bytes(8, "little")
INPUTS = (
    "lengths, offsets, grid_thw, documents, "
    "input_ids, image_grid_thw, video_grid_thw, attention_mask, cu_seqlens, start"
)
NO_ARRAY = "want a shape that an array can have"
# Name, type, shape and bytes of the only input
TENSORS: list[tuple[tuple[str, str, list[int], bytes], str]] = [
    (("lengths", "INT64", [2], ONE_INT64), "lengths: got 8 bytes, want 16 for INT64 of shape (2,)"),
    (("lengths", "INT64", [1] * 100_000, ONE_INT64), "lengths.shape: got 100000 axes, want (-1,)"),
    (("lengths", "INT" * 1000, [1], ONE_INT64), f"lengths.datatype: got {('INT' * 1000)[:100]!r}, want INT64"),
    (("lengths", "INT32", [1], ONE_INT64), "lengths.datatype: got 'INT32', want INT64"),
    (("lengths", "INT64", [1, 1], ONE_INT64), "lengths.shape: got (1, 1), want (-1,)"),
    (("input_ids", "INT64", [1, 1, 1], ONE_INT64), "input_ids.shape: got (1, 1, 1), want (-1,) or 2 axes"),
    (("grid_thw", "INT64", [1, 1], ONE_INT64), "grid_thw.shape: got (1, 1), want (-1, 3)"),
    (("lengths", "INT64", [-1], b""), f"lengths.shape: got (-1,), {NO_ARRAY}"),
    (("attention_mask", "INT64", [0, 2**62], b""), f"attention_mask.shape: got (0, {2**62}), {NO_ARRAY}"),
    (("ids", "INT64", [1], ONE_INT64), f"inputs[0].name: got 'ids', want one of {INPUTS}"),
]
LENGTHS: dict[str, Any] = {"name": "lengths", "datatype": "INT64", "shape": [1]}
BYTE = pb.InferTensorContents(uint_contents=[256])
IDS: dict[str, Any] = {"name": "input_ids", "datatype": "INT64", "shape": [1, 1]}
MASK = {"name": "attention_mask", "datatype": "UINT8", "shape": [1, 1], "contents": BYTE}
MALFORMED: list[tuple[pb.ModelInferRequest, str]] = [
    *((one_input(*tensor), message) for tensor, message in TENSORS),
    (one_input("lengths", "INT64", [1], int64_contents=[1, 2]), "lengths.contents: got 2 elements, want 1 for (1,)"),
    (one_input("lengths", "INT64", [1], int_contents=[1]), "lengths.contents: got int_contents, want int64_contents"),
    (
        bare({**IDS, "contents": pb.InferTensorContents(int64_contents=[1])}, MASK),
        "attention_mask.contents: got 256, want a value that fits UINT8",
    ),
    (
        one_input("lengths", "INT64", [1], ONE_INT64, int64_contents=[1]),
        "lengths: contents cannot be combined with raw_input_contents",
    ),
    (
        bare(LENGTHS, {**LENGTHS, "name": "start"}, raw=[ONE_INT64]),
        "raw_input_contents: got 1, want 2, one for each input outside shared memory",
    ),
    (twice(one_input("lengths", "INT64", [1], ONE_INT64)), "inputs[1].name: got 'lengths' again, want it once"),
    (bare(*[{"name": "lengths"}] * 11), "inputs: got 11 tensors, want at most 10"),
    (bare(), "inputs: got [], want lengths or input_ids"),
    (bare(model="sequences"), "missing input tensor 'parts'"),
    (parts(b"ab", raw=b"\3\0\0\0ab"), "parts: got 6 bytes, want at least 7 for element 0"),
    (parts(b"ab", raw=b"\3\0\0"), "parts: got 3 bytes, want at least 4 for element 0"),
    (parts(b"a", b"b", raw=b"\1\0\0\0a"), "parts: got 1 elements in 5 of 5 bytes, want 2 for shape (2,)"),
    (parts(b"a", raw=b"\1\0\0\0a\1\0\0\0b"), "parts: got 1 elements in 5 of 10 bytes, want 1 for shape (1,)"),
    (parts(b"a", b"\xff"), "documents[0].parts[1]: got bytes that are not UTF-8 (invalid start byte), want text"),
    (parts(b"a", b"b", parts_per_document=[1]), "parts_per_document: got [1], want a sum of 2, the number of parts"),
    (parts(b"a", parts_per_document=[2, -1]), "parts_per_document: got [2, -1], want a sum of 1, the number of parts"),
    (parts(b"a", parts_per_document=[1, 0]), "documents[1].parts: got no tokens, want at least one"),
]


@pytest.mark.parametrize(("request_", "message"), MALFORMED, ids=[message[:60] for _, message in MALFORMED])
def test_errors_name_the_malformed_field_of_a_request(
    infer: Infer, request_: pb.ModelInferRequest, message: str
) -> None:
    assert refusal(lambda: infer(request_)) == ("INVALID_ARGUMENT", message)


Q = np.zeros((2, 1, 16), np.float32)
ROTATION: dict[str, object] = {"q": Q, "position_ids": [[0, 1]] * 2}
VALID_INPUTS: dict[str, dict[str, object]] = {"positions": {"lengths": [1]}, "rotate": ROTATION}
SOURCES = "want position_ids, or table and table_documents"
NESTED = "[" * 500 + "]" * 500
DIGITS = "9" * 5000
# Parameter values, sent with valid inputs
PARAMETERS: dict[tuple[str, str], list[tuple[object, str]]] = {
    ("positions", "views"): [
        ("[", "parameters['views']: got '[', want JSON (Expecting value: line 1 column 2 (char 1))"),
        ("{}", "parameters['views']: got '{}', want a JSON list of views"),
        ("[{}]", "views[0]: got none, want one of take, window, decode, shard, pad"),
        ('[{"tale": {}}]', "views[0]: got {'tale': {}}, want message View as JSON ("),
        (
            '[{"pad": {"side": Infinity}}]',
            """parameters['views']: got '[{"pad": {"side": Infinity}}]', want JSON (Out of range float """,
        ),
        (f'[{{"decode": {{"steps": {DIGITS}}}}}]', """parameters['views']: got '[{"decode": {"steps": 99999"""),
        (f'[{{"decode": {NESTED}}}]', "parameters['views']: got '[{\"decode\": [[[[["),
    ],
    ("positions", "scheme"): [
        ('{"name": "x"}', "scheme: got 'x', want a Scheme or one of "),
        (
            r'{"name": "\ud800"}',
            r"""parameters['scheme']: got '{"name": "\\ud800"}', want JSON ('utf-8' codec can't encode """,
        ),
    ],
    ("positions", "strict"): [(1, "parameters['strict']: got int64_param, want bool_param")],
    ("rotate", "rotary"): [
        ('{"head_dim": 16, "scaling": {"type": {}}}', "parameters['rotary']: scaling.type: got {}, want one of "),
        ("[]", "parameters['rotary']: got '[]', want a JSON object"),
    ],
    ("rotate", "layout"): [("hd", "layout: got 'hd', want ")],
}
WRONG: list[tuple[str, dict[str, object], dict[str, object], str]] = [
    *(
        (model, VALID_INPUTS[model], {name: value}, message)
        for (model, name), values in PARAMETERS.items()
        for value, message in values
    ),
    ("positions", {"lengths": [1], "input_ids": [1]}, {}, "inputs: 'input_ids' cannot be combined with 'lengths'"),
    ("positions", {"input_ids": [1], "offsets": [1]}, {}, "inputs: 'offsets' cannot be combined with 'input_ids'"),
    (
        "sequences",
        {"parts": [b"a"], "kinds": [b"video"]},
        {},
        "documents[0].parts[0]: got kind b'video', want b'text' or b'image'",
    ),
    ("sequences", {"parts": [b"a"], "kinds": [b"text"] * 2}, {}, "kinds: got 2, want 1, one for each part"),
    ("rotate", {"q": Q}, {}, f"inputs: got ['q'], {SOURCES}"),
    ("rotate", {"q": Q, "table": [[1]]}, {}, f"inputs: got ['q', 'table'], {SOURCES}"),
    (
        "rotate",
        {"q": Q, "table": [[0]], "table_documents": [[0]] * 4},
        {},
        "table: got 1 rows, want 5 + 4·axes for 1 to 16 axes",
    ),
]


@pytest.mark.parametrize(("model", "inputs", "options", "message"), WRONG, ids=[case[3][:60] for case in WRONG])
def test_errors_name_the_invalid_field_of_a_request(
    client: TritonClient, model: str, inputs: dict[str, object], options: dict[str, object], message: str
) -> None:
    status, details = refusal(lambda: ask(client, model, inputs, parameters=options))
    assert (status, details[: len(message)]) == ("INVALID_ARGUMENT", message)


def test_unknown_names_raise_not_found(client: TritonClient) -> None:
    models = "model: got 'x', want one of 'sequences', 'positions', 'rotate'"
    versions = "version of 'positions': got '1', want one of 'default', 'halves', 'flat'"
    calls: list[Callable[[str, str], object]] = [
        lambda name, version: client.infer(name, [input_tensor("lengths", [1])], version),
        client.get_model_metadata,
        client.get_model_config,
        client.get_inference_statistics,
    ]
    for call in calls:
        assert refusal(partial(call, "x", "")) == ("NOT_FOUND", models)
        assert refusal(partial(call, "positions", "1")) == ("NOT_FOUND", versions)


def test_unknown_parameters_and_outputs_are_unsupported(client: TritonClient) -> None:
    known = "want scheme or strict or views or image_token_id or video_token_id or spatial_merge_size or "
    known += "row_token_id or last_row_token_id"
    answers: dict[str, dict[str, Any]] = {
        f"parameters: got 'sequence_end', {known}": {"sequence_id": 1},
        f"parameters: got 'timeout', {known}": {"timeout": 5},
        f"parameters: got 'stride', {known}": {"parameters": {"stride": 5}},
        f"parameters: got 1000 parameters, {known}": {"parameters": {str(number): 5 for number in range(1000)}},
    }
    for message, options in answers.items():
        assert refusal(partial(ask, client, "positions", {"lengths": [1]}, **options)) == ("UNIMPLEMENTED", message)
    available = "position_ids, cu_seqlens, table, table_documents"
    image = {"lengths": [2], "offsets": [0], "grid_thw": [[1, 1, 2]]}
    assert refusal(lambda: ask(client, "positions", image, ["cu_seqlens", "deltas"], model_version="flat")) == (
        "UNIMPLEMENTED",
        f"outputs[1].name: got 'deltas', want one of {available} for this request",
    )
    assert refusal(lambda: ask(client, "rotate", {"q": Q, "position_ids": [[0, 1]] * 2}, ["k"])) == (
        "UNIMPLEMENTED",
        "outputs[0].name: got 'k', want one of q for this request",
    )
    output = triton.InferRequestedOutput("deltas", class_count=1)
    assert refusal(lambda: client.infer("positions", [input_tensor("lengths", [1])], outputs=[output])) == (
        "UNIMPLEMENTED",
        "outputs[0].parameters: got 'classification', want shared_memory_region or shared_memory_byte_size or "
        "shared_memory_offset",
    )


def test_unknown_and_repeated_outputs_are_refused(client: TritonClient) -> None:
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


DOCUMENTS, IMAGES = "documents: got 4, want at most 3", "images: got 4, want at most 3"
TOKENS = "tokens: got 10001, want at most 10000"
# Most requests contain a second mistake, which only later work would find.
INPUTS_BEYOND: dict[str, list[tuple[dict[str, object], str]]] = {
    "positions": [
        ({"lengths": [0] * 4}, DOCUMENTS),
        ({"input_ids": [[1]] * 4}, DOCUMENTS),
        ({"input_ids": [1] * 4, "cu_seqlens": [0, 1, 2, 3, 9]}, DOCUMENTS),
        ({"lengths": [9], "offsets": [9] * 4, "grid_thw": [[1, 1, 1]] * 4}, IMAGES),
        ({"input_ids": [5], "image_grid_thw": [[1, 1, 1]] * 2, "video_grid_thw": [[1, 1, 1]] * 2}, IMAGES),
        ({"lengths": [10_001]}, TOKENS),
    ],
    "sequences": [
        ({"parts": [b"a"] * 21}, "segments: got 21, want at most 20"),
        ({"parts": [b"a"] * 4, "parts_per_document": [1] * 4}, DOCUMENTS),
        ({"parts": [b"a"] * 4, "kinds": [b"image"] * 4}, IMAGES),
        ({"parts": [b"a" * 10_001]}, TOKENS),
        ({"parts": ["é".encode() * 3000] * 2, "parts_per_document": [1, 1]}, "tokens: got 12000, want at most 10000"),
        ({"parts": [PHOTO] * 3, "kinds": [b"image"] * 3}, "response_bytes: got "),
    ],
    "rotate": [
        (
            {"q": np.zeros((10_000, 1, 16), np.float32), "position_ids": [[0] * 10_000] * 2},
            "response_bytes: got 640000, want",
        ),
        ({"q": Q, "position_ids": [[0] * 10_001]}, TOKENS),
        ({"q": np.zeros((10_001, 1, 2), np.float32), "table": [[0]] * 9, "table_documents": [[0]] * 4}, TOKENS),
    ],
}
LONG: object = "{" + " " * 2**20
BEYOND: list[tuple[str, dict[str, object], dict[str, object], str]] = [
    *((model, inputs, {}, message) for model, cases in INPUTS_BEYOND.items() for inputs, message in cases),
    *(
        (model, VALID_INPUTS[model], {name: LONG}, f"parameters[{name!r}]: got 1048577 characters, want at most {most}")
        for model, name, most in (
            ("positions", "scheme", 4096),
            ("positions", "views", 2**20),
            ("rotate", "rotary", 2**20),
        )
    ),
    ("positions", {"lengths": [1]}, {"views": json.dumps([{"decode": {}}] * 17)}, "views: got 17, want at most 16"),
    ("rotate", ROTATION, {"rotary": '{"head_dim": 1026}'}, "rotary.head_dim: got 1026, want at most 1024"),
]


@pytest.mark.parametrize(("model", "inputs", "options", "message"), BEYOND)
def test_errors_name_the_limit_that_a_request_exceeds(
    small: TritonClient, model: str, inputs: dict[str, object], options: dict[str, object], message: str
) -> None:
    status, details = refusal(lambda: ask(small, model, inputs, parameters=options))
    assert (status, details[: len(message)]) == ("RESOURCE_EXHAUSTED", message)


def test_only_requested_outputs_count_towards_the_response_limit(small: TritonClient) -> None:
    spans, scheme = {"lengths": [10_000]}, {"scheme": '{"name": "rope-tie-v2", "axes": 3}'}
    assert ask(small, "positions", spans, ["cu_seqlens"], parameters=scheme)["cu_seqlens"].tolist() == [0, 10_000]
    status, message = refusal(partial(ask, small, "positions", spans, ["position_ids"], parameters=scheme))
    assert (status, message.partition(",")[0]) == ("RESOURCE_EXHAUSTED", "response_bytes: got 240000")
    # A table of 20 segments is small, so a larger table is passed to the function itself.
    table = place(SegmentTable.from_documents([[Text(1)]] * 100))
    profile: Any = None
    call: Any = SimpleNamespace(memory=Exchange(), answer_bytes=0)
    for output in ("table", "table_documents", "cu_seqlens"):
        request = Request(profile, False, {}, {}, {output: None}, 0)
        if output == "cu_seqlens":
            check_outputs(table, request, call, Limits(response_bytes=1024))
            continue
        with pytest.raises(LimitExceededError, match="response_bytes: got 13600, want at most 1024"):
            check_outputs(table, request, call, Limits(response_bytes=1024))


# JSON in parameters: every value is answered or refused, and none leads to INTERNAL

ODD = [
    *("null", "true", "0", "-1", "3", "1.5", "1e308", "1e400", "-1e400", "1e-400", "NaN", "Infinity"),
    *(str(sign * 2**bits) for bits in (31, 32, 63, 64, 70) for sign in (1, -1)),
    *("9" * 400, "9" * 5000, '""', '"x"', '"0"', r'"\ud800"', r'"\u0000"', '"' + "é" * 2000 + '"'),
    *("[]", "[null]", "[[]]", "[1]", "[1.5]", "[NaN]", r'["\ud800"]', "{}", '{"a": 1}', r'{"\udfff": {}}', "[{}]"),
    *("[" * depth + "]" * depth for depth in (20, 40, 200, 900, 960, 980, 1000, 100_000)),
    *('{"a": ' * depth + "1" + "}" * depth for depth in (40, 900, 960, 980)),
]
"""JSON of every kind, and text that only resembles JSON."""
STRINGS = [odd for odd in ODD if odd.startswith('"')]

PLACEHOLDER = "here it goes"
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
VALID_PARAMETERS: dict[tuple[str, str], list[object]] = {
    ("positions", "views"): [[view] for view in VIEWS],
    ("positions", "scheme"): [
        {"name": name, **dict.fromkeys(parameters(scheme), 1)} for name, scheme in SCHEMES.items()
    ],
    ("sequences", "scheme"): [{"name": "v2pe", "axes": 1}],
    ("rotate", "rotary"): [{"head_dim": 16, **rotary} for rotary in ROTARIES],
    ("rotate", "layout"): ["thd"],
}


def replaced(value: object) -> Iterator[Any]:
    """Yield copies of a value with PLACEHOLDER in place of the value or of a nested value, or as an additional key."""
    yield PLACEHOLDER
    if isinstance(value, list):
        for i, inner in enumerate(value[:2]):
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in replaced(inner))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: changed} for changed in replaced(inner))
        yield {**value, PLACEHOLDER: 1}


def odd_requests() -> Iterator[pb.ModelInferRequest]:
    """Yield requests with every odd value in every place of valid parameters."""
    spans: dict[str, object] = {"lengths": [11], "offsets": [3], "grid_thw": [[1, 2, 3]]}
    inputs: dict[str, dict[str, object]] = {"positions": spans, "rotate": ROTATION, "sequences": {"parts": [b"a"]}}
    quoted = json.dumps(PLACEHOLDER)
    for (model, name), values in VALID_PARAMETERS.items():
        tensors = [input_tensor(name, values) for name, values in inputs[model].items()]
        for template in dict.fromkeys(json.dumps(changed) for value in values for changed in replaced(value)):
            # A key must be a string: with any other value in its place, the text is not JSON.
            for odd in STRINGS if f"{quoted}: " in template else ODD:
                request = pb.ModelInferRequest(model_name=model)
                for tensor in tensors:
                    request.inputs.add().MergeFromString(tensor._get_tensor().SerializeToString())
                    request.raw_input_contents.append(tensor._get_content())
                request.parameters[name].string_param = template.replace(quoted, odd)
                yield request


def check_answers(infer: Infer, requests: Iterable[pb.ModelInferRequest]) -> None:
    """Check that every request is either answered or refused with a sentence."""
    statuses = set()
    for request in requests:
        status, details = ending(partial(infer, request, timeout=60))
        assert status in ("OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"), request
        assert status == "OK" or is_sentence(details), (request, details)
        statuses.add(status)
    assert "INVALID_ARGUMENT" in statuses


def test_odd_requests_are_answered_or_refused(infer: Infer) -> None:
    check_answers(infer, random.Random(7).sample([*odd_requests()], 300))


@pytest.mark.slow
def test_every_odd_value_in_every_place_is_answered_or_refused(infer: Infer) -> None:
    check_answers(infer, odd_requests())
