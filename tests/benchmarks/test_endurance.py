"""The endurance benchmark runs, and distinguishes growing memory from constant memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import endurance
import grpc
import pytest

from mmpos_bench.serving import flood


def soaked(first: float, grown: float, error: float) -> dict[str, float]:
    return {"counted": 300.0, "first": first, "slope": grown, "error": error}


def test_memory_is_flat_if_it_grows_by_at_most_2_percent_or_within_the_error() -> None:
    assert endurance.flat(soaked(1000, 240, 1))  # 20 MiB in five minutes: 2 %
    assert not endurance.flat(soaked(1000, 241, 1))
    assert endurance.flat(soaked(1000, 241, 121))
    assert endurance.flat(soaked(1000, -9999, 1))


def test_a_slope_and_its_error_are_fitted_to_the_means_of_tenths() -> None:
    wave = [(float(t), 100.0 + 3 * t + (5 if t // 10 % 2 else -5)) for t in range(100)]
    slope, error = endurance.slope(wave)
    assert slope == round(3 + 25 / 825, 9)
    assert error == round(((250 - 25**2 / 82.5) / 8 / 8250) ** 0.5, 9)
    assert endurance.slope([(float(t), 100.0 + 2 * t) for t in range(40)]) == (2.0, 0.0)


@contextmanager
def served(turns: dict[bytes, int], refused_from: int) -> Iterator[str]:
    """Run a server that counts requests and refuses every request after the first ``refused_from``."""

    def answer(request: bytes, context: Any) -> bytes:
        turns[request] += 1
        if turns.total() > refused_from:  # type: ignore[attr-defined]
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return request

    handlers = grpc.method_handlers_generic_handler("a", {"B": grpc.unary_unary_rpc_method_handler(answer)})
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handlers])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_flood_records_answers_and_refusals_at_reproducible_scheduled_times() -> None:
    turns: Counter[bytes] = Counter()
    with served(turns, 20) as address:
        sent = flood(address, "/a/B", b"ab", 200.0, 0.3)
        assert 30 < len(sent) == turns[b"ab"] < 90  # a Poisson process of 60
        assert Counter(call.status for call in sent) == {"OK": 20, "RESOURCE_EXHAUSTED": len(sent) - 20}
        assert all(0 < call.due < 0.3 and call.seconds > 0 for call in sent)
        again = flood(address, "/a/B", b"ab", 200.0, 0.3)
    assert sorted(call.due for call in again)[:20] == sorted(call.due for call in sent)[:20]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_the_quick_script_runs_every_path(capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # memory may grow during the two seconds
        endurance.main(["--quick", "--soak", "1"])
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    rows = {row[0]: row for row in cells if row[0] != "---"}
    for name in ("Place, 1 document", "Place, 2 documents, dense ids", "Build, 1 document with 2 photographs"):
        assert float(rows[name][6].removesuffix("×")) > 0
    assert {row[-1] for row in cells[-1:]} <= {"yes", "no"}
