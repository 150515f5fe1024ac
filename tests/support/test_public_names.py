"""The public names, and the packages that importing them requires."""

import subprocess
import sys
from pathlib import Path

import pytest

import mmpos

ROOT = Path(__file__).parents[2]
ROOMS = ["analysis", "client", "data", "encodings", "integrations", "rotary", "schemes"]


def python(code: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout, done.stderr


def test_all_public_names_exist() -> None:
    assert all(hasattr(mmpos, name) for name in mmpos.__all__)
    assert set(mmpos.__all__) <= set(dir(mmpos))


def test_subpackages_are_imported_on_first_access() -> None:
    code = f"""
import mmpos
for name in {ROOMS}:
    assert getattr(mmpos, name).__name__ == "mmpos." + name
    assert name in dir(mmpos)
"""
    assert python(code) == ("", "")
    with pytest.raises(AttributeError, match="module 'mmpos' has no attribute 'nonsense'"):
        _ = mmpos.nonsense  # type: ignore[attr-defined]


def test_importing_mmpos_requires_only_numpy() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys("torch torchvision PIL triton grpc google typer matplotlib".split()))
import mmpos
print(mmpos.SequenceBuilder().build(["a", mmpos.Grid(1, 2)]).positions.dense().tolist())
"""
    assert python(code) == ("[[0, 1, 4, 4, 7], [0, 1, 3, 5, 7]]\n", "")
