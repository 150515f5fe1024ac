"""What the models of one server have done, as ModelStatistics tells it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmpos_server.call import Call
    from mmpos_server.inference import open_inference_pb2 as pb

__all__ = ["Statistics"]

# Stages of a call, and what the protocol calls them. Encoding comes after the answer is there, and is not in here.
_PARTS = {
    "queue": "queue",
    "decode": "compute_input",
    "read": "compute_input",
    "place": "compute_infer",
    "build": "compute_infer",
    "rotate": "compute_infer",
    "write": "compute_output",
}


@dataclass
class _Times:
    """Requests of one version of one model, and seconds of them."""

    succeeded: int = 0
    failed: int = 0
    documents: int = 0
    last: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("success", "fail", *_PARTS.values()), 0.0))


class Statistics:
    """Counts since the server started; used from the event loop only.

    Args:
        versions: model and version of each that is counted.
    """

    def __init__(self, versions: Iterable[tuple[str, str]]) -> None:
        self._times = {version: _Times() for version in versions}

    def succeeded(self, model: str, version: str, call: Call) -> None:
        """A request was answered."""
        times = self._begin(model, version, call, "success")
        times.succeeded += 1
        times.documents += call.counts.get("documents", 1)
        for stage, seconds in call.stages:
            times.seconds[_PARTS[stage]] += seconds

    def failed(self, model: str, version: str, call: Call) -> None:
        """A request failed, or nobody waits for it any more."""
        self._begin(model, version, call, "fail").failed += 1

    def put(self, message: pb.ModelStatisticsResponse, model: str, version: str) -> None:
        """Fill a message with the statistics of a model and a version, or of all where the name is empty."""
        for (name, of), times in self._times.items():
            if model in ("", name) and version in ("", of):
                _put(message.model_stats.add(name=name, version=of), times)

    def _begin(self, model: str, version: str, call: Call, outcome: str) -> _Times:
        times = self._times[model, version]
        times.last = time()
        times.seconds[outcome] += call.seconds
        return times


def _put(message: pb.ModelStatistics, times: _Times) -> None:
    message.last_inference = int(1000 * times.last)
    message.inference_count, message.execution_count = times.documents, times.succeeded
    for part, seconds in times.seconds.items():
        duration = getattr(message.inference_stats, part)
        duration.count = times.failed if part == "fail" else times.succeeded
        duration.ns = round(1e9 * seconds)
