"""NeoMME: mmpos ids equal those of its processor and give the same logits."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from layouts import padded
from model_configs import CONFIGS, settings_of
from torch import Tensor
from transformers.models.neomme.processing_neomme import NeoMMEProcessor

import mmpos

ROW, WORD = 7, 9
"""The token ids for the end of a row, which only the tokenizer defines, and for text."""


def document_image(config: Any, height: int, width: int) -> list[int]:
    """Return the tokens that the processor writes for a page."""
    rows = [*[config.image_token_id] * width, ROW] * height
    return [config.document_token_id, config.image_token_id, *rows]


def processor_positions(config: Any, ids: Tensor, mask: Tensor, grids: list[tuple[int, int]]) -> Any:
    """Return the (2, batch, seq) ids of the processor."""
    tokenizer = SimpleNamespace(document_token_id=config.document_token_id, row_token_id=ROW)
    processor: Any = SimpleNamespace(
        image_token_id=config.image_token_id, tokenizer=tokenizer, _image_positions=NeoMMEProcessor._image_positions
    )
    return NeoMMEProcessor._build_position_ids(processor, ids, mask, grids)


def test_ids_equal_those_of_the_processor() -> None:
    settings, config, random = settings_of("neomme"), CONFIGS["neomme"](), Random(0)
    for _ in range(200):
        sizes = [
            random.choice([None, (random.randint(1, 5), random.randint(1, 5))]) for _ in range(random.randint(1, 4))
        ]
        rows = [[WORD] * random.randint(1, 30) if size is None else document_image(config, *size) for size in sizes]
        side = random.choice(["left", "right"])
        ids, mask = padded(rows, side), padded([[1] * len(row) for row in rows], side)
        grids = [size for size in sizes if size is not None]
        theirs, thw = processor_positions(config, ids, mask, grids), [(1, *size) for size in grids]
        ours = settings.place(settings.segments(ids, thw, attention_mask=mask)).dense().reshape(theirs.shape)
        np.testing.assert_array_equal(ours * mask.numpy(), (theirs * mask).numpy())
        packed, bounds = [token for row in rows for token in row], np.cumsum([0, *map(len, rows)])
        options: Any = {"cu_seqlens": bounds, "rows": random.choice([None, (ROW, ROW)])}
        ours = settings.place(settings.segments(packed, thw, **options)).dense()
        np.testing.assert_array_equal(ours, theirs.numpy()[:, mask.numpy() == 1])


@pytest.mark.parametrize(
    ("page", "grid", "message"),
    [
        ([5, 6, 6, 6, ROW, 6, 6, WORD], (2, 2), "got a run of 5 placeholders at document 0, token 2, want 6"),
        ([5, 6, 6, 6, ROW], (2, 2), "got a run of 3 placeholders at document 0, token 2, want 6"),
        ([5, 6, 6, 6], (1, 2), "got a run of 2 placeholders at document 0, token 2, want 3"),
    ],
)
def test_pages_that_do_not_fit_their_grids_are_refused(page: list[int], grid: tuple[int, int], message: str) -> None:
    with pytest.raises(mmpos.InvalidInputError) as caught:
        settings_of("neomme").segments(page, [(1, *grid)], rows=(ROW, ROW))
    assert message in str(caught.value)
