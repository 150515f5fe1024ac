"""TRL's trainer on rollouts: the trainer's positions must equal those of the rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")

import trl_rollouts
from tiny_qwen3_vl import make_model
from tiny_vlm_task import load_photos

pytestmark = pytest.mark.slow


def test_a_trainer_whose_positions_differ_from_the_rollout_is_refused(tmp_path: Path) -> None:
    model = make_model()
    records = trl_rollouts.roll_out(model, load_photos()[:2], copies=2)
    trl_rollouts.train(model, records, str(tmp_path))
    with pytest.raises(ValueError, match="the trainer's positions differ from the rollout's"):
        trl_rollouts.train(model, records, str(tmp_path), mistake=True)
