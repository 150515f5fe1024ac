"""JSON in parameters of the Open Inference Protocol: whatever it says is answered or refused, never INTERNAL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_calls import ending
from open_inference import Infer, config, refusal, stub

from mmpos import SCHEMES
from mmpos.rpc.positions import parameters
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.testing import running

FAULTS = {"INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}


@pytest.fixture(scope="module")
def infer() -> Iterator[Infer]:
    with running(config()) as address, grpc.insecure_channel(address) as channel:
        yield stub(channel)


def request(model: str, **values: str | int) -> pb.ModelInferRequest:
    """A request of a model that is right but for its parameters."""
    inputs: dict[str, dict[str, object]] = {
        "positions": {"lengths": [11], "offsets": [3], "grid_thw": [[1, 2, 3]]},
        "rotate": {"q": np.ones((2, 1, 16), np.float32), "position_ids": [[0, 1], [0, 1]]},
        "sequences": {"parts": None},
    }
    made = pb.ModelInferRequest(model_name=model)
    for name, numbers in inputs[model].items():
        if numbers is None:
            made.inputs.add(name=name, datatype="BYTES", shape=[1])
            made.raw_input_contents.append(b"\1\0\0\0a")
            continue
        array = np.asarray(numbers)
        datatype = "FP32" if array.dtype == np.float32 else "INT64"
        made.inputs.add(name=name, datatype=datatype, shape=array.shape)
        made.raw_input_contents.append(array.tobytes())
    for name, value in values.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(made.parameters[name], kind, value)
    return made


DEEP = "[" * 500 + "]" * 500
WRONG: dict[str, tuple[str, str, str, str]] = {
    "half a character as a name": (
        "positions",
        "scheme",
        r'{"name": "\ud800"}',
        r"""parameters['scheme']: got '{"name": "\\ud800"}', want JSON ('utf-8' codec can't encode """,
    ),
    "half a character as a key": (
        "sequences",
        "scheme",
        r'{"\ud800": 1}',
        r"""parameters['scheme']: got '{"\\ud800": 1}', want JSON (""",
    ),
    "half a character among integers": (
        "positions",
        "views",
        r'[{"take": {"starts": "\ud800"}}]',
        r"""parameters['views']: got '[{"take": {"starts": "\\ud800"}}]', want JSON (""",
    ),
    "infinity as a choice": (
        "positions",
        "views",
        '[{"pad": {"side": Infinity}}]',
        """parameters['views']: got '[{"pad": {"side": Infinity}}]', want JSON (Out of range float values are not """,
    ),
    "a number that is infinite": (
        "positions",
        "views",
        '[{"shard": {"layout": -1e400}}]',
        """parameters['views']: got '[{"shard": {"layout": -1e400}}]', want JSON (Out of range """,
    ),
    "an object as a name": (
        "rotate",
        "rotary",
        '{"head_dim": 16, "scaling": {"type": {}}}',
        "parameters['rotary']: scaling.type: got {}, want one of ",
    ),
    "a list as a name": (
        "rotate",
        "rotary",
        '{"head_dim": 16, "scaling": {"type": [1]}}',
        "parameters['rotary']: scaling.type: got [1], want one of ",
    ),
    "very many digits": (
        "positions",
        "views",
        '[{"decode": {"steps": ' + "9" * 5000 + "}}]",
        """parameters['views']: got '[{"decode": {"steps": 99999""",
    ),
    "lists in lists": (
        "positions",
        "views",
        f'[{{"decode": {DEEP}}}]',
        "parameters['views']: got '[{\"decode\": [[[[[",
    ),
    "lists in a rotation": (
        "rotate",
        "rotary",
        f'{{"head_dim": 16, "theta": {DEEP}}}',
        'parameters[\'rotary\']: got \'{"head_dim": 16, "theta": [[[[[',
    ),
}


@pytest.mark.parametrize(("model", "name", "text", "message"), WRONG.values(), ids=WRONG)
def test_what_no_parameter_can_be_is_refused_by_name(
    infer: Infer, model: str, name: str, text: str, message: str
) -> None:
    status, said = refusal(lambda: infer(request(model, **{name: text}), timeout=60))
    assert (status, said[: len(message)]) == ("INVALID_ARGUMENT", message)


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


def sweep(infer: Infer) -> Counter[str]:
    """Ask with every odd value at every place of what is right; how often each status came."""
    statuses: Counter[str] = Counter()
    quoted = json.dumps(HERE)
    for (model, name), values in RIGHT.items():
        for template in (json.dumps(changed) for value in values for changed in replaced(value)):
            for odd in ODD:
                # A key is a text; others are tried in its place, too, and are no JSON at all.
                text = template.replace(quoted, odd)
                status, details = ending(partial(infer, request(model, **{name: text}), timeout=60))
                assert status in ("OK", *FAULTS), (name, text[:300])
                assert status == "OK" or ": got " in details, (name, text[:300], details)
                statuses[status] += 1
    return statuses


@pytest.mark.slow
def test_every_odd_value_at_every_place_is_answered_or_refused(infer: Infer) -> None:
    statuses = sweep(infer)
    assert {"OK", *FAULTS} >= set(statuses) >= {"OK", "INVALID_ARGUMENT"}


@pytest.mark.parametrize("number", [0, -1, 1, 2**31, 2**62, 2**63 - 1, -(2**63)])
def test_integers_of_any_size_are_answered_or_refused(infer: Infer, number: int) -> None:
    names = ("image_token_id", "video_token_id", "spatial_merge_size", "row_token_id", "last_row_token_id")
    for model, name in [*(("positions", name) for name in names), ("sequences", "start")]:
        made = request(model, **{name: number})
        if model == "positions":
            del made.inputs[:], made.raw_input_contents[:]
            made.inputs.add(name="input_ids", datatype="INT64", shape=[3])
            made.raw_input_contents.append(np.arange(3).tobytes())
        status, details = ending(partial(infer, made, timeout=60))
        assert status in ("OK", *FAULTS)
        assert status == "OK" or ": got " in details
