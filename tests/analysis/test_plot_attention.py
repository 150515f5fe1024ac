"""Attention kernels: their values, compared with scores of rotated vectors, and their plots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pictures import table
from tolerance import EXACT, assert_within, gamma, printed, rotations

from mmpos.analysis.plot import Kernel, attention_kernel, plot_attention
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary


def test_a_kernel_is_the_mean_cosine_over_pairs() -> None:
    # θ = 1, .01; text (0, 0), patches (3, 2) (3, 4), text (6, 6); rows rotate the first pair, columns the second.
    computed = attention_kernel(table("1,1x2,1"), Rotary(4))
    assert (computed.label, computed.query) == ("rope-tie, interleaved", (0, 1))
    assert computed.patches.tolist() == [[printed("0.9999000033"), 1.0]]
    assert computed.before.tolist() == [printed("0.0046038050")]  # (cos 3 + cos .04) / 2
    assert computed.after.tolist() == [printed("0.0049037550")]  # (cos 3 + cos .02) / 2


@pytest.mark.parametrize(
    ("scheme", "rotary"),
    [
        ("rope-tie", Rotary(32, theta=500000.0)),
        ("rope-tie-v2", Rotary(32, allocation="split")),
        ("flatten", Rotary(32, axes=1)),
        ("mrope", Rotary(32, allocation="sections", mrope_section=[4, 6, 6])),
        ("mrope", Rotary(32, allocation=[1, 2] * 6 + [-1] * 4)),
        ("mrope", Rotary(32, allocation="heads", head_axes=[2, 0, -1, 1])),
    ],
)
def test_a_kernel_equals_the_scores_of_rotated_queries_and_keys(scheme: str, rotary: Rotary) -> None:
    torch = pytest.importorskip("torch")
    from mmpos.rotary import apply_rotary

    placed = table("5,3x4,6", scheme=scheme)
    computed = attention_kernel(placed, rotary, token=9)
    x = torch.zeros(placed.num_tokens, len(rotary.head_axes or (0,)), 32)
    x[..., :16] = 1  # the same direction in every pair
    q, _ = apply_rotary(x, None, placed, rotary)
    scores = (q[9] * q).sum(-1).mean(1).double().numpy() / 16
    assert computed.query == (1, 0)
    # A score is the mean over 16 pairs, each the sum of two products of rotated channels, which are below 2.
    bound = 8 * float(rotations(q, EXACT).max()) + 2 * gamma(32)
    assert_within(np.concatenate([computed.before[::-1], computed.patches.ravel(), computed.after]), scores, bound)


def test_the_default_query_is_the_middle_patch_of_the_first_images_middle_frame() -> None:
    rotary = Rotary(12, axes=3)
    assert attention_kernel(table("2,4x4,1,3x3,1", scheme="mrope"), rotary).query == (2, 2)
    computed = attention_kernel(table("2,3x2x4,1", scheme="mrope"), rotary)
    assert (computed.query, computed.patches.shape, computed.patches[1, 2]) == ((1, 2), (2, 4), 1)
    same = attention_kernel(table("2,3x2x4,1", scheme="mrope"), rotary, token=2 + 8 + 6)
    assert (computed.patches == same.patches).all()
    assert (computed.before == same.before).all()


def test_a_kernel_covers_only_the_text_next_to_the_image() -> None:
    computed = attention_kernel(table("7,2x2,3,2x3,5"), Rotary(8), token=16)
    assert (computed.query, computed.patches.shape, computed.before.size, computed.after.size) == ((0, 2), (2, 3), 3, 5)
    padded = attention_kernel(table("7,2x2,3").pad(20), Rotary(8))
    assert (padded.before.size, padded.after.size) == (7, 3)


CUT = "positions: got a cut image at token {}, want a complete one"


@pytest.mark.parametrize(
    ("positions", "token", "error", "message"),
    [
        (table("1", "2x2"), None, InvalidInputError, "positions: got 2 documents, want 1"),
        (table("3"), None, InvalidInputError, "positions: got no image, want at least one"),
        (table("3,2x2"), 2, InvalidInputError, "token: got 2, which is text, want a patch of an image"),
        (table("3,2x2"), 7, InvalidInputError, "token: got 7, want <= 6"),
        (table("3,2x2").slice(0, 6), None, InvalidInputError, CUT.format(3)),
        (table("3,2x2").slice(4, 7), 0, InvalidInputError, CUT.format(0)),
        (table("3x2x2", scheme="grid-2d").slice(2, 10), 0, InvalidInputError, CUT.format(0)),
        (table("3,2x2", scheme="mrope"), None, InvalidInputError, "positions: got 3 axes, want 2 as in rotary"),
        (table("65536,2x2"), None, LimitExceededError, "positions: got 65540 tokens, want at most 65536"),
    ],
)
def test_invalid_positions_and_tokens_are_refused(
    positions: PositionTable, token: int | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        attention_kernel(positions, Rotary(8), token)
    assert str(caught.value) == message


def kernel(label: str, **changed: Any) -> Kernel:
    patches = np.linspace(0.2, 1, 12).reshape(3, 4)
    values = {"query": (2, 3), "patches": patches, "before": patches[0], "after": patches[1]}
    return Kernel(label, **{**values, **changed})


def test_maps_share_one_scale_from_the_smallest_cosine_to_one() -> None:
    pytest.importorskip("matplotlib")
    flat = kernel("flat", patches=np.full((3, 4), 0.6))
    figure = plot_attention([kernel("low"), *[flat] * 4])  # two rows, the last one incomplete
    maps = [axes.images[0] for axes in figure.axes if axes.images]
    assert [image.get_clim() for image in maps] == [(0.2, 1)] * 5
    assert [np.asarray(image.get_array()).tolist() for image in maps][1] == [[0.6] * 4] * 3
