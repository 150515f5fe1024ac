"""The notebooks in docs/ contain the outputs of their own cells."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from notebooks import FOLDER, execute


def outputs(notebook: nbformat.NotebookNode) -> list[list[object]]:
    """Return the text or data output by each code cell."""
    return [
        [output.get("text", output.get("data")) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_its_stored_outputs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    assert outputs(execute(path)) == outputs(nbformat.read(path, as_version=4))
