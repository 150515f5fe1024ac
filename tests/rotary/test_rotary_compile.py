"""torch.compile: whole graphs, few of them, the results and gradients of eager; operators that pass torch's checks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tolerance import assert_within, rounding
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Rotary, RotaryEmbedding, apply_rotary
from mmpos.rotary.device import _constants_of, frequencies_of, position_ids
from mmpos.rotary.operators import rotate, rotate_
from mmpos.rotary.reference import AUTO

ROTARY = Rotary(head_dim=16, rotary_dim=12)
MODULE = RotaryEmbedding(ROTARY)

# Documents, tokens of text before each image, images: batch sizes, lengths and segment counts all vary.
MIX = [
    (1, 3, 0), (1, 5, 1), (2, 3, 1), (2, 7, 2), (3, 4, 1), (1, 1, 0), (4, 2, 3),
    (3, 9, 0), (2, 1, 1), (5, 6, 2), (1, 12, 4), (4, 4, 0), (2, 8, 5), (6, 1, 2),
]  # fmt: skip
MOST_GRAPHS = 5


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def table(documents: int, text: int, images: int, scheme: str = "rope-tie") -> PositionTable:
    document: list[Text | Grid] = [Text(2)]
    for _ in range(images):
        document += [Text(text), Grid(2, 3)]
    return place(SegmentTable.from_documents([document] * documents), scheme)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def by_function(q: Tensor, k: Tensor, positions: Any) -> tuple[Tensor, Tensor | None]:
    q_out, k_out = apply_rotary(q * 2, k, positions, ROTARY)
    return q_out + 1, k_out


def by_module(q: Tensor, k: Tensor, positions: Any) -> tuple[Tensor, Tensor | None]:
    q_out, k_out = MODULE(q * 2, k, positions)
    return q_out + 1, k_out


def as_device(positions: PositionTable) -> DevicePositions:
    return DevicePositions.from_table(positions)


def as_ids(positions: PositionTable) -> Tensor:
    return torch.from_numpy(positions.dense()).reshape(2, positions.num_documents, -1)


def as_packed_ids(positions: PositionTable) -> Tensor:
    return torch.from_numpy(positions.dense())


def run(call: Callable[..., Any], positions: PositionTable, form: Callable[..., Any]) -> list[Tensor]:
    """q, k and both gradients; packed for thd."""
    shape = (positions.num_tokens,) if form is as_packed_ids else (positions.num_documents, positions.max_seqlen)
    q, k = normal(*shape, 3, 16).requires_grad_(), normal(*shape, 1, 16).requires_grad_()
    return there_and_back(call, q, k, form(positions))


def there_and_back(call: Callable[..., Any], q: Tensor, k: Tensor, positions: Any) -> list[Tensor]:
    q_out, k_out = call(q, k, positions)
    return [q_out, k_out, *torch.autograd.grad(q_out.pow(2).sum() + k_out.pow(3).sum(), (q, k))]


@pytest.mark.parametrize(
    ("function", "form"),
    [
        *((by_module, form) for form in (as_device, as_ids, as_packed_ids)),
        (by_function, as_ids),
        *(pytest.param(by_function, form, marks=pytest.mark.slow) for form in (as_device, as_packed_ids)),
    ],
)
def test_whole_graphs_and_few_of_them_over_a_mix_of_batches(function: Any, form: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for shape in MIX:
        positions = table(*shape)
        for found, expected in zip(run(compiled, positions, form), run(function, positions, form), strict=True):
            assert torch.equal(found, expected), shape
    assert counter.frame_count <= MOST_GRAPHS


def test_packed_documents_of_unequal_lengths_take_few_graphs_too() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(by_module, fullgraph=True, backend=counter)
    for lengths in ([3], [4, 1], [2, 2], [5, 1, 7], [1], [9, 9, 9], [1, 2, 3, 4], [30], [6, 7], [8], [2, 1, 1], [5, 5]):
        device = as_device(place(SegmentTable.from_documents([[Text(n), Grid(2, 2)] for n in lengths])))
        q, k = normal(device.num_tokens, 3, 16), normal(device.num_tokens, 1, 16)
        for found, expected in zip(compiled(q, k, device), by_module(q, k, device), strict=True):
            assert torch.equal(found, expected), lengths  # type: ignore[arg-type]
    assert counter.frame_count <= MOST_GRAPHS


def test_a_capacity_that_is_refreshed_takes_one_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(by_module, fullgraph=True, backend=counter)
    device = DevicePositions.from_table(table(1, 4, 1), capacity=9)
    q, k = normal(12, 3, 16), normal(12, 1, 16)
    documents: list[list[Text | Grid]] = [[Text(12)], [Grid(2, 5), Text(2)], [Text(1), Grid(3, 1), Text(1), Grid(1, 7)]]
    for document in documents:
        device.refresh(place(SegmentTable.from_documents([document])))
        for found, expected in zip(compiled(q, k, device), by_module(q, k, device), strict=True):
            assert torch.equal(found, expected)  # type: ignore[arg-type]
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_in_place_under_compile_writes_into_the_tensors_that_came(layout: Any) -> None:
    def rotated(q: Tensor, k: Tensor, positions: Any) -> Tensor:
        apply_rotary(q, k, positions, ROTARY, layout=layout, inplace=True)
        return q + 1

    compiled = torch.compile(rotated, fullgraph=True, backend="aot_eager")
    for shape in ((2, 3, 1), (3, 4, 2), (2, 5, 1)):
        device = as_device(table(*shape))
        sizes = (device.num_tokens // device.row_length, device.row_length)
        qkv = normal(*sizes, 5, 16) if layout == "bshd" else normal(sizes[0], 5, sizes[1], 16)
        q, k, v = qkv.split([3, 1, 1], dim=2 if layout == "bshd" else 1)
        value = v.clone()
        expected = apply_rotary(q, k, device, ROTARY, layout=layout)
        assert torch.equal(compiled(q, k, device), expected[0] + 1)
        assert torch.equal(q, expected[0])
        assert torch.equal(k, expected[1])  # type: ignore[arg-type]
        assert torch.equal(v, value)


def test_fractions_and_hf_frequencies_compile() -> None:
    halves = as_device(table(2, 3, 2, "rope-tie-v2"))
    q, k = normal(2, 20, 3, 16), normal(2, 20, 1, 16)
    for rotary in (Rotary(16), Rotary(16, precision="hf"), Rotary(16, pairing="adjacent")):
        torch._dynamo.reset()
        for positions in (halves, halves.dense().reshape(2, 2, 20)):
            call = torch.compile(apply_rotary, fullgraph=True, backend="aot_eager")
            found, expected = call(q, k, positions, rotary), apply_rotary(q, k, positions, rotary)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])  # type: ignore[arg-type]


@pytest.mark.slow
def test_inductor_agrees_with_eager() -> None:
    compiled = torch.compile(by_module, fullgraph=True, dynamic=True)
    device = as_device(table(2, 3, 1))
    q, k = normal(2, 11, 3, 16).requires_grad_(), normal(2, 11, 1, 16).requires_grad_()
    bounds = rounding(lambda: there_and_back(by_module, q, k, device), (q, k))
    assert_within(there_and_back(compiled, q, k, device), there_and_back(by_module, q, k, device), bounds)


EAGER = """
import os, sys
import numpy as np
import torch
import mmpos.rotary.apply
from mmpos.rotary import Rotary, apply_rotary

rotary, ids = Rotary(64), torch.arange(6000).view(2, 3000)
q = torch.randn(3000, 8, 64, requires_grad=True)
apply_rotary(q, None, ids, rotary)[0].sin().sum().backward()
with torch.no_grad():
    apply_rotary(q, None, ids, rotary, inplace=True)
assert "torch._dynamo" not in sys.modules
torch.set_num_threads(2)
x = q.detach()
want = apply_rotary(x, None, ids, rotary)[0].numpy()
child = os.fork()
if not child:
    again = apply_rotary(x, None, ids, rotary)[0]  # torch's own threads are lost, so numpy compares
    os._exit(not np.array_equal(again.numpy(), want))
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_eager_rotations_import_no_compiler_and_survive_a_fork() -> None:
    done = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# The operators.


def arguments(q: Tensor, k: Tensor, positions: Any, rotary: Rotary = ROTARY) -> tuple[Any, ...]:
    made = position_ids(positions, q.device)
    adjacent = rotary.pairing == "adjacent"
    return q, k, made.tensor, *frequencies_of(rotary), made.mode, adjacent, 1.0, True, AUTO


SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "table": lambda: arguments(normal(2, 11, 3, 16), normal(2, 11, 1, 16), table(2, 3, 1)),
    "fractions": lambda: arguments(normal(2, 11, 3, 16), normal(2, 11, 1, 16), table(2, 3, 1, "rope-tie-v2")),
    "dense": lambda: arguments(normal(2, 11, 3, 16), normal(2, 11, 1, 16), as_ids(table(2, 3, 1))),
    "no k": lambda: arguments(normal(1, 5, 3, 16), normal(1, 5, 0, 16), torch.arange(10).reshape(2, 5)),
    "bfloat16": lambda: arguments(
        normal(2, 11, 3, 16, dtype=torch.bfloat16), normal(2, 11, 1, 16, dtype=torch.bfloat16), table(2, 3, 1)
    ),
    "fused": lambda: arguments(normal(2, 11, 5, 16)[:, :, :3], normal(2, 11, 5, 16)[:, :, 3:4], table(2, 3, 1)),
    "bhsd": lambda: arguments(
        normal(2, 3, 11, 16).transpose(1, 2), normal(2, 1, 11, 16).transpose(1, 2), table(2, 3, 1)
    ),
    "hf": lambda: arguments(
        normal(2, 11, 3, 16),
        normal(2, 11, 1, 16),
        table(2, 3, 1),
        Rotary(16, precision="hf", pairing="adjacent"),
    ),
}


# opcheck itself reads the gradients of views of its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_operator_passes_torchs_own_checks(sample: str) -> None:
    torch.library.opcheck(rotate, SAMPLES[sample]())
    q, k, *rest = SAMPLES[sample]()
    torch.library.opcheck(rotate, (q.detach().requires_grad_(), k.detach().requires_grad_(), *rest))


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_operator_in_place_passes_torchs_own_checks(sample: str) -> None:
    torch.library.opcheck(rotate_, SAMPLES[sample]())


@pytest.mark.parametrize("sample", SAMPLES)
def test_fake_tensors_have_the_strides_and_dtypes_of_real_ones(sample: str) -> None:
    real = rotate(*SAMPLES[sample]())
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in SAMPLES[sample]()]
    with mode:
        outputs = rotate(*fakes)
    for fake, want in zip(outputs, real, strict=True):
        assert (fake.shape, fake.dtype) == (want.shape, want.dtype)
        for size, stride, like in zip(want.shape, fake.stride(), want.stride(), strict=True):
            assert stride == like or size == 1


@pytest.mark.parametrize("inplace", [False, True])
def test_calls_under_a_fake_mode_leave_nothing_to_later_ones(inplace: bool) -> None:
    ids, rotary = torch.arange(20, dtype=torch.int32).view(2, 10), Rotary(16, theta=77.0)
    for first in (True, False):
        with FakeTensorMode() as mode:
            q, k = (mode.from_tensor(torch.empty(10, heads, 16)) for heads in (4, 2))
            fake, _ = apply_rotary(q, k, mode.from_tensor(ids), rotary, inplace=inplace)
            assert fake.shape == (10, 4, 16), first
        real = normal(10, 4, 16)
        want, _ = apply_rotary(real, None, ids, rotary, implementation="triton")
        assert torch.equal(apply_rotary(real, None, ids, rotary)[0], want)


def test_outputs_keep_the_strides_of_dense_inputs_and_the_order_of_others() -> None:
    positions = table(2, 3, 1)
    bhsd = normal(2, 3, 11, 16)
    assert apply_rotary(bhsd, None, positions, ROTARY, layout="bhsd")[0].stride() == bhsd.stride()
    turned = normal(2, 11, 3, 16).transpose(1, 2)
    assert apply_rotary(turned, None, positions, ROTARY, layout="bhsd")[0].stride() == turned.stride()
    view = normal(2, 11, 5, 16)[:, :, :3]
    assert apply_rotary(view, None, positions, ROTARY)[0].is_contiguous()


def test_constants_bear_the_mark_that_torch_gives() -> None:
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked) == vars(_constants_of)


def test_a_graph_for_one_rotary_is_not_taken_for_another() -> None:
    ids, q = torch.arange(20).view(2, 10), torch.randn(10, 4, 16)
    compiled = torch.compile(apply_rotary, fullgraph=True, backend="eager")
    for theta in (1e4, 5e5):
        rotary = Rotary(16, theta=theta)
        assert torch.equal(compiled(q, None, ids, rotary)[0], apply_rotary(q, None, ids, rotary)[0])


def test_in_place_without_k_rotates_under_compile() -> None:
    ids = torch.arange(20).view(2, 10)
    rotary = Rotary(16)
    q = torch.randn(10, 4, 16)
    want, _ = apply_rotary(q, None, ids, rotary)

    def rotate(x: Tensor) -> Tensor:
        return apply_rotary(x, None, ids, rotary, inplace=True)[0]

    got = torch.compile(rotate, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(got, want)
    assert torch.equal(q, want)


@pytest.mark.parametrize("shape", [(10, 4, 16), (2, 5, 4, 16)])
def test_q_twice_in_place_is_refused_under_compile_too(shape: tuple[int, ...]) -> None:
    ids = torch.arange(20).view(2, 10)

    def rotate(x: Tensor) -> Tensor:
        return apply_rotary(x, x, ids, Rotary(16), inplace=True)[0]

    for call in (rotate, torch.compile(rotate, backend="eager")):
        with pytest.raises(InvalidInputError, match="k: got the memory of q, want inplace=False"):
            call(torch.randn(shape))
