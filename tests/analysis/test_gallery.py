"""The gallery: its commands draw its pictures, and no picture is missing or unused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from pictures import pixels

testing = pytest.importorskip("typer.testing")
matplotlib = pytest.importorskip("matplotlib")
app = pytest.importorskip("mmpos.cli").app

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "gallery.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in PAGE.splitlines() if line.startswith("mmpos plot ")]


def test_every_command_is_followed_by_its_picture() -> None:
    blocks = re.findall(r"^```sh\nmmpos plot .* -o (\S+)\n```\n\n!\[.+\]\(gallery/(\S+)\)$", PAGE, re.MULTILINE)
    assert [written for written, _ in blocks] == [shown for _, shown in blocks]
    assert len(blocks) == len(COMMANDS) == PAGE.count("```sh") == PAGE.count("![")
    assert sorted(path.name for path in (DOCS / "gallery").iterdir()) == sorted(written for written, _ in blocks)


@pytest.mark.skipif(matplotlib.__version_info__ < (3, 11), reason="Matplotlib 3.10 draws text a little otherwise")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command[-1]))
def test_a_command_draws_the_picture_below_it(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert testing.CliRunner().invoke(app, command[1:]).exit_code == 0
    drawn, kept = pixels(tmp_path / command[-1]), pixels(DOCS / "gallery" / command[-1])
    # Cosines computed on another processor may change a shade slightly; one extra letter changes a hundred times as
    # much.
    assert drawn.shape == kept.shape
    assert np.abs(drawn.astype(np.int16) - kept).mean() < 2e-4


def test_pictures_are_small() -> None:
    assert sum(path.stat().st_size for path in (DOCS / "gallery").iterdir()) < 1_700_000
