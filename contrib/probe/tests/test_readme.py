"""The README's program, and its list of model types."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mmpos_probe.checkpoint import PROCESSORS

PAGE = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_program_prints_the_text_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)[0]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == output


def test_the_page_is_short_and_lists_every_model_type_with_images() -> None:
    assert len(PAGE.split()) <= 1000
    assert ", ".join(PROCESSORS) in " ".join(PAGE.split())
