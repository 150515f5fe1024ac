"""Bad input to the rotation: every refusal is an error of mmpos that says what, got and want."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmpos import Grid, InvalidInputError, MmposError, SegmentTable, Text, UnsupportedError, place
from mmpos.rotary import DevicePositions, Rotary, RotaryEmbedding, angles, apply_rotary, cos_sin

ROTARY = Rotary(head_dim=16)
POSITIONS = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(5)]]))
EQUAL = place(SegmentTable.from_documents([[Text(2), Grid(2, 3)], [Text(8)]]))
FOUR = place(SegmentTable.from_documents([[Text(4)]] * 4))
DEVICE = DevicePositions.from_table(POSITIONS)
IDS = torch.from_numpy(POSITIONS.dense())


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    return torch.zeros(shape, dtype=dtype, device=device)


def packed(heads: int = 2, head_dim: int = 16, **options: Any) -> Any:
    return zeros(16, heads, head_dim, **options)


def calls(q: Any, k: Any = None, positions: Any = DEVICE, rotary: Rotary = ROTARY, **options: Any) -> Callable[[], Any]:
    return lambda: apply_rotary(q, k, positions, rotary, **options)


def ids(*values: float, dtype: torch.dtype) -> Tensor:
    """Two axes and sixteen tokens, of which the last ones have these ids."""
    found = torch.zeros(2, 16, dtype=dtype)
    found[1, 16 - len(values) :] = torch.tensor(values, dtype=dtype)
    return found


def fused(q_from: int, k_from: int) -> tuple[Tensor, Tensor]:
    """q with four heads and k with two, views of one buffer of eight heads."""
    buffer = zeros(16, 8, 16)
    return buffer[:, q_from : q_from + 4], buffer[:, k_from : k_from + 2]


WANT_Q = "want a tensor of float32, bfloat16 or float16"
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    # q and k
    "head_dim": (calls(packed(head_dim=32)), "q: got head_dim 32, want 16 as in rotary"),
    "head_dim of k": (
        calls(packed(), packed(head_dim=32)),
        "k: got shape (16, 2, 32), want that of q, (16, 2, 16), but for the heads",
    ),
    "not a tensor": (calls([[1.0]]), f"q: got list, {WANT_Q}"),
    "no q": (calls(None, packed()), f"q: got NoneType, {WANT_Q}"),
    "k is not a tensor": (calls(packed(), 3), f"k: got int, {WANT_Q}"),
    "float64 q": (calls(packed(dtype=torch.float64)), f"q: got torch.float64, {WANT_Q}"),
    "integer k": (calls(packed(), packed(dtype=torch.int32)), f"k: got torch.int32, {WANT_Q}"),
    "dtypes": (
        calls(packed(), packed(dtype=torch.bfloat16)),
        "k: got torch.bfloat16 on cpu with 3 dimensions, want torch.float32 on cpu with 3 as q",
    ),
    "devices": (
        calls(packed(), packed(device="meta")),
        "k: got torch.float32 on meta with 3 dimensions, want torch.float32 on cpu with 3 as q",
    ),
    "dimensions": (
        calls(packed(), zeros(1, 16, 2, 16)),
        "k: got torch.float32 on cpu with 4 dimensions, want torch.float32 on cpu with 3 as q",
    ),
    "tokens of k": (
        calls(packed(), zeros(15, 2, 16)),
        "k: got shape (15, 2, 16), want that of q, (16, 2, 16), but for the heads",
    ),
    # layouts
    "two dimensions": (
        calls(zeros(16, 16)),
        "q: got shape (16, 16), want (tokens, heads, head_dim) or (batch, seq, heads, head_dim)",
    ),
    "thd": (calls(zeros(1, 16, 2, 16), layout="thd"), "q: got shape (1, 16, 2, 16), want (tokens, heads, head_dim)"),
    "bshd": (calls(packed(), layout="bshd"), "q: got shape (16, 2, 16), want (batch, seq, heads, head_dim)"),
    "bhsd": (calls(packed(), layout="bhsd"), "q: got shape (16, 2, 16), want (batch, heads, seq, head_dim)"),
    "unknown layout": (calls(packed(), layout="sbhd"), "layout: got 'sbhd', want one of 'thd', 'bshd', 'bhsd'"),
    # positions
    "kind of positions": (
        calls(packed(), positions=POSITIONS.dense()),
        "positions: got ndarray, want DevicePositions, a PositionTable or a tensor of ids",
    ),
    "no positions": (
        calls(packed(), positions=None),
        "positions: got NoneType, want DevicePositions, a PositionTable or a tensor of ids",
    ),
    "axes of a table": (
        calls(packed(), rotary=Rotary(16, axes=3)),
        "positions: got 2 axes, want 3 as in rotary",
    ),
    "axes of ids": (calls(packed(), positions=IDS[:1]), "positions: got 1 axis, want 2 as in rotary"),
    "tokens of a table": (calls(zeros(15, 2, 16)), "positions: got 16 tokens, want 15 as in q"),
    "tokens of ids": (calls(packed(), positions=IDS[:, 1:]), "positions: got 15 tokens, want 16 as in q"),
    "heads of k before seq": (
        calls(zeros(2, 4, 8, 16), zeros(2, 2, 8, 16)),
        "k: got shape (2, 2, 8, 16), want that of q, (2, 4, 8, 16), but for the heads; "
        'heads before seq are layout="bhsd"',
    ),
    "heads before seq": (
        calls(zeros(2, 4, 17, 16), positions=torch.zeros(2, 2, 17, dtype=torch.int32)),
        "positions: got 34 tokens, want 8 as in q; heads and seq would fit if they were exchanged, see layout",
    ),
    "heads before seq, and told so": (
        calls(zeros(2, 8, 4, 16), positions=torch.zeros(2, 2, 8, dtype=torch.int32), layout="bhsd"),
        "positions: got 16 tokens, want 8 as in q; heads and seq would fit if they were exchanged, see layout",
    ),
    "one dimension of ids": (
        calls(packed(), positions=IDS[0]),
        "positions: got shape (16,), want (axes, tokens) or (axes, batch, seq)",
    ),
    "no axis of ids": (
        calls(packed(), positions=IDS[:0]),
        "positions: got shape (0, 16), want (axes, tokens) or (axes, batch, seq)",
    ),
    "unequal documents": (
        calls(zeros(2, 8, 2, 16)),
        "positions: got documents of unequal tokens, want 8, the seq of q; pad the table, or use layout thd",
    ),
    "documents of another length": (
        calls(zeros(2, 8, 2, 16), positions=FOUR),
        "positions: got documents of 4 tokens, want 8, the seq of q; pad the table, or use layout thd",
    ),
    "ids of another length": (
        calls(zeros(2, 2, 8, 16), positions=IDS.reshape(2, 4, 4), layout="bhsd"),
        "positions: got documents of 4 tokens, want 8, the seq of q; pad the table, or use layout thd",
    ),
    "table on another device": (
        calls(packed(), positions=DEVICE.to("meta")),
        "positions: got a tensor on meta, want cpu as q",
    ),
    "ids on another device": (
        calls(packed(), positions=IDS.to("meta")),
        "positions: got a tensor on meta, want cpu as q",
    ),
    "frequencies on another device": (
        lambda: RotaryEmbedding(ROTARY).to("meta")(packed(), None, DEVICE),
        "q: got a tensor on cpu, want meta as the frequencies",
    ),
    # ids
    **{
        f"{dtype} ids": (
            calls(packed(), positions=IDS.to(dtype)),
            f"positions: got dtype {dtype}, want int32, int64 or float64 ids",
        )
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.uint8)
    },
    "id 2**31": (
        calls(packed(), positions=ids(2**31, dtype=torch.int64)),
        "positions: got ids from 0 to 2147483648, want finite ids within int32",
    ),
    "id -2**31 - 1": (
        calls(packed(), positions=ids(-(2**31) - 1, dtype=torch.int64)),
        "positions: got ids from -2147483649 to 0, want finite ids within int32",
    ),
    "float id 2**31": (
        calls(packed(), positions=ids(-7, 2.0**31, dtype=torch.float64)),
        "positions: got ids from -7 to 2147483648, want finite ids within int32",
    ),
    "huge float id": (
        calls(packed(), positions=ids(1e20, dtype=torch.float64)),
        "positions: got ids from 0 to 100000000000000000000, want finite ids within int32",
    ),
    "infinite id": (
        calls(packed(), positions=ids(-float("inf"), dtype=torch.float64)),
        "positions: got ids from -inf to 0, want finite ids within int32",
    ),
    "nan": (
        calls(packed(), positions=ids(float("nan"), dtype=torch.float64)),
        "positions: got ids from nan to nan, want finite ids within int32",
    ),
    "validated ids": (
        calls(packed(), positions=ids(2**40, dtype=torch.int64), validate=True),
        "positions: got ids from 0 to 1099511627776, want finite ids within int32",
    ),
    # in place
    "expanded": (
        calls(zeros(16, 1, 16).expand(16, 2, 16), inplace=True),
        "q: got a tensor whose elements share memory, want inplace=False",
    ),
    "overlapping": (
        calls(packed(), zeros(1000).as_strided((16, 2, 16), (24, 16, 1)), inplace=True),
        "k: got a tensor whose elements share memory, want inplace=False",
    ),
    **{
        f"k within q, {q_from} and {k_from}": (
            calls(*fused(q_from, k_from), inplace=True),
            "k: got the memory of q, want inplace=False",
        )
        for q_from, k_from in ((0, 0), (0, 2), (0, 3), (1, 0), (4, 3), (4, 6))
    },
    "k is q": (calls(x := packed(), x, inplace=True), "k: got the memory of q, want inplace=False"),
    # implementations
    "unknown implementation": (
        calls(packed(), implementation="cuda"),
        "implementation: got 'cuda', want one of 'auto', 'reference', 'triton'",
    ),
    "words for a flag": (calls(packed(), inplace="no"), "inplace: got 'no', want True or False"),
    "a list for a flag": (calls(packed(), conjugate=[]), "conjugate: got [], want True or False"),
    "None for a flag": (calls(packed(), validate=None), "validate: got None, want True or False"),
    # the rotary
    "no rotary": (
        calls(packed(), rotary=None),  # type: ignore[arg-type]
        "rotary: got NoneType, want a Rotary, as mmpos.rotary.Rotary gives it",
    ),
    "no rotary of cos and sin": (
        lambda: cos_sin(None, DEVICE),  # type: ignore[arg-type]
        "rotary: got NoneType, want a Rotary, as mmpos.rotary.Rotary gives it",
    ),
    "no rotary of angles": (
        lambda: angles({"head_dim": 16}, DEVICE),  # type: ignore[arg-type]
        "rotary: got dict, want a Rotary, as mmpos.rotary.Rotary gives it",
    ),
    # allocations
    "sections that do not cover": (
        lambda: Rotary(16, allocation="sections", mrope_section=[2, 3, 2]),
        "mrope_section: got [2, 3, 2], want sizes that sum to 8 pairs",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_with_what_got_and_want(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$") as caught:
        call()
    assert isinstance(caught.value, MmposError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_of_the_meta_device_lie_nowhere_and_share_nothing(inplace: bool) -> None:
    q, k = packed(3, device="meta"), packed(2, device="meta")
    turned = apply_rotary(q, k, POSITIONS, ROTARY, inplace=inplace)
    assert [(x.shape, x.device.type) for x in turned if x is not None] == [((16, 3, 16), "meta"), ((16, 2, 16), "meta")]
    with pytest.raises(InvalidInputError, match=r"^k: got the memory of q, want inplace=False$"):
        apply_rotary(q, q, POSITIONS, ROTARY, inplace=True)


def test_heads_of_which_there_are_none_share_no_memory_whatever_their_strides() -> None:
    q = torch.empty_strided((16, 0, 16), (0, 0, 0))
    assert apply_rotary(q, packed(), POSITIONS, ROTARY, inplace=True)[0] is q


@pytest.mark.parametrize("argument", ["q", "k"])
def test_in_place_under_autograd_is_not_supported(argument: str) -> None:
    q, k = packed(), packed()
    (q if argument == "q" else k).requires_grad_()
    message = f"inplace: got {argument} that requires gradients, want inplace=False"
    with pytest.raises(UnsupportedError, match=f"^{message}$") as caught:
        apply_rotary(q, k, DEVICE, ROTARY, inplace=True)
    assert isinstance(caught.value, NotImplementedError)
    with torch.no_grad():
        assert apply_rotary(q, k, DEVICE, ROTARY, inplace=True) == (q, k)


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "implementation: got 'triton' for tensors on cpu, want 'reference' there"
    for value in ("0", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(InvalidInputError, match=f"^{message}$"):
            apply_rotary(packed(), None, DEVICE, ROTARY, implementation="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        apply_rotary(packed(), None, DEVICE, ROTARY, implementation="triton")


def test_the_farthest_ids_are_legal() -> None:
    for dtype in (torch.int64, torch.float64):
        assert apply_rotary(packed(), None, ids(2**31 - 1, -(2**31), dtype=dtype), ROTARY)[0].shape == (16, 2, 16)
    apply_rotary(packed(), None, ids(2**31 - 0.5, dtype=torch.float64), ROTARY, validate=True)


def test_a_single_row_holds_a_packed_batch_of_unequal_documents() -> None:
    q = torch.randn(16, 2, 16, generator=torch.Generator().manual_seed(0))
    packed_q, _ = apply_rotary(q, None, POSITIONS, ROTARY)
    one_row, _ = apply_rotary(q.unsqueeze(0), None, POSITIONS, ROTARY)
    assert torch.equal(one_row[0], packed_q)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "views",
    [
        lambda x: (x[..., :4, :], x[..., 4:6, :]),
        lambda x: (x[..., 2:6, :], x[..., :2, :]),
        lambda x: (x[..., ::2, :], x[..., 1::2, :]),
        lambda x: (x[..., :1, :], x[..., 1:, :]),
        lambda x: (x[:1], x[1:]),
        lambda x: (x[:, :4], x[:, 4:]),
        lambda x: (x[..., :16], x[..., 16:]),
    ],
    ids=["q k v", "k q", "alternating", "one and many", "batches", "tokens", "channels"],
)
def test_views_of_one_buffer_that_share_nothing_are_rotated_in_place(views: Any, layout: Any) -> None:
    def q_and_k() -> list[Tensor]:
        buffer = torch.randn(2, 8, 8, 32, generator=torch.Generator().manual_seed(0))
        return [x if layout == "bshd" else x.transpose(1, 2) for x in views(buffer)]

    q, k = q_and_k()
    batch, seq = q.shape[0], q.shape[1 if layout == "bshd" else 2]
    rotary = Rotary(head_dim=q.shape[-1])
    some = place(SegmentTable.from_documents([[Text(seq)]] * batch))
    expected = apply_rotary(q, k, some, rotary, layout=layout)
    rotated_q, rotated_k = apply_rotary(q, k, some, rotary, layout=layout, inplace=True)
    assert rotated_q is q
    assert rotated_k is k
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])  # type: ignore[arg-type]


WITHOUT = """
import sys
sys.modules["{missing}"] = None
"""


def without(missing: str, code: str) -> None:
    """Run code where a package cannot be imported."""
    command = [sys.executable, "-c", WITHOUT.format(missing=missing) + code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_without_torch_frequencies_work_and_the_rest_names_the_command() -> None:
    code = """
import mmpos, mmpos.rotary
from mmpos.rotary import Rotary
assert Rotary(head_dim=8).pair_axis.tolist() == [0, 1, 0, 1]
for name in ("angles", "apply_rotary", "cos_sin", "rerotate", "rotate_and_store", "DevicePositions", "RotaryEmbedding"):
    try:
        getattr(mmpos.rotary, name)
    except ImportError as error:
        assert str(error) == 'rotations: torch is not installed, want pip install "multimodal-positions[all]"', error
    else:
        raise AssertionError(name)
"""
    without("torch", code)


def test_without_triton_the_reference_works_and_the_kernel_names_the_command() -> None:
    code = """
import os, torch
os.environ["TRITON_INTERPRET"] = "1"
from mmpos.rotary import Rotary, apply_rotary
q, ids = torch.ones(3, 1, 8), torch.arange(6).reshape(2, 3)
apply_rotary(q, None, ids, Rotary(head_dim=8))
try:
    apply_rotary(q, None, ids, Rotary(head_dim=8), implementation="triton")
except ImportError as error:
    want = 'want pip install "multimodal-positions[all]"'
    assert str(error) == f'implementation "triton": triton is not installed, {want}', error
else:
    raise AssertionError
"""
    without("triton", code)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, as forward mode loads its formulas
def test_forward_mode_gradients_are_refused() -> None:
    q, ids = torch.randn(3, 2, 16), torch.arange(6).view(2, 3)
    with pytest.raises(UnsupportedError, match="q: got a forward-mode tangent, want reverse-mode gradients"):
        torch.func.jvp(lambda x: apply_rotary(x, None, ids, Rotary(16))[0], (q,), (q,))


def test_memory_is_judged_by_the_distance_of_tensors_whose_shapes_and_strides_are_the_same() -> None:
    fused, ids = torch.zeros(4, 6, 8), torch.zeros(2, 4, dtype=torch.int32)
    for start, apart in ((1, False), (2, True), (1, False), (4, True)):
        q, k = fused[:, :2], fused[:, start : start + 2]
        if apart:
            apply_rotary(q, k, ids, Rotary(8), inplace=True)
        else:
            with pytest.raises(InvalidInputError, match="k: got the memory of q"):
                apply_rotary(q, k, ids, Rotary(8), inplace=True)
