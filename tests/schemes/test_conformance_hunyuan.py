"""Conformance: HunyuanImage-3.0's truncated RoPE-Tie-v2, against loops over what its code does."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from oracle import Document, exact, placed
from tolerance import assert_within, cos_sin

import mmpos.rotary
from mmpos import Grid, SegmentTable, Text, place
from mmpos.rotary import Rotary
from mmpos.schemes import RopeTieV2

FLOORED = RopeTieV2(rounding="floor")


def hunyuan(document: Document) -> list[tuple[int, int]]:
    """(y, x) per token: text at its index; an image from index L at L + (wh − h)/2 + i, L + (wh − w)/2 + j, truncated.

    Source: build_2d_rope of Tencent-Hunyuan/HunyuanImage-3.0, commit 5848fb47.
    """
    ids: list[tuple[int, int]] = []
    for part in document:
        start = len(ids)
        if isinstance(part, Text):
            ids += [(start + k, start + k) for k in range(part.length)]
        else:
            h, w = part.height, part.width
            y, x = start + (w * h - h) / 2, start + (w * h - w) / 2
            ids += [(int(y + i), int(x + j)) for i in range(h) for j in range(w)]
    return ids


def random_document(random: Random) -> Document:
    document: Document = [Text(random.randint(1, 5))]
    for _ in range(random.randint(0, 3)):
        document += [Grid(random.randint(1, 7), random.randint(1, 7)), Text(random.randint(1, 5))]
    return document


@pytest.mark.usefixtures("way")
def test_floored_v2_is_what_hunyuan_image_computes() -> None:
    random = Random(0)
    documents = [random_document(random) for _ in range(300)]
    dense = place(SegmentTable.from_documents(documents), FLOORED).dense()
    assert dense.dtype == np.int32
    np.testing.assert_array_equal(dense.T, np.concatenate([hunyuan(document) for document in documents]))


def test_the_floor_loses_the_symmetry_where_one_side_is_odd_and_the_other_even() -> None:
    for h in range(1, 7):
        for w in range(1, 7):
            document: Document = [Text(4), Grid(h, w), Text(1)]
            half = placed(document, "rope-tie-v2")
            floored = placed(document, FLOORED)
            gaps = [[(ids[4][a] - 3, ids[-1][a] - ids[-2][a]) for a in (0, 1)] for ids in (exact(half), exact(floored))]
            assert all(left == right for left, right in gaps[0])
            assert any(left != right for left, right in gaps[1]) == ((h + w) % 2 == 1)
    two_by_three = exact(placed([Text(4), Grid(2, 3), Text(1)], FLOORED))
    assert [two_by_three[4], two_by_three[9], two_by_three[10]] == [(6, 5), (7, 7), (10, 10)]  # columns: 2 and 3


def test_even_frequencies_turn_by_rows_and_odd_ones_by_columns() -> None:
    document: Document = [Text(3), Grid(3, 4), Text(2)]
    ids = torch.tensor(hunyuan(document))
    theta = 1.0 / (10000 ** (torch.arange(0, 128, 2).float() / 128))
    angle = torch.stack([ids[:, j % 2] * theta[j] for j in range(64)], dim=1).repeat(1, 2)
    rotary = Rotary(head_dim=128, theta=10000.0, axes=2, allocation="interleaved", pairing="half", precision="hf")
    cos, sin = mmpos.rotary.cos_sin(rotary, placed(document, FLOORED), layout="transformers")
    assert_within((cos[0], sin[0]), (angle.cos(), angle.sin()), cos_sin())


def test_fractional_ids_in_bfloat16_are_another_place_and_tables_are_integers() -> None:
    assert torch.tensor(100000.75).to(torch.bfloat16).item() == 99840
    positions = placed([Text(100_000), Grid(2, 3), Text(1)], "rope-tie-v2")
    assert positions.table.dtype == np.int64
    assert exact(positions.slice(100_000, 100_001)) == [(100_002, 100_001 + 1 / 2)]
