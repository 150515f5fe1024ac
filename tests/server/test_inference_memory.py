"""Test the Open Inference Protocol with tensors in shared memory, using Triton's client and its regions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from open_inference import TritonClient, ask, config, input_tensor, refusal
from tritonclient.utils import serialize_byte_tensor

from mmpos import SegmentTable, place
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.testing import running

LIMIT = 4096
SEGMENTS = SegmentTable.from_spans([11], [3], [[1, 2, 3]])
NUMBERS = {"lengths": np.array([11]), "offsets": np.array([3]), "grid_thw": np.array([[1, 2, 3]])}


MakeRegion = Callable[..., object]


@pytest.fixture(scope="module")
def client() -> Iterator[TritonClient]:
    settings = config(limits={"shared_bytes": LIMIT})
    with (
        running(settings, shared_memory=SharedMemory("mmpos-test-")) as address,
        triton.InferenceServerClient(address) as client,
    ):
        yield client


@pytest.fixture
def region(client: TritonClient) -> Iterator[MakeRegion]:
    """Yield a function that creates an object with Triton's client and registers it under a name."""
    with ExitStack() as stack:
        stack.callback(client.unregister_system_shared_memory)

        def make(name: str, byte_size: int, values: list[object] | None = None, *, offset: int = 0) -> object:
            key = f"/mmpos-test-{os.getpid()}-{name}"
            handle = shm.create_shared_memory_region(name, key, byte_size)
            stack.callback(shm.destroy_shared_memory_region, handle)
            if values:
                shm.set_shared_memory_region(handle, values)
            client.register_system_shared_memory(name, key, byte_size - offset, offset)
            return handle

        yield make


def shared_input(name: str, datatype: str, shape: list[int], region: str, byte_size: int, offset: int = 0) -> Any:
    """Return an input that is stored in a shared memory region."""
    tensor = triton.InferInput(name, shape, datatype)
    tensor.set_shared_memory(region, byte_size, offset)
    return tensor


def shared_output(name: str, region: str, byte_size: int, offset: int = 0) -> Any:
    """Return a requested output that the server writes to a shared memory region."""
    output = triton.InferRequestedOutput(name)
    output.set_shared_memory(region, byte_size, offset)
    return output


def test_inputs_are_read_from_regions_and_outputs_are_written_to_them(client: TritonClient, region: MakeRegion) -> None:
    region("in", 64, list(NUMBERS.values()))
    out = region("out", 256)
    inputs = [
        shared_input("lengths", "INT64", [1], "in", 8),
        input_tensor("offsets", NUMBERS["offsets"]),
        shared_input("grid_thw", "INT64", [1, 3], "in", 24, offset=16),
    ]
    outputs = [
        shared_output("position_ids", "out", 100, 16),
        triton.InferRequestedOutput("deltas"),
        shared_output("cu_seqlens", "out", 8),
    ]
    result = client.infer("positions", inputs, outputs=outputs)
    response = result.get_response()
    wanted = place(SEGMENTS)
    assert [output.name for output in response.outputs] == ["deltas", "position_ids", "cu_seqlens"]
    assert result.as_numpy("deltas").tolist() == wanted.deltas.tolist()
    assert list(response.raw_output_contents) == [wanted.deltas.astype("<i8").tobytes()]
    parameters = dict(response.outputs[1].parameters)
    assert {name: value.string_param or value.int64_param for name, value in parameters.items()} == {
        "shared_memory_region": "out",
        "shared_memory_byte_size": 88,
        "shared_memory_offset": 16,
    }
    ids = shm.get_contents_as_numpy(out, np.int32, list(response.outputs[1].shape), 16)
    np.testing.assert_array_equal(ids, wanted.dense(), strict=True)
    assert shm.get_contents_as_numpy(out, np.int32, [2], 0).tolist() == [0, 11]


def test_a_region_begins_at_its_registered_offset(client: TritonClient, region: MakeRegion) -> None:
    handle = region("in", 64, [np.array([9, 7])], offset=8)
    result = client.infer("positions", [shared_input("lengths", "INT64", [1], "in", 8)])
    assert result.as_numpy("cu_seqlens").tolist() == [0, 7]
    shm.set_shared_memory_region(handle, [np.array([9, 5])])
    result = client.infer("positions", [shared_input("lengths", "INT64", [1], "in", 8)])
    assert result.as_numpy("cu_seqlens").tolist() == [0, 5]


def test_parts_and_rotations_use_regions(client: TritonClient, region: MakeRegion) -> None:
    region("parts", 64, [serialize_byte_tensor(np.array([b"ab", b"c"], object))])
    parts = shared_input("parts", "BYTES", [2], "parts", 11)
    response = client.infer("sequences", [parts], outputs=[triton.InferRequestedOutput("input_ids")])
    assert response.as_numpy("input_ids").tolist() == list(b"abc")
    q = np.random.default_rng(3).standard_normal((2, 1, 16)).astype(np.float32)
    handle = region("q", 256, [q])
    ids = input_tensor("position_ids", np.array([[0, 1], [0, 1]]))
    client.infer(
        "rotate", [shared_input("q", "FP32", [2, 1, 16], "q", 128), ids], outputs=[shared_output("q", "q", 128)]
    )
    wanted = ask(client, "rotate", {"q": q, "position_ids": np.array([[0, 1], [0, 1]])})["q"]
    np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [2, 1, 16]), wanted)


def test_regions_are_listed_and_unregistered(client: TritonClient, region: MakeRegion) -> None:
    region("a", 64, offset=8)
    region("b", 32)

    def regions(name: str = "") -> dict[str, object]:
        result = client.get_system_shared_memory_status(name).regions
        return {
            name: (status.name, status.key.rpartition("-")[2], status.offset, status.byte_size)
            for name, status in result.items()
        }

    assert regions() == {"a": ("a", "a", 8, 56), "b": ("b", "b", 0, 32)}
    assert regions("b") == {"b": ("b", "b", 0, 32)}
    client.unregister_system_shared_memory("a")
    assert regions() == {"b": ("b", "b", 0, 32)}
    assert refusal(lambda: regions("a")) == ("INVALID_ARGUMENT", "name: got region 'a', want a registered region")
    client.unregister_system_shared_memory()
    assert regions() == {}


REFUSED = {
    "an unknown region": (
        shared_input("lengths", "INT64", [1], "x", 8),
        "inputs[0].parameters['shared_memory_region']: got region 'x', want a registered region",
    ),
    "bytes of another shape": (
        shared_input("lengths", "INT64", [1], "in", 16),
        "lengths: got 16 bytes, want 8 for INT64 of shape (1,)",
    ),
    "bytes after the region": (
        shared_input("lengths", "INT64", [1], "in", 8, 60),
        "inputs[0]: got bytes 60 to 68, want 0 to 64 of its region",
    ),
    "bytes before the region": (
        shared_input("lengths", "INT64", [1], "in", 8, -8),
        "inputs[0]: got bytes -8 to 0, want 0 to 64 of its region",
    ),
}


@pytest.mark.parametrize(("tensor", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_inputs_are_refused(client: TritonClient, region: MakeRegion, tensor: object, message: str) -> None:
    region("in", 64)
    assert refusal(lambda: client.infer("positions", [tensor])) == ("INVALID_ARGUMENT", message)


def test_incomplete_references_and_references_with_contents_are_refused(
    client: TritonClient, region: MakeRegion
) -> None:
    region("in", 64)
    incomplete, both = (shared_input("lengths", "INT64", [1], "in", 8) for _ in range(2))
    del incomplete._get_tensor().parameters["shared_memory_byte_size"]
    both._get_tensor().contents.int64_contents.append(1)
    for tensor, message in (
        (incomplete, "inputs[0].parameters: shared_memory_region requires shared_memory_byte_size"),
        (both, "lengths: contents cannot be combined with shared memory"),
    ):
        assert refusal(partial(client.infer, "positions", [tensor])) == ("INVALID_ARGUMENT", message)


def test_bytes_in_shared_memory_are_limited(client: TritonClient, region: MakeRegion) -> None:
    region("in", 2 * LIMIT)
    status, message = refusal(
        lambda: client.infer("positions", [shared_input("lengths", "INT64", [513], "in", LIMIT + 8)])
    )
    assert (status, message.partition(":")[0]) == ("RESOURCE_EXHAUSTED", "shared_bytes")


def test_nothing_is_written_if_one_output_does_not_fit(client: TritonClient, region: MakeRegion) -> None:
    handle = region("out", 256, [np.full(64, 7, np.int32)])
    outputs = [shared_output("cu_seqlens", "out", 8), shared_output("position_ids", "out", 80, 16)]
    inputs = [input_tensor(name, values) for name, values in NUMBERS.items()]
    message = "position_ids: got shared_memory_byte_size 80, want >= 88"
    assert refusal(lambda: client.infer("positions", inputs, outputs=outputs)) == ("INVALID_ARGUMENT", message)
    assert shm.get_contents_as_numpy(handle, np.int32, [64]).tolist() == [7] * 64
    outputs = [shared_output("position_ids", "out", 88, 200)]
    message = "outputs[0]: got bytes 200 to 288, want 0 to 256 of its region"
    assert refusal(lambda: client.infer("positions", inputs, outputs=outputs)) == ("INVALID_ARGUMENT", message)


def test_a_server_lists_shared_memory_only_if_it_accepts_it(client: TritonClient) -> None:
    assert "system_shared_memory" in client.get_server_metadata().extensions
    with running(config()) as address, triton.InferenceServerClient(address) as other:
        message = "region: shared memory requires a server started with --shared-memory"
        assert refusal(lambda: other.register_system_shared_memory("a", "/mmpos-x", 8)) == ("UNIMPLEMENTED", message)
        assert "system_shared_memory" not in other.get_server_metadata().extensions
        assert other.get_system_shared_memory_status(as_json=True) == {}


def test_gpu_memory_is_refused(client: TritonClient) -> None:
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("a")
    assert client.get_cuda_shared_memory_status(as_json=True) == {}
    assert refusal(lambda: client.get_cuda_shared_memory_status("a")) == (
        "INVALID_ARGUMENT",
        "name: got region 'a', want a registered region",
    )
    assert refusal(lambda: client.register_cuda_shared_memory("a", b"aGFuZGxl", 0, 64)) == (
        "UNIMPLEMENTED",
        "region: GPU memory is not supported, want system shared memory",
    )
    assert "cuda_shared_memory" not in client.get_server_metadata().extensions
