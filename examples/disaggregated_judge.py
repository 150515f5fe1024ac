"""The judge of disaggregated.py: places every whole sequence at once, and compares the workers' reports with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from disaggregated_workers import BLOCK, BUILDER, REQUESTS, Array, embed, next_token, rotate

from mmpos.client import PositionsResult
from mmpos.rpc.positions import get_result
from mmpos.rpc.tensors import get_tensor
from mmpos.rpc.v1 import positions_pb2, sequences_pb2, tensor_pb2


@dataclasses.dataclass(frozen=True)
class Window:
    """The report of a worker on one window; see Witness.tell."""

    worker: str
    what: str
    request: int
    start: int
    positions: PositionsResult
    ids: Array
    turned: Array


@dataclasses.dataclass(frozen=True)
class End:
    """The report of a worker on the end of a request; see Witness.tell_end."""

    worker: str
    request: int
    generated: Array
    k: Array
    keys: Array


class Whole:
    """A request with all that was generated, as one sequence that is placed and rotated at once."""

    def __init__(self, request: int, generated: Array) -> None:
        self.sequence = BUILDER.build([*REQUESTS[request], generated.tolist()])
        self.prompt = self.sequence.input_ids.size - generated.size
        self.positions = self.sequence.positions.dense()
        self.turned = rotate(embed(self.sequence), self.positions)
        self.keys = self.sequence.block_keys(BLOCK)

    def against(self, window: Window) -> list[str]:
        """List what is wrong about a window."""
        here = slice(window.start, window.start + window.ids.size)
        same = window.ids == self.sequence.input_ids[here]
        assert window.positions.table is not None
        assert window.positions.deltas is not None
        agree = {
            "token ids": same.all() or (window.what.startswith("draft") and same[0]),  # the last are wrong on purpose
            "positions": np.array_equal(window.positions.table.dense(), self.positions[:, here]),
            "delta": np.array_equal(window.positions.deltas, self.sequence.positions.deltas),
            "q and k": np.array_equal(window.turned[same], self.turned[here][same]),
        }
        return [name for name, right in agree.items() if not right]

    def against_end(self, end: End) -> list[str]:
        """List what is wrong about the end; a token is right if all k before it, bit for bit, make it."""
        k = self.turned[:, 1]
        tokens = [next_token(k[:stop]) for stop in range(self.prompt, len(k))]
        agree = {
            "tokens": end.generated.tolist() == tokens,
            "k": np.array_equal(end.k, k),
            "block keys": end.keys.tobytes() == b"".join(self.keys),
        }
        return [name for name, right in agree.items() if not right]


def judge(messages: Mapping[str, Sequence[bytes]]) -> int:
    """Print an account of what each worker reported; returns 1 if anything disagrees with the whole."""
    reports = [one for worker, lines in messages.items() for one in _read(worker, lines)]
    windows = [one for one in reports if isinstance(one, Window)]
    ends = {one.request: one for one in reports if isinstance(one, End)}
    wholes = [Whole(request, ends[request].generated) for request in range(len(REQUESTS))]
    wrong = 0
    for (worker, request, what), group in groupby(windows, lambda one: (one.worker, one.request, one.what)):
        of_a_kind = list(group)
        last = of_a_kind[-1].start + of_a_kind[-1].ids.size - 1
        faults = [fault for one in of_a_kind for fault in wholes[request].against(one)]
        tokens = f"tokens {of_a_kind[0].start:3} to {last:3}"
        wrong += _line(worker, request, f"{tokens}  {len(of_a_kind):2} × {what}", faults)
    for request, end in sorted(ends.items()):
        what = f"all {len(end.k)} tokens in the end, {end.generated.size} of them generated"
        wrong += _line(end.worker, request, what, wholes[request].against_end(end))
    wrong += _line("prefill 1", 1, "a photograph came from the cache", _reuse(windows, *wholes))
    print("not everything agrees" if wrong else f"{len(windows)} windows agree with the whole, placed at once")
    return int(wrong > 0)


def _reuse(windows: Sequence[Window], first: Whole, second: Whole) -> list[str]:
    """List what is wrong about the blocks that the second request has in common with the first."""
    shared = BLOCK * sum(a == b for a, b in zip(first.keys, second.keys, strict=False))
    begun = next(window.start for window in windows if window.request == 1)
    agree = {"start": begun == shared, "photograph": second.sequence.image_spans[0, 1] <= shared}
    return [name for name, right in agree.items() if not right]


def _line(worker: str, request: int, what: str, faults: Sequence[str]) -> bool:
    verdict = "DISAGREE: " + ", ".join(dict.fromkeys(faults)) if faults else "agree"
    print(f"{worker:9}  request {request}  {what:57}{verdict}")
    return bool(faults)


def _read(worker: str, messages: Sequence[bytes]) -> Iterator[Window | End]:
    left = iter(messages)
    for message in left:
        what = sequences_pb2.Part.FromString(message).text
        place = positions_pb2.Window.FromString(next(left))
        if what == "end":
            yield End(worker, place.documents[0], *(_tensor(next(left)) for _ in range(3)))
        else:
            positions = get_result("positions", positions_pb2.Positions.FromString(next(left)))
            arrays = [_tensor(next(left)) for _ in range(2)]
            yield Window(worker, what, place.documents[0], place.starts[0], positions, *arrays)


def _tensor(message: bytes) -> Array:
    return get_tensor("tensor", tensor_pb2.Tensor.FromString(message))
