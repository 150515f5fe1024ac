"""Repeated calls of a known form launch the same kernels and raise the same errors as first calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HELPER = Path(__file__).parents[1] / "helpers/launches_again.py"


def test_calls_of_a_known_form_launch_the_same_kernels_and_raise_the_same_errors_as_first_calls() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(HELPER)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["different"] == []
    assert facts["straight"] > 100
    assert facts["forms"] > 50
    assert facts["few"]
    assert facts["refused"] == [
        "k: got the memory of q, want inplace=False",
        "inplace: got 1, want True or False",
        "layout: got [], want one of 'thd', 'bshd', 'bhsd'",
        "norm.eps: got [], want an int or float from 2⁻¹²⁶ to 2¹²⁷",
        "conjugate: got 0, want True or False",
        "q: got a forward-mode tangent, want reverse-mode gradients",
        "slot_mapping[2]: got 1, the slot of token 1, want a slot for each token",
        "slot_mapping[3]: got 8, want < 8, the number of slots of key_cache",
    ]
