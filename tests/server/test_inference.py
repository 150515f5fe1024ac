"""Test the Open Inference Protocol with Triton's client: descriptors, readiness, metadata, streams and statistics."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from open_inference import TritonClient, ask, config, input_tensor
from tritonclient.grpc import model_config_pb2, service_pb2

from mmpos import Grid, SegmentTable, place
from mmpos_server.app import Server
from mmpos_server.config import Profiles, ServerConfig
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference import rotate
from mmpos_server.inference.methods import SERVICE, OpenInference
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.testing import running

SPANS: dict[str, Any] = {"lengths": [11], "offsets": [3], "grid_thw": [[1, 2, 3]]}


# Compatibility with Triton's client


def fields_of(message: Any) -> dict[str, Any]:
    """Return the number, type and oneof of each field in a message type and its nested types, by full name."""
    result = {
        f"{message.full_name}.{field.name}": (
            field.number,
            field.type,
            field.is_repeated,
            getattr(field.message_type or field.enum_type, "full_name", None),
            field.containing_oneof and field.containing_oneof.name,
        )
        for field in message.fields
    }
    for nested in message.nested_types:
        result |= fields_of(nested)
    return result


KSERVE = {"properties": 6, "PropertiesEntry.key": 1, "PropertiesEntry.value": 2}
"""Field numbers of a map from strings to strings in KServe's ModelMetadataResponse, which Triton lacks."""


def test_every_field_and_enum_value_matches_its_counterpart_in_triton() -> None:
    theirs: dict[str, Any] = {}
    enums: dict[str, int] = {}
    for file in (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR):
        for message in file.message_types_by_name.values():
            theirs |= fields_of(message)
        for enum in file.enum_types_by_name.values():
            enums |= {f"{enum.full_name}.{value.name}": value.number for value in enum.values}
    ours: dict[str, Any] = {}
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        ours |= fields_of(message)
    assert len(ours) > 100
    assert {name: ours.pop(f"inference.ModelMetadataResponse.{name}")[0] for name in KSERVE} == KSERVE
    assert {name: (field, theirs.get(name)) for name, field in ours.items() if theirs.get(name) != field} == {}
    [data_type] = pb.DESCRIPTOR.enum_types_by_name.values()
    values = {f"{data_type.full_name}.{value.name}": value.number for value in data_type.values}
    assert values == {name: number for name, number in enums.items() if name.startswith("inference.DataType.")}


def test_every_method_matches_its_counterpart_in_triton() -> None:
    def methods(file: Any) -> dict[str, Any]:
        return {
            method.name: (
                method.input_type.full_name,
                method.output_type.full_name,
                method.client_streaming,
                method.server_streaming,
            )
            for method in file.services_by_name["GRPCInferenceService"].methods
        }

    ours, theirs = methods(pb.DESCRIPTOR), methods(service_pb2.DESCRIPTOR)
    assert ours == {name: theirs[name] for name in ours}
    served = OpenInference([], Profiles.from_config(config()), config().limits, SharedMemory()).methods()
    names = {name for method in served for name in (method.name, method.twin and method.twin.name) if name}
    assert names == set(ours)
    assert {method.name for method in served if not method.admitted} == {"ServerLive", "ServerReady", "ModelReady"}


IMPORTS = {
    "theirs": "import tritonclient.grpc as triton",
    "ours": "from mmpos_server.inference import open_inference_pb2 as pb\nfrom mmpos.client import Client",
}
BOTH = """
import sys
from mmpos import SegmentTable
import numpy as np

lengths = triton.InferInput("lengths", [1], "INT64")
lengths.set_data_from_numpy(np.array([3]))
with triton.InferenceServerClient(sys.argv[1]) as theirs, Client(sys.argv[1]) as ours:
    result = theirs.infer("positions", [lengths]).get_response()
    table = ours.place(SegmentTable.from_spans([3], [], np.empty((0, 3), int)))
response = pb.ModelInferResponse.FromString(result.SerializeToString())
ids = np.frombuffer(response.raw_output_contents[0], "<i4")
print(ids.tolist() == table.dense().ravel().tolist(), response.model_name)
"""


@pytest.mark.parametrize("order", [("theirs", "ours"), ("ours", "theirs")], ids=["theirs first", "ours first"])
def test_both_clients_work_in_one_process(address: str, order: tuple[str, str]) -> None:
    script = "\n".join([*(IMPORTS[name] for name in order), BOTH])
    command = [sys.executable, "-W", "error", "-c", script, address]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (completed.stdout, completed.stderr) == ("True positions\n", "")


# Readiness.


def test_only_known_models_and_versions_are_ready(client: TritonClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    ready = {
        (name, version): client.is_model_ready(name, version)
        for name in ("positions", "sequences", "rotate", "nothing")
        for version in ("", "halves", "nothing")
    }
    assert ready == {
        (name, version): name != "nothing" and version != "nothing"
        for name in ("positions", "sequences", "rotate", "nothing")
        for version in ("", "halves", "nothing")
    }


def test_models_that_need_torch_are_not_ready_without_it(client: TritonClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotate, "has_torch", lambda: False)
    assert [client.is_model_ready(name) for name in ("rotate", "positions")] == [False, True]


def test_a_server_that_is_about_to_stop_is_live_but_not_ready() -> None:
    server = Server(config())
    (address,) = server.start()
    try:
        with triton.InferenceServerClient(address) as client:
            server.announce_stop()
            results = [client.is_server_live(), client.is_server_ready(), client.is_model_ready("positions")]
    finally:
        server.stop(None)
    assert results == [True, False, False]


# Metadata.


def test_the_server_lists_its_models_and_extensions(client: TritonClient) -> None:
    served = client.get_server_metadata()
    offered = ["model_configuration", "parameters", "statistics"]
    assert (served.name, served.version, list(served.extensions)) == (
        "mmpos",
        metadata.version("multimodal-positions"),
        offered,
    )


@pytest.mark.parametrize("model", ["positions", "sequences", "rotate"])
@pytest.mark.parametrize("version", ["", "halves", "flat"])
def test_configuration_and_metadata_agree(client: TritonClient, model: str, version: str) -> None:
    shown, config = client.get_model_metadata(model, version), client.get_model_config(model, version).config
    names = {value.number: value.name for value in model_config_pb2.DataType.DESCRIPTOR.values}
    for tensors, configured in ((shown.inputs, config.input), (shown.outputs, config.output)):
        assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in tensors] == [
            (tensor.name, names[tensor.data_type].removeprefix("TYPE_").replace("STRING", "BYTES"), list(tensor.dims))
            for tensor in configured
        ]
    assert (config.name, config.platform, config.backend, config.max_batch_size) == (model, "mmpos", "mmpos", 0)
    assert (shown.name, shown.platform, list(shown.versions)) == (model, "mmpos", ["default", "halves", "flat"])
    assert config.HasField("model_transaction_policy")
    assert not config.model_transaction_policy.decoupled


VALUES: dict[str, object] = {
    "lengths": [4],
    "offsets": [1],
    "grid_thw": [[1, 1, 2]],
    "parts": [b"a", b"bc"],
    "kinds": [b"text", b"text"],
    "parts_per_document": [1, 1],
    "q": np.ones((2, 1, 16), np.float32),
    "k": np.ones((2, 1, 16), np.float32),
}
OMITTED = {
    "positions": {
        "documents",
        "input_ids",
        "image_grid_thw",
        "video_grid_thw",
        "attention_mask",
        "cu_seqlens",
        "start",
    },
    "sequences": set[str](),
    "rotate": {"table", "table_documents"},
}


# The scheme of "flat" cannot place text, so "sequences" is not tested, and "positions" receives an image.
@pytest.mark.parametrize(
    ("model", "version"),
    [
        (model, version)
        for model in OMITTED
        for version in ("", "halves", "flat")
        if (model, version) != ("sequences", "flat")
    ],
)
def test_models_match_their_metadata(client: TritonClient, model: str, version: str) -> None:
    described = client.get_model_metadata(model, version)
    if model == "rotate" and version:
        parameters = {"rotary": json.dumps({"head_dim": 16, "axes": 3 if version == "halves" else 2})}
    else:
        parameters = None
    inputs = []
    for tensor in described.inputs:
        if tensor.name not in OMITTED[model]:
            axes = 3 if version == "halves" else 2
            value = VALUES.get(tensor.name, np.zeros((axes, 2), np.float64 if tensor.datatype == "FP64" else np.int32))
            value = {"lengths": [2], "offsets": [0]}.get(tensor.name, value) if version == "flat" else value
            inputs.append(input_tensor(tensor.name, value, tensor.datatype))
    result = client.infer(model, inputs, version, parameters=parameters).get_response()
    assert [(output.name, output.datatype) for output in result.outputs] == [
        (output.name, output.datatype) for output in described.outputs
    ]
    for actual, output in zip(result.outputs, described.outputs, strict=True):
        assert len(actual.shape) == len(output.shape)
        assert all(want in (-1, got) for got, want in zip(actual.shape, output.shape, strict=True)), actual.name


# Requests.


def test_versions_are_profiles_and_the_first_is_the_default(client: TritonClient) -> None:
    image = {"lengths": [6], "offsets": [0], "grid_thw": [[1, 2, 3]]}
    for version, scheme in (("", "rope-tie"), ("default", "rope-tie"), ("flat", "grid-2d")):
        response = client.infer("positions", [input_tensor(name, values) for name, values in image.items()], version)
        ids = place(SegmentTable.from_documents([[Grid(2, 3)]]), scheme).dense()
        assert response.as_numpy("position_ids").tolist() == ids.tolist()
        assert response.get_response().model_version == (version or "default")


def test_a_response_carries_the_id_of_its_request(client: TritonClient) -> None:
    assert client.infer("positions", [input_tensor("lengths", [1])], request_id="a b").get_response().id == "a b"
    assert client.infer("positions", [input_tensor("lengths", [1])]).get_response().id == ""


def test_only_the_requested_outputs_are_returned_in_the_requested_order(client: TritonClient) -> None:
    assert list(ask(client, "positions", SPANS, ["deltas", "position_ids"])) == ["deltas", "position_ids"]


def test_a_stream_answers_in_order_including_errors(address: str) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(8):
            bad = i == 3
            inputs = [input_tensor("lengths", [0 if bad else i + 1])]
            client.async_stream_infer("positions", inputs, request_id=str(i), enable_empty_final_response=i == 5)
        results = [answers.get(timeout=60) for _ in range(8)]
        client.stop_stream()
    for i, (result, error) in enumerate(results):
        if i == 3:
            assert error.message() == "lengths[0]: got 0, want >= 1"
            continue
        response = result.get_response()
        assert (error, response.id, response.parameters["triton_final_response"].bool_param) == (None, str(i), True)
        assert result.as_numpy("position_ids").tolist() == [list(range(i + 1))] * 2


def test_an_error_in_a_stream_carries_the_id_of_its_request(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        kinds = pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
        stream: Any = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer", *kinds)
        [result] = stream(iter([pb.ModelInferRequest(model_name="sequences", id="7")]))
    message = "missing input tensor 'parts'"
    assert result == pb.ModelStreamInferResponse(error_message=message, infer_response=pb.ModelInferResponse(id="7"))


# Statistics.


def test_statistics_count_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmpos_server.inference.methods.time", lambda: 1234.5)
    with running(config()) as address, triton.InferenceServerClient(address) as client:

        def statistics(model: str, version: str) -> Any:
            [numbers] = client.get_inference_statistics(model, version).model_stats
            return numbers

        assert statistics("positions", "halves") == service_pb2.ModelStatistics(
            name="positions",
            version="halves",
            inference_stats={
                field.name: {} for field in pb.InferStatistics.DESCRIPTOR.fields if not field.name.startswith("cache")
            },
        )
        for _ in range(2):
            client.infer("positions", [input_tensor("lengths", [3, 200_000])], "halves")
        with pytest.raises(triton.InferenceServerException):
            client.infer("positions", [input_tensor("lengths", [0])], "halves")
        with pytest.raises(triton.InferenceServerException):
            client.infer("positions", [input_tensor("nothing", [0])], "halves")
        numbers = statistics("positions", "halves")
        assert (numbers.inference_count, numbers.execution_count) == (4, 2)
        assert numbers.last_inference == 1_234_500
        times = numbers.inference_stats
        parts = (times.queue, times.compute_input, times.compute_infer, times.compute_output)
        assert [part.count for part in (times.success, times.fail, *parts)] == [2] * 6
        assert all(part.ns > 0 for part in parts)
        assert times.success.ns >= sum(part.ns for part in parts) > 0 < times.fail.ns
        client.infer("sequences", [input_tensor("parts", [b"a"])])
        assert statistics("sequences", "default").inference_count == 1
        everything = client.get_inference_statistics().model_stats
        assert [(entry.name, entry.version) for entry in everything] == [
            (model, version)
            for model in ("sequences", "positions", "rotate")
            for version in ("default", "halves", "flat")
        ]
        assert [entry.execution_count for entry in everything] == [1, 0, 0, 0, 2, 0, 0, 0, 0]


def test_only_large_requests_wait_for_a_thread(client: TritonClient) -> None:
    def waited(inputs: dict[str, object], *outputs: str) -> bool:
        [before] = client.get_inference_statistics("positions", "default").model_stats
        ask(client, "positions", inputs, outputs, parameters={"scheme": "mrope"})
        [after] = client.get_inference_statistics("positions", "default").model_stats
        assert after.inference_count == before.inference_count + 1
        return bool(after.inference_stats.queue.ns > before.inference_stats.queue.ns)

    image = {"lengths": [20_000], "offsets": [0], "grid_thw": [[20_000, 1, 1]]}
    assert not waited({"lengths": [3]}, "position_ids")
    assert not waited({"lengths": [400_000]}, "cu_seqlens")
    assert waited({"lengths": [400_000]}, "position_ids")  # the output is large
    assert waited(image, "cu_seqlens")  # the placement is large
    assert waited({"input_ids": np.zeros(40_000, np.int64)}, "cu_seqlens")  # the input is large


# Load.


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("perf_analyzer") is None, reason="perf_analyzer is not on the path")
@pytest.mark.parametrize("flags", [[], ["--streaming", "-a"]], ids=["unary", "stream"])
def test_perf_analyzer_measures_a_model(tmp_path: Path, flags: list[str]) -> None:
    data = {
        name: {"content": np.ravel(values).tolist(), "shape": list(np.shape(values))} for name, values in SPANS.items()
    }
    (tmp_path / "data.json").write_text(json.dumps({"data": [data]}))
    # perf_analyzer reads versions as numbers. Timings may vary freely: the test checks answers, not speed.
    with running(ServerConfig.model_validate({"profiles": {"1": {"images": {"backend": "pillow"}}}})) as address:
        words = f"-m positions -u {address} -i grpc --input-data data.json --measurement-interval 500 -s 1000 -r 4"
        command = ["perf_analyzer", *words.split(), *flags, "--concurrency-range", "2"]
        completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        [answered] = re.findall(r"Successful request count: (\d+)", completed.stdout)
        with triton.InferenceServerClient(address) as client:
            [numbers] = client.get_inference_statistics("positions", "1").model_stats
    assert 0 < int(answered) <= numbers.inference_count
