"""Test that a request's bytes and fields bound its cost, and that a few threads do all large work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hostile_images import encoded
from hypothesis import given
from message_strategies import picture, places, tensor
from PIL import Image
from serving import serving
from waiting import eventually

from mmpos import MmposError, SegmentTable, Text
from mmpos.client import Client, Decode, Dense, InputIds, Pad, PositionsQuery, Shard, Spans, Take, Window
from mmpos.errors import LimitExceededError
from mmpos.images import ImageProcessor, decode
from mmpos.rpc.positions import get_query, put_query
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.rpc.v1 import rotary_pb2, sequences_pb2
from mmpos.sequence.builder import SequenceBuilder
from mmpos.support.info import cores
from mmpos_server.arrivals import Arrivals
from mmpos_server.call import Call, GoneError, Threads
from mmpos_server.config import Profiles, load
from mmpos_server.position_service import PositionService, max_segments
from mmpos_server.sequence_service import SequenceService
from mmpos_server.services import methods, place_method
from mmpos_server.testing import running

CONFIG = replace(load(), overload_ms=60_000)


@pytest.fixture
def call(threads: Threads) -> Call:
    return Call("a", Arrivals(1.0), threads)


IMAGES = Spans([1000], [4 * i + 1 for i in range(250)], [[1, 1, 2]] * 250)
"""501 segments: 250 images with text before, between and after them."""

OVERLAPPING = Take([0] * 500, [1000] * 500)
TEXT = SegmentTable.from_documents([[Text(9)]] * 3)

ESTIMATES: dict[str, tuple[PositionsQuery, float]] = {
    "texts": (PositionsQuery(TEXT), 3),
    "images among text": (PositionsQuery(IMAGES), 501),
    "frames of spans": (PositionsQuery(Spans([100], [1], [[9, 1, 2]])), 19),
    "token ids": (
        PositionsQuery(InputIds([[1, 2, 3]] * 4, image_grid_thw=[[1, 1, 1]], video_grid_thw=[[3, 1, 1]])),
        12,
    ),
    "overlapping ranges": (PositionsQuery(IMAGES, views=[OVERLAPPING]), 501 + 251_000),
    "chained views": (PositionsQuery(IMAGES, views=[OVERLAPPING, Pad()]), 501 + 251_000 + 251_001),
    "windows of one document": (PositionsQuery(TEXT, views=[Window([0] * 4, [0] * 4, [4] * 4)]), 3 + 20),
    "decoded tokens": (PositionsQuery(TEXT, views=[Decode(5)]), 3 + 6),
    "a shard": (PositionsQuery(TEXT, views=[Shard(0, 2)]), 3 + 15),
}


@pytest.mark.parametrize(("query", "segments"), ESTIMATES.values(), ids=ESTIMATES)
def test_the_segments_of_a_query_are_estimated_from_its_fields(query: PositionsQuery, segments: float) -> None:
    assert max_segments(query) == segments


@given(places())
def test_no_query_has_more_segments_than_estimated(request: Any) -> None:
    query = get_query("query", request.query)
    try:
        positions = query.place(query.segments())
        total = positions.num_segments
        for view in query.views:
            positions = view.view(positions)
            total += positions.num_segments
    except MmposError:
        return
    assert total <= max_segments(query)


def place(*arguments: Any, **options: Any) -> Any:
    request = pb.PlaceRequest()
    put_query(request.query, PositionsQuery(*arguments, **options))
    return request


def build(patches: bool = False, **part: Any) -> Any:
    query = sequences_pb2.SequencesQuery(documents=[{"parts": [part]}], patches=patches)  # type: ignore[list-item]
    return sequences_pb2.BuildRequest(query=query)


def rotate(tokens: int) -> Any:
    request = rotary_pb2.RotateRequest(q=tensor(np.ones((tokens, 1, 8)), "float32"))
    request.positions.ids.CopyFrom(tensor([range(tokens)] * 2))
    request.rotary.rotary.head_dim = 8
    return request


NONE = np.empty((0, 3), int)
WORK: dict[str, tuple[Any, str]] = {
    "few segments": (place(IMAGES), "read place write"),
    "ids": (place(Spans([2**18], [], NONE), dense=Dense()), "read place write"),
    "ranges": (place(IMAGES, views=[OVERLAPPING]), "read queue place queue write"),
    "many ids": (place(Spans([2**18 + 1], [], NONE), dense=Dense()), "read place queue write"),
    "many bytes": (place(InputIds(np.zeros(2**15, np.int64))), "queue read place write"),
    "text": (build(text="a bird"), "read build write"),
    "much text": (build(text="a" * 2**18), "queue read queue build write"),
    "a grid": (build(grid={"height": 2**9, "width": 2**10}), "read build write"),
    "a large grid": (build(grid={"height": 2**9, "width": 2**10 + 1}), "read queue build write"),
    "the size of an image": (build(image=picture()), "read build write"),
    "the patches of an image": (build(patches=True, image=picture()), "read queue build build write"),
    "few rotations": (rotate(2), "read rotate write"),
    "many rotations": (rotate(2**13), "queue read rotate write"),
}


@pytest.mark.parametrize(("request_", "stages"), WORK.values(), ids=WORK)
def test_small_work_runs_on_the_event_loop_and_large_work_in_a_thread(call: Call, request_: Any, stages: str) -> None:
    served = methods(Profiles.from_config(CONFIG), CONFIG.limits, rotations=True)
    (method,) = (method for method in served if method.request is type(request_))
    call.request_bytes, response = request_.ByteSize(), method.response()
    asyncio.run(method.run(request_, response, call))
    assert " ".join(stage for stage, _ in call.stages) == stages
    if method.name == "Place":
        answer = pb.PlaceResponse.FromString(call.beside.serialize(response)).positions
        assert call.answer_bytes == len(answer.table.table) + len(answer.table.documents) + len(answer.dense.data)
    if method.name == "Build":
        assert [result.WhichOneof("outcome") for result in response.sequences.results] == ["sequence"]  # type: ignore[attr-defined]


def test_tokens_are_counted_again_when_the_texts_are_tokenised(call: Call) -> None:
    service = SequenceService(Profiles.from_config(CONFIG), replace(CONFIG.limits, tokens=10))
    texts = [{"parts": [{"text": text}]} for text in ("é" * 3, "é" * 3)]  # six characters, twelve bytes
    query = sequences_pb2.SequencesQuery(documents=texts)  # type: ignore[arg-type]
    with pytest.raises(LimitExceededError, match=r"^tokens: got 12, want at most 10 "):
        asyncio.run(service.build(query, sequences_pb2.Sequences(), call))


@pytest.mark.parametrize("streamed", [False, True])
def test_large_answers_are_counted_before_they_exist(streamed: bool) -> None:
    query = pb.PositionsQuery()
    put_query(query, PositionsQuery(Spans([2**20], [], np.empty((0, 3), int)), dense=Dense()))  # 8 MiB of ids
    taken: list[int] = []

    class Watched(PositionService):
        def _write(self, *arguments: Any) -> None:
            taken.append(serving_.server.arrivals.unread.taken)
            super()._write(*arguments)

    service = Watched(Profiles.from_config(CONFIG), CONFIG.limits)
    with serving(options={"methods": [place_method(service.place)]}) as serving_:
        if streamed:
            (answer,) = serving_.stream(iter([pb.StreamPlaceRequest(query=query)]))
            assert not serving_.taken()  # before the status of the stream
        else:
            answer = serving_.place(pb.PlaceRequest(query=query).SerializeToString())
        assert len(answer.positions.dense.data) == 2**23
        assert taken[0] >= 2**23
        assert eventually(lambda: not serving_.taken())
        calls = [serving_.stream(pb.StreamPlaceRequest(query=query) for _ in range(40)) for _ in range(6)]
        assert eventually(lambda: serving_.taken().get("unread_bytes", 0) > 2**25)
        time.sleep(0.5)
        assert serving_.taken()["unread_bytes"] <= 2**26 + 2**12  # the share of a client, and the heads of messages
        for call in calls:
            call.cancel()
        assert eventually(lambda: not serving_.taken())


def test_two_threads_decode_images_and_no_other_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    large = encoded(Image.new("RGB", (1100, 1000), "red"), "PNG")
    begun, done, samples = threading.Semaphore(0), threading.Event(), decode.samples

    def slow(image: Image.Image) -> decode.Samples:
        if image.width > 1000:
            begun.release()
            assert done.wait(300)
        return samples(image)

    monkeypatch.setattr(decode, "samples", slow)
    with running(CONFIG) as address, ThreadPoolExecutor(3) as threads, Client(address, timeout=300) as client:
        calls = [threads.submit(client.build, ["a", large]) for _ in range(3)]
        assert begun.acquire(timeout=300)
        assert cores() == 1 or begun.acquire(timeout=300)
        assert not begun.acquire(timeout=0.2), "more than two threads decode images"
        assert client.build(["a"]).input_ids.tolist() == [97]
        done.set()
        local = SequenceBuilder(images=ImageProcessor("pillow")).build(["a", large])
        for sequence in (call.result(300) for call in calls):
            np.testing.assert_array_equal(sequence.patches, local.patches)
            assert sequence.image_hashes == local.image_hashes


def test_no_further_image_is_decoded_for_a_client_that_has_gone(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, samples = list[Image.Image](), decode.samples

    def gone(image: Image.Image) -> decode.Samples:
        decoded.append(image)
        call.gone = True
        return samples(image)

    monkeypatch.setattr(decode, "samples", gone)
    query = sequences_pb2.SequencesQuery(documents=[{"parts": [{"image": picture()}] * 3}], patches=True)  # type: ignore[list-item]
    service = SequenceService(Profiles.from_config(CONFIG), CONFIG.limits)
    with pytest.raises(GoneError):
        asyncio.run(service.build(query, sequences_pb2.Sequences(), call))
    assert len(decoded) == 1


IMPORTS = """
import sys
import mmpos.client
from mmpos_server.sequence_service import SequenceService
from mmpos_server.services import methods
from mmpos_server.config import Limits, Profiles, load
methods(Profiles.from_config(load()), Limits())
print(sorted({"torch", "torchvision", "cryptography", "opentelemetry"} & set(sys.modules)))
methods(Profiles.from_config(load()), Limits(), rotations=True)
print("torch" in sys.modules)
"""


def test_torch_is_imported_before_the_first_call_and_only_for_rotations() -> None:
    completed = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=300)
    assert completed.stdout == "[]\nTrue\n"
