"""The proofs in the rotation, data and service suites."""

from __future__ import annotations

import importlib
import sys
from copy import copy

import pytest
import torch

from mmpos import UnsupportedError
from mmpos.data.packing import Pack, Packer
from mmpos.rotary import apply_rotary
from mmpos_bench import data, layers
from mmpos_bench.data import mix
from mmpos_bench.layers import SHAPES, Layer, LayerShape, interleaved
from mmpos_bench.peers.rotations import by_formula
from mmpos_bench.proofs import NotEqualError
from mmpos_bench.rotary import ALL_GROUPS, FUSED, Bench, Size, contestant
from mmpos_bench.serving import LoadTurn, by_rate
from mmpos_bench.suites import Role, SuiteOptions
from mmpos_bench.timing import Budget
from mmpos_bench.workloads import workload

SMALL = {"interleaved": LayerShape(2, 1, 8), "axial": LayerShape(2, 2, 8, (4, 4))}


@pytest.fixture(params=SMALL)
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.setattr(layers, "_BLOCK", 5)  # several blocks, the last one shorter
    return Layer(SMALL[request.param], [interleaved(8)] * 2, torch.float32, "cpu")


def test_rotations_are_checked_at_every_token_and_channel(layer: Layer) -> None:
    before = layer.q, layer.k
    q, k = apply_rotary(*before, layer.table, layer.rotary)
    assert k is not None
    layer.judge((q, k), before)
    layer.judge(by_formula(layer)(*before), before, rounded=True)
    for x in (q, k):
        for index in ((0, 0, 0, 0), (0, -1, -1, -1)):
            right = x[index].item()
            for wrong in (right + 0.1, float("nan")):
                x[index] = wrong
                with pytest.raises(NotEqualError, match=r"got an error of .*, want at most 1\.0e-06"):
                    layer.judge((q, k), before)
            x[index] = right


@pytest.mark.parametrize(
    ("group", "shape"),
    [
        *((group, shape) for group in sorted(ALL_GROUPS.keys() - {FUSED}) for shape in SMALL.values()),
        (FUSED, SHAPES["FLUX.1 layer"].toy),
    ],
)
def test_every_way_passes_its_proof_and_is_refused_with_wrong_positions(group: str, shape: LayerShape) -> None:
    pair = ([interleaved(16)], workload(1, 16, 1, 3))
    if group == FUSED:
        pair = [shape.document(42)], [shape.document(21)] * 2
    right, other = (Layer(shape, documents, torch.float32, "cpu", sets=2) for documents in pair)
    assert right.values
    assert right.slots
    wrong = copy(right)  # shares the caches
    wrong.table, wrong.dense, wrong.positions = other.table, other.dense, other.positions
    before = right.q.clone(), right.k.clone()
    for way in ALL_GROUPS[group].ways:
        contestant(way, right).proof()
        assert torch.equal(right.q, before[0])  # restored
        if way.role is not Role.LIMIT:
            with pytest.raises(NotEqualError):
                way.prove(right, way.make(wrong)(0), before)
        right.q.copy_(before[0])
        right.k.copy_(before[1])


def test_a_measurement_records_its_tokens_documents_and_bytes() -> None:
    case = Bench("cpu").compare("norm, rotation and store", Size("7B layer", 8), SuiteOptions(quick=True))
    measured = case.measure(Budget(0.0, 2))
    assert measured.work == {"tokens": 8, "documents": 1, "bytes": 2 * 8 * (32 + 3 * 8 - 8) * 128 * 2}
    assert measured.name == "7B layer, 8 tokens"


class Forgets(Packer):
    """Packer that loses its last pack."""

    def flush(self) -> list[Pack]:
        return super().flush()[:-1]


def overfills(max_tokens: int, **options: bool) -> Packer:
    return Packer(2 * max_tokens, split_text=options["split_text"], overlong="truncate")


@pytest.mark.parametrize("split_text", [False, True])
def test_packs_that_lose_tokens_or_are_too_long_are_not_timed(
    split_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = list(mix(30))
    data._prove_packs(examples, 4096, split_text)
    for wrong, match in ((Forgets, "tokens lost, want"), (overfills, "want at most 4096")):
        monkeypatch.setattr(data, "Packer", wrong)
        with pytest.raises(NotEqualError, match=match):
            data._prove_packs(examples, 4096, split_text)


def test_the_fill_in_arrival_order_excludes_truncated_tokens() -> None:
    assert data._fill_in_order([6, 5, 4, 20], 10) == (6 + 9 + 10) / 30


def test_load_turns_report_their_own_seconds_and_the_first_is_a_warm_up() -> None:
    echo = iter([LoadTurn(1, 9.0), LoadTurn(4, 1.0), LoadTurn(4, 3.0)])
    ours = iter([LoadTurn(1, 9.0), LoadTurn(2, 5.0), LoadTurn(2, 5.0)])
    calls = {"echo": lambda: next(echo), "mmpos": lambda: next(ours)}
    times = by_rate(calls, Budget(0.0, 2))
    assert [timing.median for timing in times.values()] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("suite", "needs", "extra"), [("rotary", "torch", "all"), ("data", "torch", "data"), ("service", "grpc", "server")]
)
def test_a_suite_with_a_missing_library_names_the_pip_command(
    suite: str, needs: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"mmpos_bench.{suite}", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(f"mmpos_bench.{suite}")
    want = f'install it with: pip install "multimodal-positions[{extra}]" (in a clone: pip install ".[{extra}]")'
    assert str(raised.value) == f"the {suite} suite: {needs} is not installed; {want}"


def test_the_service_suite_requires_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmpos_bench import service

    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="service: got darwin, want Linux"):
        next(service.cases(SuiteOptions(quick=True)))
