"""Test tensors in shared memory through a real server: inputs, outputs and refusals."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from message_strategies import tensor
from shared_objects import PREFIX, SHRINK, content, names, sealed, shared
from victim import Answer, Victim
from waiting import eventually

from mmpos.client import Client
from mmpos.errors import InvalidInputError
from mmpos.rpc.errors import OUTPUT_BYTES, OutputError
from mmpos.rpc.v1 import info_pb2, positions_pb2, rotary_pb2, sequences_pb2, table_pb2, tensor_pb2
from mmpos_server.__main__ import main
from mmpos_server.admission import Admission
from mmpos_server.app import Server
from mmpos_server.call import Call
from mmpos_server.config import Limits, Profiles, load
from mmpos_server.exchange import Exchange, claimed, mentions
from mmpos_server.listening import Listen
from mmpos_server.position_service import PositionService
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.testing import running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the test looks for objects where Linux keeps them")

IDS = [1, 2, *[9] * 4, 3]
Q = np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32)
POSITIONS = rotary_pb2.RotaryPositions(ids=tensor([[0, 1, 2, 3]] * 2))


@pytest.fixture(scope="module")
def server(hardy: Victim) -> Victim:
    return hardy


@pytest.fixture(scope="module")
def plain_server() -> Iterator[Victim]:
    with running(load()) as address:
        yield Victim(None, address)


def shared_tensor(array: Any, where: str, offset: int = 0, **fields: Any) -> tensor_pb2.Tensor:
    """Return the message for an array in shared memory."""
    message = tensor(array, array.dtype.name)
    message.ClearField("data")
    part: dict[str, Any] = {"key": where, "offset": offset, "byte_size": array.nbytes, **fields}
    message.shared.CopyFrom(tensor_pb2.SharedMemory(**part))
    return message


def place(ids: tensor_pb2.Tensor, **query: Any) -> Any:
    source = positions_pb2.InputIds(
        input_ids=ids, placeholders=table_pb2.Placeholders(image=9), image_grid_thw=[1, 2, 2], spatial_merge_size=1
    )
    return positions_pb2.PlaceRequest(query=positions_pb2.PositionsQuery(input_ids=source, **query))


def rotate(q: tensor_pb2.Tensor, **fields: Any) -> Any:
    rotary = rotary_pb2.RotarySettings(rotary=rotary_pb2.Rotary(head_dim=8))
    return rotary_pb2.RotateRequest(q=q, positions=POSITIONS, rotary=rotary, **fields)


def output(key: str, byte_size: int, offset: int = 0) -> dict[str, object]:
    return {"output": {"key": key, "offset": offset, "byte_size": byte_size}}


def opened(server: Victim) -> list[str]:
    """Return the shared memory objects that a server has open."""
    results = []
    for path in Path(f"/proc/{server.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            results.append(os.readlink(path))
    return [name for name in results if name.startswith(("/dev/shm/", f"/memfd:{PREFIX}"))]


def failed_call(server: Victim, method: str, request: Any) -> tuple[Answer, dict[str, object]]:
    """Return the answer and trailing metadata of a failing call."""
    with pytest.raises(grpc.RpcError) as raised:
        server.channel.unary_unary(f"/mmpos.rpc.v1.{method}")(request.SerializeToString(), timeout=60)
    error: Any = raised.value
    return Answer(error.code().name, error.details()), dict(error.trailing_metadata())


def test_the_server_reports_its_prefix_and_limit(server: Victim, plain_server: Victim) -> None:
    result, other = (
        info_pb2.GetInfoResponse.FromString(it.call("InfoService/GetInfo", b"").data) for it in (server, plain_server)
    )
    assert (result.shared_memory_prefix, result.limits.shared_bytes) == (PREFIX, 2**30)
    assert other.shared_memory_prefix == ""


def test_rotations_are_read_from_objects_and_written_to_them(server: Victim) -> None:
    k = Q[:, :1] * 2
    wanted = server.call("RotaryService/Rotate", rotate(tensor(Q, "float32"), k=tensor(k, "float32")))
    want = rotary_pb2.RotateResponse.FromString(wanted.data)
    with shared(Q.tobytes() + b"-" * 8 + k.tobytes()) as key, shared(b"." * 1000, "answer") as target:
        request = rotate(shared_tensor(Q, key), k=shared_tensor(k, key, Q.nbytes + 8), **output(target, 600, 100))
        rotated = rotary_pb2.RotateResponse.FromString(server.call("RotaryService/Rotate", request).data)
        # The 384 bytes of q are six times 64.
        places = [tensor_pb2.SharedMemory(key=target, offset=at, byte_size=n) for at, n in ((100, 384), (484, 128))]
        assert [rotated.q, rotated.k] == [
            tensor_pb2.Tensor(dtype=x.dtype, shape=x.shape, shared=at)
            for x, at in zip((want.q, want.k), places, strict=True)
        ]
        assert content(target) == b"." * 100 + want.q.data + want.k.data + b"." * 388
        assert content(key) == Q.tobytes() + b"-" * 8 + k.tobytes()
    assert names() == set()


LARGE = np.random.default_rng(2).standard_normal((4096, 3, 8)).astype(np.float32)
LARGE_POSITIONS = rotary_pb2.RotaryPositions(ids=tensor(np.arange(4096, dtype=np.int32)[None].repeat(2, 0), "int32"))


def rotate_large(key: str, **fields: Any) -> Any:
    request = rotate(shared_tensor(LARGE, key), **fields)
    request.positions.CopyFrom(LARGE_POSITIONS)
    return request


@pytest.mark.parametrize("unaligned", [0, 4])
def test_a_rotation_reads_one_sealed_object_and_writes_another(server: Victim, unaligned: int) -> None:
    plain = rotate(tensor(LARGE, "float32"))
    plain.positions.CopyFrom(LARGE_POSITIONS)
    want = rotary_pb2.RotateResponse.FromString(server.call("RotaryService/Rotate", plain).data).q.data
    size, offset = LARGE.nbytes, 64 + unaligned
    with sealed(bytes(offset) + LARGE.tobytes() * 2) as (key, _), sealed(b"." * (size + 200), "answer") as (target, to):
        request = rotate_large(key, **output(target, size + 72, offset))
        request.q.shared.offset = offset
        for _ in range(2):
            rotated = rotary_pb2.RotateResponse.FromString(server.call("RotaryService/Rotate", request).data)
        assert rotated.q.shared == tensor_pb2.SharedMemory(key=target, offset=offset, byte_size=size)
        assert os.pread(to, size + 200, 0) == b"." * offset + want + b"." * (200 - offset)
        assert server.call("RotaryService/Rotate", rotate_large(key)).status == "OK"  # the result is in the message
        # Clients' objects leave no trace in the server.
        assert eventually(lambda: not opened(server) and f"memfd:{PREFIX}" not in mapped(server)), mapped(server)


@pytest.mark.parametrize("seals", [0, SHRINK])
def test_a_client_that_shrinks_its_objects_during_a_call_does_no_harm(server: Victim, seals: int) -> None:
    asking, refused = True, 0

    def shrink(descriptors: list[int]) -> int:
        shrinks = 0
        while asking:
            for descriptor in descriptors:
                with suppress(PermissionError):
                    os.ftruncate(descriptor, 4096)
                    shrinks += 1
                    os.ftruncate(descriptor, LARGE.nbytes)
        return shrinks

    with sealed(LARGE.tobytes(), "q", seals) as (key, q), sealed(LARGE.tobytes(), "answer", seals) as (target, to):
        request = rotate_large(key, **output(target, LARGE.nbytes))
        with ThreadPoolExecutor() as threads:
            shrinking = threads.submit(shrink, [q, to])
            for _ in range(50):
                answer = server.call("RotaryService/Rotate", request)
                refused += answer.status == "INVALID_ARGUMENT"
                assert answer.status in ("OK", "INVALID_ARGUMENT"), answer
            asking = False
        if seals:
            assert (shrinking.result(), refused) == (0, 0)
    with shared(Q.tobytes()) as key:
        assert server.call("RotaryService/Rotate", rotate(shared_tensor(Q, key))).status == "OK"


def test_a_client_that_frees_its_memory_during_a_call_does_no_harm(server: Victim) -> None:
    size = LARGE.nbytes

    def ask() -> set[str]:
        request = rotate_large(key, **output(target, size))
        return {server.call("RotaryService/Rotate", request).status for _ in range(50)}

    with (
        sealed(LARGE.tobytes(), "q") as (key, q),
        sealed(LARGE.tobytes(), "answer") as (target, to),
        mmap.mmap(q, size) as one,
        mmap.mmap(to, size) as two,
        ThreadPoolExecutor() as threads,
    ):
        asking = threads.submit(ask)
        while not asking.done():
            one.madvise(mmap.MADV_REMOVE)
            two.madvise(mmap.MADV_REMOVE)
        assert asking.result() == {"OK"}


def mapped(server: Victim) -> str:
    return Path(f"/proc/{server.pid}/maps").read_text()


def test_the_tensors_of_an_answer_begin_at_multiples_of_64(server: Victim) -> None:
    image = np.random.default_rng(1).integers(0, 256, (28, 28, 3), np.uint8)
    plain = sequences_pb2.BuildRequest()
    plain.query.patches = True
    for _ in range(2):
        parts = plain.query.documents.add().parts
        parts.add(text="abc")
        parts.add(pixels=tensor(image, "uint8"))
    want = sequences_pb2.BuildResponse.FromString(server.call("SequenceService/Build", plain).data).sequences.results
    with shared(image.tobytes()) as key, shared(bytes(20_000), "answer") as target:
        request = sequences_pb2.BuildRequest.FromString(plain.SerializeToString())
        for document in request.query.documents:
            document.parts[1].pixels.CopyFrom(shared_tensor(image, key))
        request.query.output.CopyFrom(tensor_pb2.SharedMemory(key=target, byte_size=20_000))
        answer = server.call("SequenceService/Build", request)
        result = sequences_pb2.BuildResponse.FromString(answer.data).sequences.results
        written = content(target)
    offsets = []
    for one, other in zip(result, want, strict=True):
        for name in ("input_ids", "patches"):
            got = getattr(one.sequence, name)
            offsets.append(got.shared.offset)
            got.data = written[got.shared.offset :][: got.shared.byte_size]
            got.ClearField("shared")
        assert one == other
    # Each sequence contains nine four-byte ids and 16 patches of 14 by 14 pixels.
    assert offsets == [0, 64, 9472, 9536]


def test_an_answer_that_does_not_fit_is_refused_with_the_number_of_bytes_it_needs(server: Victim) -> None:
    q = tensor(Q, "float32")
    tables = rotary_pb2.CosSinRequest(positions=POSITIONS, rotary=rotate(q).rotary)
    tables.layout = rotary_pb2.COS_SIN_LAYOUT_TRANSFORMERS
    ids = place(tensor(IDS), dense={})
    with shared(b"." * 64) as key:
        small = tensor_pb2.SharedMemory(key=key, byte_size=10)
        ids.query.output.CopyFrom(small)
        tables.output.CopyFrom(small)
        for method, request, needed, name in (
            ("RotaryService/Rotate", rotate(q, k=q, output=small), 768, "output"),
            ("RotaryService/CosSin", tables, 128, "output"),
            ("PositionService/Place", ids, 56, "query.output"),
        ):
            answer, trailing = failed_call(server, method, request)
            want = f"{name}.byte_size: got 10, want >= {needed} for the answer"
            assert answer == Answer("INVALID_ARGUMENT", want)
            assert trailing[OUTPUT_BYTES] == str(needed)
        assert content(key) == b"." * 64


def test_an_output_is_refused_after_the_work_if_its_required_size_is_known_only_then(server: Victim) -> None:
    request = sequences_pb2.BuildRequest(query={"documents": [{"parts": [{"text": "a" * 100}]}] * 2})  # type: ignore[arg-type]
    with shared(bytes(500)) as key:
        request.query.output.CopyFrom(tensor_pb2.SharedMemory(key=key, byte_size=500))
        answer, trailing = failed_call(server, "SequenceService/Build", request)
    assert answer == Answer("INVALID_ARGUMENT", "query.output.byte_size: got 500, want >= 848 for the answer")
    assert trailing[OUTPUT_BYTES] == "848"


REFUSALS: dict[str, tuple[dict[str, object], str]] = {
    "data and shared memory": ({"data": b"x"}, "q.shared cannot be combined with data"),
    "too few bytes": (
        {"byte_size": 380},
        "q.shared.byte_size: got 380 bytes, want 384 for shape (4, 3, 8) with 4-byte numbers",
    ),
    "too many bytes": ({"byte_size": 2**60}, "shared_bytes: got 1152921504606846976, want at most 1073741824"),
    "an unknown object": ({"key": f"/{PREFIX}no"}, f"q.shared.key: got '/{PREFIX}no' (No such file or directory)"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS)
def test_an_invalid_reference_to_an_object_is_refused(server: Victim, change: dict[str, Any], message: str) -> None:
    with shared(Q.tobytes()) as key:
        fields = dict(change)
        data = fields.pop("data", b"")
        q = shared_tensor(Q, key, **fields)
        q.data = data
        answer = server.call("RotaryService/Rotate", rotate(q))
    status = "RESOURCE_EXHAUSTED" if message.startswith("shared_bytes") else "INVALID_ARGUMENT"
    assert (answer.status, answer.message[: len(message)]) == (status, message)


def test_a_server_without_shared_memory_names_the_shared_tensor_that_it_refuses(plain_server: Victim) -> None:
    with shared(Q.tobytes()) as key:
        target = output(key, 384)
        for request, name in ((rotate(shared_tensor(Q, key)), "q.shared"), (rotate(tensor(Q), **target), "output")):
            want = f"{name}: shared memory requires a server started with --shared-memory"
            assert plain_server.call("RotaryService/Rotate", request) == Answer("UNIMPLEMENTED", want)
        ids = plain_server.call("PositionService/Place", place(shared_tensor(np.array(IDS), key, byte_size=56)))
        assert (ids.status, ids.message[:31]) == ("UNIMPLEMENTED", "input_ids.shared: shared memory")


def test_one_invalid_document_does_not_affect_the_others(server: Victim) -> None:
    ids = np.array([1, 2], np.int32)
    with shared(ids.tobytes()) as key:
        parts: list[object] = [{"token_ids": shared_tensor(ids, at)} for at in (key, f"{key}x")]
        request = sequences_pb2.BuildRequest(query={"documents": [{"parts": [part]} for part in parts]})  # type: ignore[arg-type]
        answer = server.call("SequenceService/Build", request)
    first, second = sequences_pb2.BuildResponse.FromString(answer.data).sequences.results
    assert first.sequence.input_ids == tensor([1, 2], "int32")
    assert second.error.message.startswith(f"parts[0].token_ids.shared.key: got '{key}x' (No such file")


@pytest.mark.parametrize(("tokens", "threads"), [(2**15, 0), (2**15 + 1, 1)])
def test_large_tensors_in_shared_memory_are_read_in_a_pool_thread(tokens: int, threads: int) -> None:
    config = load()
    service = PositionService(Profiles.from_config(config), config.limits)
    pools = Admission(config.concurrency, config.clients)
    context: Any = SimpleNamespace(is_active=lambda: True)
    call, answer = Call("a", "a", pools, context), positions_pb2.Positions()
    array = np.array(IDS[:-1] + [3] * (tokens - 6))
    with shared(array.tobytes()) as key:
        call.memory = Exchange(SharedMemory(PREFIX))
        call.hold(array.nbytes)
        # The message is equally small in both cases.
        service.place(place(shared_tensor(array, key)).query, answer, call)
    assert answer.cu_seqlens == [0, tokens]
    assert [stage for stage, _ in call.stages].count("queue") == threads
    pools.close()


def test_each_stream_item_has_its_own_shared_memory(server: Victim) -> None:
    array = np.array(IDS)
    plain = place(tensor(IDS), dense={}).query
    want = positions_pb2.PlaceResponse.FromString(
        server.call("PositionService/Place", positions_pb2.PlaceRequest(query=plain)).data
    )
    with shared(array.tobytes()) as key, shared(bytes(64), "first") as one, shared(bytes(64), "second") as two:
        queries = [
            place(shared_tensor(array, key), dense={}, **output(at, size)).query for at, size in ((one, 64), (two, 9))
        ]
        queries.append(place(shared_tensor(array, key), dense={}, **output(two, 64)).query)
        items = [positions_pb2.StreamPlaceRequest(id=i, query=query) for i, query in enumerate(queries)]
        raw, end = server.stream("PositionService/StreamPlace", [item.SerializeToString() for item in items])
        results = [positions_pb2.StreamPlaceResponse.FromString(answer) for answer in raw]
        assert (end.status, [answer.WhichOneof("outcome") for answer in results]) == (
            "OK",
            ["positions", "error", "positions"],
        )
        assert results[1].error.message == "query.output.byte_size: got 9, want >= 56 for the answer"
        assert [content(at)[:56] for at in (one, two)] == [want.positions.dense.data] * 2


def test_no_object_stays_open(server: Victim) -> None:
    array = np.array(IDS)
    with shared(array.tobytes()) as key, shared(bytes(64), "answer") as target:
        wrong = place(shared_tensor(array, key, key=f"{key}x"), dense={}, **output(target, 64))
        requests = [place(shared_tensor(array, key), dense={}, **output(target, size)) for size in (64, 9)] + [wrong]
        items = [positions_pb2.StreamPlaceRequest(query=request.query).SerializeToString() for request in requests]
        for request in requests * 10:
            server.call("PositionService/Place", request)
        server.stream("PositionService/StreamPlace", items * 10)
        # The status is sent before the last object is closed.
        assert eventually(lambda: not opened(server)), opened(server)


def test_all_shared_memory_in_a_message_is_counted() -> None:
    part = tensor_pb2.SharedMemory(key=f"/{PREFIX}", byte_size=100)
    ids = tensor_pb2.Tensor(shared=part)
    documents: Any = [{"parts": [{"token_ids": ids}, {"pixels": ids}, {"text": "a"}]}, {"parts": [{"pixels": ids}]}]
    negative = tensor_pb2.Tensor(shared=tensor_pb2.SharedMemory(byte_size=-5))
    messages: list[Any] = [
        sequences_pb2.BuildRequest(query={"documents": documents, "output": part}),  # type: ignore[arg-type]
        sequences_pb2.StreamBuildRequest(query={"documents": documents}),  # type: ignore[arg-type]
        rotary_pb2.RotateRequest(q=ids, k=ids, positions={"ids": ids}, output=part),  # type: ignore[arg-type]
        place(ids, output=part),
        rotary_pb2.RotateRequest(q=negative, k=ids),
        rotary_pb2.RotateRequest(),
    ]
    assert [claimed(message, Limits()) for message in messages] == [400, 300, 400, 200, 100, 0]
    memory = SharedMemory(PREFIX)
    assert [mentions(message.SerializeToString(), memory) for message in messages] == [True] * 5 + [False]
    assert not mentions(messages[0].SerializeToString(), SharedMemory())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "got host '0.0.0.0', want a loopback host such as 127.0.0.1"),
        (["--shared-memory", "a/b"], "got 'a/b', want 1 to 64 letters, digits, '_', '.' and '-'"),
    ],
)
def test_an_invalid_command_line_is_reported_before_workers_start(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--port", "0", "--workers", "2", "--shared-memory", PREFIX, *arguments]) == 2
    assert capsys.readouterr().err == f"mmpos_server: error: shared-memory: {message}\n"


def test_a_server_that_other_machines_can_reach_refuses_shared_memory() -> None:
    with pytest.raises(InvalidInputError, match=r"^shared-memory: got host '0.0.0.0', want a loopback host"):
        Server(load(), Listen("0.0.0.0"), shared_memory=SharedMemory(PREFIX))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_command_line_enables_shared_memory_for_all_workers(workers: str) -> None:
    command = [sys.executable, "-m", "mmpos_server", "--port", "0", "--workers", workers, "--shared-memory", PREFIX]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with Client(address, timeout=60) as client:
            assert client.info().shared_memory_prefix == PREFIX
        process.terminate()


def test_an_output_too_small_for_the_expected_tensors_is_refused() -> None:
    with shared(bytes(200)) as key:
        part = tensor_pb2.SharedMemory(key=key, byte_size=100)
        exchange = Exchange(SharedMemory(PREFIX), rotary_pb2.RotateRequest(output=part))
        exchange.expect([64, 36])
        exchange.serialize(rotary_pb2.RotateResponse())
        with pytest.raises(OutputError, match=r"^output.byte_size: got 100, want >= 101 for the answer$") as raised:
            exchange.expect([10, 37])
    assert raised.value.needed == 101
    Exchange().expect([10**9])
