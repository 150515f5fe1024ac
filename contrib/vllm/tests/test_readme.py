"""The README's program prints the text after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_program_prints_the_text_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    ((code, output),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == output
    assert len(PAGE.split()) <= 600
