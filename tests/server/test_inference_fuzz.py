"""Random requests of the Open Inference Protocol: answered, or refused as the client's fault, never INTERNAL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_inference import Infer, config, stub

from mmpos import SCHEMES
from mmpos.rotary import Rotary
from mmpos_server.config import Profiles
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.messages import DATATYPES
from mmpos_server.inference.models import InferenceModel, Positions, Rotate, Sequences
from mmpos_server.testing import running

QUICK, LONG = 40, 800
FAULTS = {"INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "NOT_FOUND"}
CONFIG = config(limits={"tokens": 100_000, "request_bytes": 1_000_000, "response_bytes": 4_000_000})


@pytest.fixture(scope="module")
def infer() -> Iterator[Infer]:
    with running(CONFIG) as address, grpc.insecure_channel(address) as channel:
        yield stub(channel)


PROFILE = Profiles.from_config(CONFIG).default
NOTHING: Any = None
MODELS: dict[str, InferenceModel] = {
    model.name: model for model in (Positions(NOTHING, NOTHING), Sequences(NOTHING, NOTHING), Rotate(NOTHING, NOTHING))
}
EDGES = st.sampled_from([0, 1, 2, 3, 4, 5, 100_001, 2**31, 2**62, 2**63 - 1, -1, -(2**63)])
NUMBERS = st.integers(0, 4) | EDGES
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
ROTARIES = st.fixed_dictionaries(
    {"head_dim": NUMBERS}, optional={name: JSON for name in Rotary(head_dim=16).to_dict() if name != "head_dim"}
)
VIEWS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "take": st.fixed_dictionaries({"starts": st.lists(NUMBERS), "stops": st.lists(NUMBERS)}),
            "decode": st.fixed_dictionaries({"steps": NUMBERS}),
            "pad": st.fixed_dictionaries({"length": NUMBERS, "side": st.sampled_from(["SIDE_LEFT", 2, 9])}),
        },
    ),
    max_size=3,
)
TEXTS = st.one_of(
    st.sampled_from([*SCHEMES, "thd", "bshd", "bhsd"]),
    st.one_of(JSON, ROTARIES, VIEWS).map(json.dumps),
    st.fixed_dictionaries({"name": st.sampled_from(list(SCHEMES))}, optional={"axes": NUMBERS}).map(json.dumps),
    st.text(max_size=5),
)


TOGETHER = {
    "positions": [
        ["lengths"],
        ["lengths", "start"],
        ["lengths", "offsets", "grid_thw"],
        ["input_ids", "image_grid_thw"],
    ],
    "sequences": [["parts"], ["parts", "kinds"], ["parts", "parts_per_document"]],
    "rotate": [["q", "position_ids"], ["q", "k", "position_ids"], ["q", "table", "table_documents"]],
}


@st.composite
def requests(draw: Any) -> pb.ModelInferRequest:
    """A request that is mostly right in its form."""

    def mostly(right: object, wrong: object) -> Any:
        return draw(wrong if draw(st.integers(0, 14)) == 14 else right)

    model = MODELS[draw(st.sampled_from(list(MODELS)))]
    request = pb.ModelInferRequest(
        model_name=model.name, model_version=draw(st.sampled_from(["", "", "halves", "flat"]))
    )
    specs = {spec.name: spec for spec in model.inputs(PROFILE)}
    anything = st.lists(st.sampled_from(list(specs)), unique=True, max_size=6)
    size = draw(st.integers(1, 3))
    for name in mostly(st.sampled_from(TOGETHER[model.name]), anything):
        spec = specs[name]
        datatype = mostly(st.sampled_from(spec.datatypes), st.sampled_from(list(DATATYPES)))
        shape = [mostly(st.just(size), st.integers(0, 4)) if extent < 0 else extent for extent in spec.shape]
        shape = mostly(st.just(shape), st.lists(NUMBERS, max_size=4))
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(draw(_bytes(datatype, shape)))
    for name, kind in model.parameters.items():
        if draw(st.integers(0, 5)) == 5:
            value = draw({"bool": st.booleans(), "int64": NUMBERS, "string": TEXTS}[kind])
            setattr(request.parameters[name], f"{kind}_param", value)
    for spec in mostly(st.just([]), st.lists(st.sampled_from(list(model.outputs(PROFILE))), unique=True, max_size=2)):
        request.outputs.add(name=spec.name)
    return request


def _bytes(datatype: str, shape: list[int]) -> st.SearchStrategy[bytes]:
    count = 1
    for size in shape:
        count = min(count * max(size, 0), 64)
    dtype = DATATYPES[datatype].dtype
    if dtype is None:
        element = st.binary(max_size=4) | st.sampled_from([b"text", b"image"])
        return st.lists(element, min_size=count, max_size=count).map(
            lambda found: b"".join(len(one).to_bytes(4, "little") + one for one in found)
        )
    size = count * dtype.itemsize
    right, likely = (
        st.lists(numbers, min_size=count, max_size=count).map(
            lambda found: b"".join(
                (number % 256**dtype.itemsize).to_bytes(dtype.itemsize, "little") for number in found
            )
        )
        for numbers in (NUMBERS, st.integers(1, 4))
    )
    return st.one_of(likely, likely, right, st.binary(min_size=size, max_size=size), st.binary(max_size=16))


def answer(infer: Infer, examples: int) -> dict[str, int]:
    """Ask so many random requests; count the status of each answer."""
    counts: dict[str, int] = {}
    health = list(HealthCheck)

    @settings(max_examples=examples, database=None, suppress_health_check=health)
    @given(requests())
    def once(request: pb.ModelInferRequest) -> None:
        try:
            found = infer(request)
            status, details = "OK", ""
            assert len(found.outputs) == len(found.raw_output_contents)
        except grpc.RpcError as error:
            status, details = error.code().name, error.details() or ""
        if status != "OK":
            assert status in FAULTS, details
            assert ": got " in details or ": want " in details or "the span of" in details
        counts[status] = counts.get(status, 0) + 1

    once()
    return counts


def test_any_request_is_answered_or_refused(infer: Infer) -> None:
    assert {"OK", "INVALID_ARGUMENT"} <= set(answer(infer, QUICK))


@pytest.mark.slow
def test_many_requests_are_answered_or_refused(infer: Infer) -> None:
    # Which of the rare ones come is chance: Hypothesis draws constants of the modules that this process has imported.
    assert {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED"} <= set(answer(infer, LONG))
