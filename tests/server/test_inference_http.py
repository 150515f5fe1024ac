"""The Open Inference Protocol over HTTP: the real client, and the same answers, errors and limits as over gRPC."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from open_inference import Infer, TritonClient, config, stub
from test_inference_refusals import MALFORMED
from waiting import eventually, free_port, without_torch

from mmpos import SegmentTable, place
from mmpos_server.access import Tls
from mmpos_server.app import Server
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.messages import DATATYPES
from mmpos_server.inference.rest import MAX_JSON, MAX_LISTS, MAX_NUMBERS
from mmpos_server.listening import Listen
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.testing import running

SPANS: dict[str, Any] = {"lengths": [11], "offsets": [3], "grid_thw": [[1, 2, 3]]}
PHOTO = (Path(__file__).parents[2] / "mmpos" / "photos" / "coffee.jpg").read_bytes()
SMALL = {"documents": 3, "tokens": 10_000, "response_bytes": 200_000, "request_bytes": 100_000}


@contextmanager
def serving(settings: Any = None, **options: Any) -> Iterator[tuple[str, int]]:
    """A server; gives the address of gRPC and the port for HTTP."""
    port = free_port()
    listen = Listen(http_port=port, **options.pop("listen", {}))
    with running(settings or config(), listen=listen, **options) as address:
        yield address, port


@pytest.fixture(scope="module")
def places() -> Iterator[tuple[str, int]]:
    with serving(shared_memory=SharedMemory("mmpos-http-")) as places:
        yield places


@pytest.fixture(scope="module")
def infer(places: tuple[str, int]) -> Iterator[Infer]:
    with grpc.insecure_channel(places[0]) as channel:
        yield stub(channel)


@pytest.fixture
def client(places: tuple[str, int]) -> Iterator[TritonClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{places[1]}") as client:
        yield client


def ask(
    port: int, verb: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Code, JSON (or bytes) and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    raw = json.dumps(body).encode() if isinstance(body, dict | list) else body
    try:
        connection.request(verb, path, raw, headers or {})
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    told = dict(answer.getheaders())
    return answer.status, json.loads(data) if told["Content-Type"].startswith("application/json") else data, told


def given(name: str, values: Any, *, binary: bool) -> Any:
    array = np.array(values, object) if isinstance(values[0], bytes) else np.asarray(values)
    datatype = {"O": "BYTES", "l": "INT64", "f": "FP32", "e": "FP16"}[array.dtype.char]
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def number(name: str, values: Any, datatype: str = "INT64") -> dict[str, Any]:
    """An input as JSON."""
    return {"name": name, "datatype": datatype, "shape": list(np.shape(values)), "data": values}


# The real client.


@pytest.mark.parametrize("binary", [True, False], ids=["bytes", "JSON"])
def test_positions_come_as_the_library_places_them(client: TritonClient, binary: bool) -> None:
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("position_ids", "deltas")]
    inputs = [given(name, values, binary=binary) for name, values in SPANS.items()]
    result = client.infer("positions", inputs, outputs=outputs, request_id="7", parameters={"scheme": "mrope"})
    wanted = place(SegmentTable.from_spans(*SPANS.values()), "mrope")
    np.testing.assert_array_equal(result.as_numpy("position_ids"), wanted.dense())
    assert result.as_numpy("deltas").tolist() == wanted.deltas.tolist()
    response = result.get_response()
    head = [response[name] for name in ("model_name", "model_version", "id")]
    assert head == ["positions", "default", "7"]
    assert [("data" in output, "parameters" in output) for output in response["outputs"]] == [(not binary, binary)] * 2


def test_numbers_and_bytes_mix(client: TritonClient) -> None:
    inputs = [given(name, values, binary=name == "offsets") for name, values in SPANS.items()]
    outputs = [triton.InferRequestedOutput("position_ids", binary_data=False), triton.InferRequestedOutput("deltas")]
    result = client.infer("positions", inputs, outputs=outputs)
    wanted = place(SegmentTable.from_spans(*SPANS.values()))
    np.testing.assert_array_equal(result.as_numpy("position_ids"), wanted.dense())
    assert result.as_numpy("deltas").tolist() == wanted.deltas.tolist()


def test_text_in_json_and_photographs_as_bytes_become_sequences(client: TritonClient, infer: Infer) -> None:
    parts = [given("parts", [b"A photo of ", PHOTO], binary=True), given("kinds", [b"text", b"image"], binary=False)]
    found = client.infer("sequences", parts)
    message = pb.ModelInferRequest(model_name="sequences")
    for name, values in (("parts", [b"A photo of ", PHOTO]), ("kinds", [b"text", b"image"])):
        message.inputs.add(name=name, datatype="BYTES", shape=[2]).contents.bytes_contents.extend(values)
    answer = infer(message)
    assert [output["name"] for output in found.get_response()["outputs"]] == [one.name for one in answer.outputs]
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        dtype = DATATYPES[output.datatype].dtype
        assert dtype is not None
        np.testing.assert_array_equal(
            found.as_numpy(output.name), np.frombuffer(raw, dtype).reshape(output.shape), strict=True
        )


def test_rotations_of_halves_come_as_bytes(client: TritonClient) -> None:
    q = np.random.default_rng(1).standard_normal((2, 1, 16)).astype(np.float16)
    inputs = [given("q", q, binary=True), given("position_ids", [[0, 0], [0, 0]], binary=False)]
    np.testing.assert_array_equal(client.infer("rotate", inputs).as_numpy("q"), q)
    outputs = [triton.InferRequestedOutput("q", binary_data=False)]
    with pytest.raises(triton.InferenceServerException, match="q: got FP16 as JSON, want binary_data") as raised:
        client.infer("rotate", inputs, outputs=outputs)
    assert raised.value.status() == "501"


def test_the_server_and_its_models_are_told(client: TritonClient, places: tuple[str, int]) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("positions")
    assert client.is_model_ready("positions", "halves")
    assert not client.is_model_ready("positions", "1")
    assert {name: client.get_server_metadata()[name] for name in ("name", "extensions")} == {
        "name": "mmpos",
        "extensions": [
            "binary_tensor_data",
            "model_configuration",
            "parameters",
            "statistics",
            "system_shared_memory",
        ],
    }
    told = client.get_model_metadata("rotate")
    assert (told["versions"], told["outputs"][0]) == (
        ["default", "halves", "flat"],
        {"name": "q", "datatype": "FP32", "shape": [-1, -1, 16]},
    )
    assert client.get_model_config("positions")["input"][0] == {
        "name": "lengths",
        "data_type": "TYPE_INT64",
        "dims": [-1],
        "optional": True,
    }
    [statistics] = client.get_inference_statistics("rotate", "flat")["model_stats"]
    assert statistics["inference_stats"]["success"] == {"count": 0, "ns": 0}
    assert len(client.get_inference_statistics()["model_stats"]) == 9
    assert ask(places[1], "GET", "/v2/health/live")[:2] == (200, {"live": True})
    assert ask(places[1], "GET", "/v2/models/positions/ready")[:2] == (200, {"ready": True})
    assert ask(places[1], "GET", "/v2/models/x/ready")[:2] == (503, {"ready": False})


def test_tensors_lie_in_shared_memory(client: TritonClient) -> None:
    key = f"/mmpos-http-{os.getpid()}"
    handle = shm.create_shared_memory_region("a", key, 256)
    try:
        shm.set_shared_memory_region(handle, [np.array([11])])
        client.register_system_shared_memory("a", key, 256)
        assert client.get_system_shared_memory_status() == [{"name": "a", "key": key, "offset": 0, "byte_size": 256}]
        lengths = triton.InferInput("lengths", [1], "INT64")
        lengths.set_shared_memory("a", 8)
        output = triton.InferRequestedOutput("position_ids")
        output.set_shared_memory("a", 128, 64)
        result = client.infer("positions", [lengths], outputs=[output])
        assert result.get_output("position_ids")["parameters"] == {
            "shared_memory_region": "a",
            "shared_memory_byte_size": 88,
            "shared_memory_offset": 64,
        }
        ids = shm.get_contents_as_numpy(handle, np.int32, [2, 11], 64)
        np.testing.assert_array_equal(ids, place(SegmentTable.from_spans([11], [], np.empty((0, 3), int))).dense())
        client.unregister_system_shared_memory("a")
        assert client.get_system_shared_memory_status() == []
    finally:
        shm.destroy_shared_memory_region(handle)
    client.unregister_cuda_shared_memory()
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(triton.InferenceServerException, match="region: got memory of a GPU, want system shared memory"):
        client.register_cuda_shared_memory("a", "aGFuZGxl", 0, 64)


# Beside gRPC.


def over_http(request: pb.ModelInferRequest) -> tuple[bytes, dict[str, str]]:
    """The same request as JSON and bytes."""
    raw = iter(request.raw_input_contents)
    inputs, behind = [], b""
    for tensor in request.inputs:
        told: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if request.raw_input_contents:
            data = next(raw)
            told["parameters"] = {"binary_data_size": len(data)}
            behind += data
        else:
            fields = tensor.contents.ListFields()
            told["data"] = list(fields[0][1]) if fields else []
        inputs.append(told)
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    framed = bool(request.raw_input_contents)
    return head + behind, {"Inference-Header-Content-Length": str(len(head))} if framed else {}


# What one of both forms has no words for: other numbers of raw contents than of inputs, both kinds, none of the right
# field; and bytes that are no text.
ONLY_GRPC = {"raw and one by one", "raw for some", "raw for none", "numbers of another type", "an input twice"}


@pytest.mark.parametrize("name", [name for name in MALFORMED if name not in ONLY_GRPC])
def test_what_is_malformed_is_refused_in_the_same_words(places: tuple[str, int], name: str) -> None:
    request, message = MALFORMED[name]
    body, headers = over_http(request)
    code, told, _ = ask(places[1], "POST", f"/v2/models/{request.model_name}/infer", body, headers)
    assert (code, told) == (400, {"error": message})


SAME: dict[str, tuple[str, dict[str, object]]] = {
    "an unknown model": ("x", {"inputs": []}),
    "an unknown parameter": ("positions", {"inputs": [number("lengths", [1])], "parameters": {"stride": 5}}),
    "a parameter of another kind": ("positions", {"inputs": [number("lengths", [1])], "parameters": {"strict": 1}}),
    "an unknown output": ("positions", {"inputs": [number("lengths", [1])], "outputs": [{"name": "ids"}]}),
    "too small a number": ("positions", {"inputs": [number("lengths", [0])]}),
    "too many documents": ("positions", {"inputs": [number("lengths", [1] * 4097)]}),
    "an output that is not there": (
        "rotate",
        {
            "inputs": [number("q", [[[1.0] * 16]], "FP32"), number("position_ids", [[0], [0]])],
            "outputs": [{"name": "k"}],
        },
    ),
}
CODES = {"NOT_FOUND": 404, "INVALID_ARGUMENT": 400, "UNIMPLEMENTED": 501, "RESOURCE_EXHAUSTED": 413}


@pytest.mark.parametrize(("model", "body"), SAME.values(), ids=SAME)
def test_what_is_wrong_is_refused_in_the_same_words(
    places: tuple[str, int], infer: Infer, model: str, body: dict[str, Any]
) -> None:
    message = pb.ModelInferRequest(model_name=model)
    for tensor in body["inputs"]:
        made = message.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        field = DATATYPES[tensor["datatype"]].contents
        assert field is not None
        getattr(made.contents, field).extend(np.ravel(tensor["data"]).tolist())
    for name, value in body.get("parameters", {}).items():
        message.parameters[name].int64_param = value
    for output in body.get("outputs", []):
        message.outputs.add(name=output["name"])
    with pytest.raises(grpc.RpcError) as raised:
        infer(message)
    error: Any = raised.value
    code, told, _ = ask(places[1], "POST", f"/v2/models/{model}/infer", body)
    assert (code, told) == (CODES[error.code().name], {"error": error.details()})


# What only HTTP can say.

LENGTHS = number("lengths", [11])
NO_JSON = {
    "nothing": (b"", "request: got b'', want JSON (Invalid JSON: "),
    "a list": (b"[]", "request: got [], want an object"),
    "no inputs": (b"{}", "inputs: got none, want a value"),
    "an unknown field": (b'{"inputs": [], "output": []}', "output: got [], want no field of this name"),
    "a name that is none": (b'{"inputs": [{"name": 1}]}', "inputs[0].name: got 1, want string"),
    "a shape of halves": (
        b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [0.5]}]}',
        "inputs[0].shape[0]: got 0.5, want integer",
    ),
    "half a character": (
        rb'{"inputs": [], "id": "\ud800"}',
        r"""request: got b'{"inputs": [], "id": "\\ud800"}', want JSON (Invalid JSON: """,
    ),
    "a parameter that is nothing": (
        b'{"inputs": [], "parameters": {"a": null}}',
        "parameters['a']: got None, want a text, a number of 64 bits, true or false",
    ),
    "a size without a header": (
        b'{"inputs": [{"name": "lengths", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 8}}]}',
        "inputs[0].parameters['binary_data_size']: got 8, want header Inference-Header-Content-Length, too",
    ),
}


@pytest.mark.parametrize(("body", "message"), NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_request_is_refused_by_name(places: tuple[str, int], body: bytes, message: str) -> None:
    code, told, _ = ask(places[1], "POST", "/v2/models/positions/infer", body)
    assert (code, told["error"][: len(message)]) == (400, message)


WRONG_DATA = {
    "a text": (number("lengths", [1]) | {"data": ["x"]}, "inputs[0].data: got ['x'], want what INT64 holds"),
    "a fraction": (number("lengths", [1]) | {"data": [1.5]}, "inputs[0].data: got [1.5], want what INT64 holds"),
    "lists of two depths": (
        number("lengths", [1]) | {"data": [[1], 2]},
        "inputs[0].data: got [[1], 2], want lists of one depth",
    ),
    "a half as a number": (
        number("q", [[[1.0]]], "FP16"),
        "inputs[0].data: got FP16 as JSON, want bytes and binary_data_size",
    ),
    "a number as a text": (
        number("parts", [1], "BYTES"),
        "inputs[0].data: got [1], want what BYTES holds",
    ),
}


@pytest.mark.parametrize(("tensor", "message"), WRONG_DATA.values(), ids=WRONG_DATA)
def test_numbers_that_no_tensor_has_are_refused(
    places: tuple[str, int], tensor: dict[str, object], message: str
) -> None:
    code, told, _ = ask(places[1], "POST", "/v2/models/positions/infer", {"inputs": [tensor]})
    assert (code, told) == (400, {"error": message})


def test_sizes_of_bytes_and_of_json_agree_with_what_came(places: tuple[str, int]) -> None:
    header = "Inference-Header-Content-Length"
    tensor = {"name": "lengths", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [tensor]}).encode()
    refused = {
        (head + b"\0" * 7, str(len(head))): "binary_data_size: got 8 in all, want 7, as come after the JSON",
        (head, "-1"): f"{header}: got '-1', want an integer >= 0",
        (head, "1" * 30): f"{header}: got '{'1' * 30}', want an integer >= 0",
        (head, str(len(head) + 1)): f"{header}: got {len(head) + 1}, want <= {len(head)}, as came",
    }
    for (body, size), message in refused.items():
        answer = ask(places[1], "POST", "/v2/models/positions/infer", body, {header: size})
        assert answer[:2] == (400, {"error": message})


def test_json_has_limits_of_its_own(places: tuple[str, int]) -> None:
    path = "/v2/models/positions/infer"
    assert ask(places[1], "POST", path, b" " * (MAX_JSON + 1))[:2] == (
        413,
        {"error": f"request: got {MAX_JSON + 1} bytes of JSON, want at most {MAX_JSON}, and binary_data_size"},
    )
    assert ask(places[1], "POST", path, b"[" * (MAX_LISTS + 1))[:2] == (
        413,
        {"error": f"request: got {MAX_LISTS + 1} lists in JSON, want at most {MAX_LISTS}, or binary_data_size"},
    )
    tokens = MAX_NUMBERS // 2 + 1
    body: dict[str, object] = {"inputs": [number("lengths", [tokens])], "outputs": [{"name": "position_ids"}]}
    assert ask(places[1], "POST", path, body)[:2] == (
        413,
        {"error": f"position_ids: got {2 * tokens} numbers as JSON, want at most {MAX_NUMBERS}, or binary_data"},
    )
    body["parameters"] = {"binary_data_output": True}
    code, raw, told = ask(places[1], "POST", path, body)
    assert (code, len(raw) - int(told["Inference-Header-Content-Length"])) == (200, 8 * tokens)


def test_paths_and_verbs_that_are_none_are_refused(places: tuple[str, int]) -> None:
    assert ask(places[1], "GET", "/v2/models")[:2] == (404, {"error": "404: Not Found"})
    code, told, headers = ask(places[1], "GET", "/v2/models/positions/infer")
    assert (code, told, headers["Allow"]) == (405, {"error": "405: Method Not Allowed"}, "POST")
    code, told, _ = ask(places[1], "POST", "/v2/models/positions/infer", b"x", {"Content-Encoding": "gzip"})
    assert (code, told) == (415, {"error": "Content-Encoding: got 'gzip', want none"})


def test_requests_have_their_ids(places: tuple[str, int]) -> None:
    path, body = "/v2/models/positions/infer", {"inputs": [LENGTHS]}
    assert ask(places[1], "POST", path, body, {"X-Request-Id": "abc"})[2]["x-request-id"] == "abc"
    assert ask(places[1], "POST", path, {"inputs": []}, {"X-Request-Id": "abc"})[2]["x-request-id"] == "abc"
    assert ask(places[1], "GET", "/v2")[2]["x-request-id"]


# Limits, tokens, counts.


def test_limits_of_the_server_hold() -> None:
    with serving(config(limits=SMALL)) as (_, port):
        path = "/v2/models/positions/infer"
        assert ask(port, "POST", path, b" " * 100_001)[:2] == (
            413,
            {"error": "request: got 100001 bytes, want <= 100000"},
        )
        assert ask(port, "POST", path, {"inputs": [number("lengths", [1] * 4)]})[:2] == (
            413,
            {"error": "documents: got 4, want at most 3 in one request of this server"},
        )


def test_a_body_without_a_length_is_counted_as_it_comes() -> None:
    with serving(config(limits=SMALL)) as (_, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        chunks = (b" " * 60_000 for _ in range(2))
        connection.request("POST", "/v2/models/positions/infer", chunks, encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413
        connection.close()


def test_clients_have_their_limits() -> None:
    with serving(config(clients={"requests_per_second": 0.001, "burst": 1})) as (_, port):
        body = {"inputs": [LENGTHS]}
        assert ask(port, "POST", "/v2/models/positions/infer", body)[0] == 200
        code, told, headers = ask(port, "POST", "/v2/models/positions/infer", body)
        assert (code, told["error"].partition(":")[0]) == (429, "clients.requests_per_second of '127.0.0.1'")
        assert int(headers["Retry-After"]) > 1
        assert ask(port, "GET", "/v2/health/ready")[0] == 200


TOKEN = "a-token-of-many-characters"


def test_tokens_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"trainer {TOKEN}\n")
    with serving(listen={"token_file": path}) as (_, port):
        message = {"error": 'authorization: got no known token, want "Bearer TOKEN"'}
        refused: list[dict[str, str]] = [{}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer \xff\xfe"}]
        for headers in refused:
            code, told, back = ask(port, "POST", "/v2/models/positions/infer", {"inputs": [LENGTHS]}, headers)
            assert (code, told, back["WWW-Authenticate"]) == (401, message, "Bearer")
        for name in ("live", "ready"):
            assert ask(port, "GET", f"/v2/health/{name}")[0] == 200
        known = {"Authorization": f"Bearer {TOKEN}"}
        assert ask(port, "POST", "/v2/models/positions/infer", {"inputs": [LENGTHS]}, known)[0] == 200
        assert ask(port, "GET", "/v2", headers=known)[0] == 200
        assert ask(port, "GET", "/v2")[:2] == (401, message)


class Running:
    """A server on the loop of a test, whose inside is looked at."""

    def __init__(self, **tables: Any) -> None:
        self.server = Server(config(**tables), Listen(http_port=0))
        self.port = 0

    async def __aenter__(self) -> Running:
        places = await self.server.start()
        self.port = int(places[1].rpartition(":")[2])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)

    @property
    def taken(self) -> int:
        """Bytes that count as those of requests at work."""
        return self.server._admission.bytes.taken

    async def open(self, raw: bytes, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        writer.write(raw)
        return reader, writer


async def becomes(condition: Callable[[], bool]) -> bool:
    return await asyncio.to_thread(eventually, condition)


def post(size: int, path: str = "/v2/models/positions/infer") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n".encode()


def counted(server: Server) -> dict[tuple[str, str], float]:
    """Requests of each method and status."""
    [found] = server.metrics.requests.collect()
    return {
        (sample.labels["method"], sample.labels["status"]): sample.value
        for sample in found.samples
        if sample.name.endswith("_total")
    }


def test_requests_are_counted_as_over_grpc() -> None:
    async def count() -> dict[tuple[str, str], float]:
        async with Running() as running:
            bodies: list[object] = [{"inputs": [LENGTHS]}, {"inputs": []}]
            for body in bodies:
                await asyncio.to_thread(ask, running.port, "POST", "/v2/models/positions/infer", body)
            await asyncio.to_thread(ask, running.port, "GET", "/v2")
            return counted(running.server)

    assert asyncio.run(count()) == {
        ("ModelInfer", "OK"): 1,
        ("ModelInfer", "INVALID_ARGUMENT"): 1,
        ("ServerMetadata", "OK"): 1,
    }


def test_a_body_that_does_not_end_is_ended() -> None:
    async def end() -> bytes:
        async with Running(http={"receive_seconds": 0.5}) as running:
            reader, writer = await running.open(post(1000) + b" " * 600)
            assert await becomes(lambda: running.taken == 600)
            answer = await reader.read()
            assert running.taken == 0
            writer.close()
            return answer

    answer = asyncio.run(end())
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert answer.endswith(b'{"error": "body: got 600 bytes, want all of it within 0.5 s"}')


def test_bodies_that_are_on_their_way_count() -> None:
    async def count() -> tuple[int, Any]:
        async with Running(concurrency={"max_in_flight_bytes": 4096}) as running:
            _, writer = await running.open(post(5000) + b" " * 4090)
            assert await becomes(lambda: running.taken == 4090)
            body = {"inputs": [LENGTHS]}
            answer = await asyncio.to_thread(ask, running.port, "POST", "/v2/models/positions/infer", body)
            writer.transport.abort()
            assert await becomes(lambda: running.taken == 0)
            return answer[:2]

    size = len(json.dumps({"inputs": [LENGTHS]}))
    assert size > 6
    assert asyncio.run(count()) == (429, {"error": "max_in_flight_bytes: got 4090 taken of 4096"})


def test_an_answer_that_nobody_reads_is_given_up() -> None:
    tokens = 2**21
    body = json.dumps({"inputs": [number("lengths", [tokens])], "parameters": {"binary_data_output": True}}).encode()

    async def give_up() -> None:
        async with Running(http={"send_seconds": 0.5}) as running:
            _, writer = await running.open(post(len(body)) + body, limit=2**10)
            assert await becomes(lambda: running.taken > 8 * tokens)
            assert await becomes(lambda: running.taken == 0)
            form: Any = running.server._http
            assert await becomes(lambda: not form._runner.server.connections)
            writer.transport.abort()

    asyncio.run(give_up())


def test_a_client_that_has_gone_cancels_its_call() -> None:
    async def cancel() -> dict[tuple[str, str], float]:
        async with Running(pools={"place": 1}) as running:
            started, ended = asyncio.Event(), asyncio.Event()
            method = next(one for one in running.server._unary if one.method.name == "ModelInfer").method

            async def wait(*_: object) -> None:
                started.set()
                await ended.wait()

            object.__setattr__(method, "run", wait)
            body = json.dumps({"inputs": []}).encode()
            _, writer = await running.open(post(len(body)) + body)
            await started.wait()
            writer.transport.abort()
            assert await becomes(lambda: bool(counted(running.server)))
            return counted(running.server)

    assert asyncio.run(cancel()) == {("ModelInfer", "CANCELLED"): 1}


def test_a_client_that_goes_as_its_answer_is_sent_is_no_error_of_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    async def leave() -> bytes:
        async with Running() as running:
            form: Any = running.server._http
            sent = form._sent

            async def closing(request: Any, response: Any) -> Any:
                request.transport.close()
                return await sent(request, response)

            form._sent = closing
            body = json.dumps({"inputs": []}).encode()
            reader, writer = await running.open(post(len(body)) + body)
            answer = await reader.read()
            writer.close()
            assert await becomes(lambda: running.taken == 0)
            return answer

    assert asyncio.run(leave()) == b""
    assert "Traceback" not in capfd.readouterr().err


def test_idle_connections_make_room_and_are_closed() -> None:
    async def fill() -> None:
        async with Running(http={"max_connections": 4, "idle_seconds": 60}) as running:
            idle = [await running.open(b"GET /v2") for _ in range(8)]
            for _ in range(3):
                assert (await asyncio.to_thread(ask, running.port, "GET", "/v2/health/live"))[0] == 200
            form: Any = running.server._http
            assert len(form._runner.server.connections) <= 4
            for _, writer in idle:
                writer.transport.abort()
        async with Running(http={"idle_seconds": 0.5}) as running:
            for raw in (b"", b"GET /v2 HT", b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"):
                reader, writer = await running.open(raw)
                await reader.read()
                writer.close()

    asyncio.run(fill())


def test_connections_that_come_at_once_make_no_more_than_there_may_be() -> None:
    async def fill() -> None:
        async with Running(http={"max_connections": 4, "idle_seconds": 3600}) as running:
            form: Any = running.server._http
            # The loop of the server is this one: it accepts them all in one round.
            waiting = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(40)]
            _, last = await running.open(b"")
            assert await becomes(lambda: len(form._runner.server.connections) <= 4)
            last.transport.abort()
            for one in waiting:
                one.close()

    asyncio.run(fill())


def test_no_room_is_made_of_requests_at_work() -> None:
    async def fill() -> None:
        async with Running(http={"max_connections": 2}) as running:
            busy = [await running.open(post(1000) + b" " * 100) for _ in range(2)]
            assert await becomes(lambda: running.taken == 200)
            reader, turned = await running.open(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
            with suppress(ConnectionResetError):  # as good as closed
                assert await reader.read() == b""
            assert running.taken == 200
            for writer in (turned, *(writer for _, writer in busy)):
                writer.transport.abort()

    asyncio.run(fill())


def test_bytes_that_are_no_http_are_refused_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    async def send() -> bytes:
        async with Running() as running:
            reader, writer = await running.open(b"\x16\x03\x01\x00\xff" * 20 + b"\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(send()).split()[1] == b"400"
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_about_to_stop_is_not_ready_and_answers_what_came() -> None:
    async def stop() -> list[int]:
        async with Running() as running:
            running.server.announce_stop()
            found = [
                (await asyncio.to_thread(ask, running.port, *request))[0]
                for request in (
                    ("GET", "/v2/health/live"),
                    ("GET", "/v2/health/ready"),
                    ("GET", "/v2/models/positions/ready"),
                    ("POST", "/v2/models/positions/infer", {"inputs": [LENGTHS]}),
                )
            ]
            body = json.dumps({"inputs": [LENGTHS]}).encode()
            reader, writer = await running.open(post(len(body)) + body[:-1])
            assert await becomes(lambda: running.taken > 0)
            stopping = asyncio.create_task(running.server.stop(30))
            await asyncio.sleep(0.1)
            writer.write(body[-1:])
            found.append(int((await reader.readline()).split()[1]))
            writer.close()
            await stopping
            with pytest.raises(ConnectionRefusedError):
                await running.open(b"")
            return found

    assert asyncio.run(stop()) == [200, 503, 503, 200, 200]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_program_serves_http_on_the_port_that_is_named(tmp_path: Path, workers: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "mmpos_server", "--port", "0", "--http-port", str(port), "--workers", workers]
    pipes: dict[str, Any] = {"text": True, "stderr": subprocess.PIPE, "env": without_torch(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **pipes) as process:
        try:
            assert process.stdout is not None
            places = [process.stdout.readline().split()[-1] for _ in range(1 if workers == "2" else 2)]
            assert places[1:] == ([f"http://127.0.0.1:{port}"] if workers == "1" else [])
            assert ask(port, "POST", "/v2/models/positions/infer", {"inputs": [LENGTHS]})[0] == 200
            second = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=False, **pipes)
            message = f"http-port: got {port}, which is taken on 127.0.0.1, want a free one (0 picks one)"
            assert (second.returncode, second.stderr) == (2, f"mmpos_server: error: {message}\n")
        finally:
            process.terminate()
            process.communicate()
    assert process.returncode == 0


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"http-port: got {port}, which is taken on 127.0.0.1"):
            asyncio.run(Server(config(), Listen(http_port=port)).start())


def test_tls_is_that_of_the_server(tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    port = free_port()

    def ask_with(context: ssl.SSLContext) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status
        finally:
            connection.close()

    with running(config(), listen=Listen(tls=Tls(cert, key, client_ca=cert), http_port=port)):
        known = ssl.create_default_context(cafile=cert)
        known.load_cert_chain(cert, key)
        assert ask_with(known) == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask_with(ssl.create_default_context(cafile=cert))


def test_elements_of_bytes_travel_in_json(places: tuple[str, int]) -> None:
    body: dict[str, Any] = {"inputs": [number("parts", ["é", "c"], "BYTES")], "outputs": [{"name": "input_ids"}]}
    code, told, _ = ask(places[1], "POST", "/v2/models/sequences/infer", body)
    assert (code, told["outputs"][0]["data"]) == (200, list("éc".encode()))
    framed = b"".join(struct.pack("<I", len(one)) + one for one in ("é".encode(), b"c"))
    body["inputs"][0].pop("data")
    body["inputs"][0]["parameters"] = {"binary_data_size": len(framed)}
    head = json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    assert ask(places[1], "POST", "/v2/models/sequences/infer", head + framed, headers)[:2] == (code, told)
