"""The judge of disaggregated.py: place whole sequences at once, and compare the workers' reports with the results."""

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
    """A worker's report on one window; see Witness.report."""

    worker: str
    label: str
    request: int
    start: int
    positions: PositionsResult
    ids: Array
    turned: Array


@dataclasses.dataclass(frozen=True)
class End:
    """A worker's report at the end of a request; see Witness.report_end."""

    worker: str
    request: int
    generated: Array
    k: Array
    keys: Array


class Whole:
    """Request with all generated tokens, as one sequence placed and rotated at once."""

    def __init__(self, request: int, generated: Array) -> None:
        self.sequence = BUILDER.build([*REQUESTS[request], generated.tolist()])
        self.prompt = self.sequence.input_ids.size - generated.size
        self.positions = self.sequence.positions.dense()
        self.turned = rotate(embed(self.sequence), self.positions)
        self.keys = self.sequence.block_keys(BLOCK)

    def against(self, window: Window) -> list[str]:
        """List the properties of a window that disagree."""
        here = slice(window.start, window.start + window.ids.size)
        same = window.ids == self.sequence.input_ids[here]
        assert window.positions.table is not None
        assert window.positions.deltas is not None
        agree = {
            "token ids": same.all() or (window.label.startswith("draft") and same[0]),  # drafts end with wrong tokens
            "positions": np.array_equal(window.positions.table.dense(), self.positions[:, here]),
            "delta": np.array_equal(window.positions.deltas, self.sequence.positions.deltas),
            "q and k": np.array_equal(window.turned[same], self.turned[here][same]),
        }
        return [name for name, is_equal in agree.items() if not is_equal]

    def against_end(self, end: End) -> list[str]:
        """List the properties of the end state that disagree; tokens depend on the exact bits of all k before them."""
        k = self.turned[:, 1]
        tokens = [next_token(k[:stop]) for stop in range(self.prompt, len(k))]
        agree = {
            "tokens": end.generated.tolist() == tokens,
            "k": np.array_equal(end.k, k),
            "block keys": end.keys.tobytes() == b"".join(self.keys),
        }
        return [name for name, is_equal in agree.items() if not is_equal]


def judge(messages: Mapping[str, Sequence[bytes]]) -> int:
    """Print a summary of each worker's reports; return 1 if anything disagrees with the whole sequence."""
    reports = [report for worker, lines in messages.items() for report in _read(worker, lines)]
    windows = [report for report in reports if isinstance(report, Window)]
    ends = {report.request: report for report in reports if isinstance(report, End)}
    wholes = [Whole(request, ends[request].generated) for request in range(len(REQUESTS))]
    wrong = 0
    for (worker, request, label), group in groupby(
        windows, lambda window: (window.worker, window.request, window.label)
    ):
        run = list(group)
        last = run[-1].start + run[-1].ids.size - 1
        faults = [fault for window in run for fault in wholes[request].against(window)]
        tokens = f"tokens {run[0].start:3} to {last:3}"
        wrong += _line(worker, request, f"{tokens}  {len(run):2} × {label}", faults)
    for request, end in sorted(ends.items()):
        text = f"all {len(end.k)} tokens in the end, {end.generated.size} of them generated"
        wrong += _line(end.worker, request, text, wholes[request].against_end(end))
    wrong += _line("prefill 1", 1, "a photograph came from the cache", _reuse(windows, *wholes))
    print("not everything agrees" if wrong else f"{len(windows)} windows agree with the whole, placed at once")
    return int(wrong > 0)


def _reuse(windows: Sequence[Window], first: Whole, second: Whole) -> list[str]:
    """List what is wrong with the cached blocks that the second request shares with the first."""
    shared = BLOCK * sum(a == b for a, b in zip(first.keys, second.keys, strict=False))
    start = next(window.start for window in windows if window.request == 1)
    agree = {"start": start == shared, "photograph": second.sequence.image_spans[0, 1] <= shared}
    return [name for name, is_equal in agree.items() if not is_equal]


def _line(worker: str, request: int, text: str, faults: Sequence[str]) -> bool:
    verdict = "DISAGREE: " + ", ".join(dict.fromkeys(faults)) if faults else "agree"
    print(f"{worker:9}  request {request}  {text:57}{verdict}")
    return bool(faults)


def _read(worker: str, messages: Sequence[bytes]) -> Iterator[Window | End]:
    unread = iter(messages)
    for message in unread:
        label = sequences_pb2.Part.FromString(message).text
        place = positions_pb2.Window.FromString(next(unread))
        if label == "end":
            yield End(worker, place.documents[0], *(_tensor(next(unread)) for _ in range(3)))
        else:
            positions = get_result("positions", positions_pb2.Positions.FromString(next(unread)))
            arrays = [_tensor(next(unread)) for _ in range(2)]
            yield Window(worker, label, place.documents[0], place.starts[0], positions, *arrays)


def _tensor(message: bytes) -> Array:
    return get_tensor("tensor", tensor_pb2.Tensor.FromString(message))
