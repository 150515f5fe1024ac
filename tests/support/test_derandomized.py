"""Property tests draw the same examples in every run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def drawn() -> list[int]:
    numbers = list[int]()

    @given(st.integers())
    def draw(number: int) -> None:
        numbers.append(number)

    draw()
    return numbers


def test_examples_do_not_depend_on_the_modules_that_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn()
    (tmp_path / "with_constants.py").write_text(f"NUMBERS = {[*range(2**40, 2**40 + 500)]}")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_module("with_constants").NUMBERS
    assert drawn() == before
