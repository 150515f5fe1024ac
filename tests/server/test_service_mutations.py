"""Tens of thousands of broken requests: each is answered or the client's fault, the server lives and stays small."""

from __future__ import annotations

import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from message_strategies import REQUESTS, STREAMS, corpus, picture
from mutations import broken, files
from open_inference import DATATYPES
from test_inference_fuzz import FAULTS
from test_service_fuzz import check
from victim import STATUSES, Answer, Victim, victim

from mmpos.rpc.v1 import sequences_pb2
from mmpos_server.inference import open_inference_pb2

pytestmark = pytest.mark.slow

PLACE, BUILD, INFER = "PositionService/Place", "SequenceService/Build", "ModelInfer"
STREAM = 200
"""Items of a stream."""

SHARES = {PLACE: 0.3, INFER: 0.1, BUILD: 0.15, "RotaryService/CosSin": 0.08, "RotaryService/Rotate": 0.08}
STREAMED, FILES = 0.07, 0.15
"""Parts of all requests: by call, in each kind of stream, and as image files; an eighth of the last by torchvision."""

LIMITS = {"tokens": 2**20, "response_bytes": 2**25, "pixels": 2**22}
MEMORY = 400
"""MiB that the server may take at most for requests within these limits, beyond what it holds when it starts."""

Send = Callable[[Victim, str, Iterator[bytes]], Iterator[Answer]]


@pytest.fixture
def number(request: pytest.FixtureRequest) -> int:
    """Requests in all."""
    return int(request.config.getoption("--mutations"))


def mutants(method: str, number: int) -> Iterator[bytes]:
    """So many broken requests of a call, the same ones in every run."""
    chance, raw = random.Random(method), inferences() if method == INFER else corpus(method, 100)
    return (broken(chance.choice(raw), chance, raw) for _ in range(number))


def inferences() -> list[bytes]:
    """Requests of the Open Inference Protocol that are right, to be broken."""

    def request(model: str, **inputs: Any) -> bytes:
        made = open_inference_pb2.ModelInferRequest(model_name=model, id="7")
        for name, values in inputs.items():
            if isinstance(values, np.ndarray):
                datatype, data = DATATYPES[values.dtype.name], values.tobytes()
            else:
                datatype, data = "BYTES", b"".join(struct.pack("<I", len(one)) + one for one in values)
            made.inputs.add(name=name, datatype=datatype, shape=np.shape(values))
            made.raw_input_contents.append(data)
        return made.SerializeToString()

    spans = {"lengths": np.array([11]), "offsets": np.array([3]), "grid_thw": np.array([[1, 2, 3]])}
    ids = {"input_ids": np.array([[0, 5, 6]]), "attention_mask": np.array([[0, 1, 1]])}
    padded = open_inference_pb2.ModelInferRequest.FromString(request("positions", **ids))
    padded.parameters["image_token_id"].int64_param = 9
    viewed = open_inference_pb2.ModelInferRequest.FromString(request("positions", **spans))
    viewed.parameters["views"].string_param = '[{"window": {"documents": [0], "starts": [4], "lengths": [4]}}]'
    viewed.parameters["scheme"].string_param = '{"name": "rope-tie", "axes": 3}'
    viewed.outputs.add(name="position_ids")
    queries = {"q": np.ones((4, 2, 8), np.float32), "k": np.ones((4, 1, 8), np.float32)}
    return [
        request("positions", **spans),
        padded.SerializeToString(),
        viewed.SerializeToString(),
        request("sequences", parts=[b"A photo: ", picture("JPEG")], kinds=[b"text", b"image"]),
        request("rotate", **queries, position_ids=np.zeros((2, 4), np.int32)),
    ]


def pictures(number: int) -> Iterator[bytes]:
    """So many requests, each with one broken file."""
    chance, raw = random.Random("files"), files()
    for _ in range(number):
        image = broken(chance.choice(raw), chance, raw)
        request = sequences_pb2.BuildRequest()
        request.query.patches = chance.random() < 0.9
        request.query.documents.add().parts.add(image=image)
        yield request.SerializeToString()


def sent(server: Victim, method: str, requests: Iterator[bytes]) -> Iterator[tuple[bytes, Answer]]:
    """Each request and its answer, while some more are on their way."""
    waiting: deque[tuple[bytes, Callable[[], Answer]]] = deque()
    for raw in requests:
        waiting.append((raw, server.begin(method, raw)))
        if len(waiting) >= 16:
            raw, answer = waiting.popleft()
            yield raw, answer()
    for raw, answer in waiting:
        yield raw, answer()


def judged(server: Victim, method: str, requests: Iterator[bytes]) -> Counter[str]:
    """Count the statuses; a wrong answer is shown with the data that repeats it."""
    statuses: Counter[str] = Counter()
    for raw, answer in sent(server, method, requests):
        try:
            (check_inference if method == INFER else check)(method, answer)
        except Exception as error:
            raise AssertionError(
                f"{method} of bytes.fromhex({raw.hex()!r}): {answer.status} {answer.message}"
            ) from error
        statuses[answer.status] += 1
    return statuses


def check_inference(method: str, answer: Answer) -> None:
    """The answer is a response, or says what is wrong with the request."""
    if answer.status == "OK":
        open_inference_pb2.ModelInferResponse.FromString(answer.data)
    else:
        assert answer.status in FAULTS
        assert ": got " in answer.message or ": want " in answer.message or ": the span" in answer.message


def streamed(server: Victim, method: str, number: int) -> Counter[str]:
    """The same for items of streams, whose errors have their place; bytes that are no message end a stream."""
    request, response = STREAMS[method]
    chance = random.Random(method)
    raw = [request(id=1, query=REQUESTS[unary(method)][0].FromString(one).query) for one in corpus(unary(method), 100)]
    items = [one.SerializeToString() for one in raw]
    statuses: Counter[str] = Counter()
    while sum(statuses.values()) < number:
        some = [
            item
            for item in (broken(chance.choice(items), chance, items) for _ in range(STREAM))
            if valid(request, item)
        ]
        answers, end = server.stream(method, some)
        assert end.status == "OK", end
        found = [response.FromString(answer) for answer in answers]
        assert [answer.id for answer in found] == [request.FromString(item).id for item in some]
        for answer, item in zip(found, some, strict=True):
            failed = answer.WhichOneof("outcome") == "error"
            status = STATUSES[answer.error.code] if failed else "OK"
            assert status != "INTERNAL", f"{method}: bytes.fromhex({item.hex()!r})"
            statuses[status] += 1
    return statuses


def unary(method: str) -> str:
    """The call whose stream it is."""
    return method.replace("Stream", "")


def valid(kind: Any, raw: bytes) -> bool:
    """Whether these bytes are a message."""
    try:
        kind.FromString(raw)
    except DecodeError:
        return False
    return True


def test_broken_requests_are_answered_or_refused(number: int) -> None:
    with victim(limits=LIMITS) as server:
        server.begin("RotaryService/CosSin", corpus("RotaryService/CosSin", 1)[0])()  # imports torch
        before = server.memory()
        for method, share in SHARES.items():
            statuses = judged(server, method, mutants(method, int(share * number)))
            assert set(statuses) >= {"OK", "INVALID_ARGUMENT"}
        for method in STREAMS:
            assert set(streamed(server, method, int(STREAMED * number))) >= {"OK", "INVALID_ARGUMENT"}
        judged(server, BUILD, pictures(int(7 / 8 * FILES * number)))
        assert server.memory("VmHWM") - before < MEMORY


def test_broken_files_are_read_or_refused_by_torchvision(number: int) -> None:
    with victim("torchvision", limits=LIMITS) as server:
        before = server.memory()
        judged(server, BUILD, pictures(int(1 / 8 * FILES * number)))
        assert server.memory("VmHWM") - before < MEMORY
