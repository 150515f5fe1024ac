"""Schemes on the command line: with parameters, user-defined, and given in the file with the documents."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from own_schemes import OWN
from scheme_properties import every_scheme

from mmpos.cli.options import make_scheme
from mmpos.errors import InvalidInputError
from mmpos.schemes import Grid2D, MRopeQwen25, RopeTie, RopeTieV2

Printed = Callable[..., str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working folder that contains modules, and forget the modules of other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own", "broken", "ends"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("syntax error")
    (tmp_path / "ends.py").write_text("raise SystemExit(0)")
    return tmp_path


def test_every_scheme_can_be_built_from_its_label() -> None:
    schemes = [*every_scheme(), RopeTieV2(3, "floor"), Grid2D("merged", 2), MRopeQwen25(Fraction(25, 6))]
    assert [make_scheme(scheme.label) for scheme in schemes] == schemes


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("rope-tie", RopeTie()),
        ("rope-tie,axes=3", RopeTie(3)),
        (" rope-tie-v2 , axes = 3 , rounding = 'floor' ", RopeTieV2(3, "floor")),
        ("rope-tie-v2,rounding=None", RopeTieV2()),
        ("mrope-qwen2.5,tokens_per_second=1/2", MRopeQwen25(Fraction(1, 2))),
        ("mmpos.schemes:RopeTie,axes=3", RopeTie(3)),
    ],
)
def test_names_accept_parameters(name: str, scheme: object) -> None:
    assert make_scheme(name) == scheme


WANT = "want the package.module:Class of a valid Scheme"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rope-tie,axes", "--scheme: got 'axes', want PARAMETER=VALUE after the comma"),
        ("rope-tie,axes=", "--scheme: got 'axes=', want PARAMETER=VALUE after the comma"),
        ("rope-tie,", "--scheme: got '', want PARAMETER=VALUE after the comma"),
        ("rope-tie,stride=2", "--scheme: got 'stride' of 'rope-tie', want axes"),
        ("flatten,axes=2", "--scheme: got 'axes' of 'flatten', want no parameter"),
        ("grid-2d,side=2", "--scheme: got 'side' of 'grid-2d', want order or spatial_merge_size or axes or first"),
        ("rope-tie,axes=4", "RopeTie.axes: got 4, want 2 or 3"),
        ("v2pe,stride=x", "V2PE.stride: got 'x', want an integer"),
        ("no.such:Thing", f"--scheme: got 'no.such:Thing' (ModuleNotFoundError: No module named 'no'), {WANT}"),
        ("own:Thing", f"--scheme: got 'own:Thing' (AttributeError: module 'own' has no attribute 'Thing'), {WANT}"),
        ("broken:X", f"--scheme: got 'broken:X' (SyntaxError: invalid syntax (broken.py, line 1)), {WANT}"),
        ("ends:X", f"--scheme: got 'ends:X' (SystemExit: 0), {WANT}"),
        (":", f"--scheme: got ':' (ValueError: Empty module name), {WANT}"),
        ("own:NUMBER", "--scheme: got 'own:NUMBER', which is int, want a Scheme"),
        ("own:Wide,step=1", "--scheme: got 'step' of 'own:Wide', want stride"),
        ("own:Failing", f"--scheme: got 'own:Failing' (KeyError: 'size'), {WANT}"),
        ("own:Nameless", "--scheme: got 'own:Nameless' without name, want a Scheme with name and axes"),
        ("own:Axisless", "--scheme: got 'own:Axisless' without axes, want a Scheme with name and axes"),
        ("own:Half", None),
    ],
)
def test_invalid_names_are_refused(name: str, message: str | None) -> None:
    with pytest.raises(InvalidInputError) as raised:
        make_scheme(name)
    assert str(raised.value) == message or (
        message is None and str(raised.value).startswith("--scheme: got 'own:Half' (TypeError: Can't instantiate")
    )


def test_user_defined_schemes_work_in_every_command(printed: Printed) -> None:
    batch = json.loads(printed("positions", "1,2x2,1", "-s", "own:Wide,stride=5", "--json"))
    assert batch["position_ids"] == [[0, 1, 1, 2, 2, 11], [0, 1, 6, 1, 6, 11]]
    assert batch["scheme"] == "own:Wide,stride=5"
    assert printed("explain", "1,2x2,1", "4", "-s", "own:WIDER").endswith("(2, 4) = (1, 1) + 1·(1, 0) + 1·(0, 3)\n")
    assert printed("plot", "ids", "1,2x2,1", "-s", "own:Wide", "-s", "rope-tie", "-o", "a.svg") == "a.svg\n"
    printed("positions", "1,2x2,1", "-s", "own:Wide", "-o", "ids.npy")
    assert printed("check", "ids.npy", "--spec", "1,2x2,1", "-s", "own:Wide").endswith("have the ids of wide.\n")


@pytest.mark.slow  # the worker processes import torch
def test_user_defined_schemes_work_in_preprocess_workers(
    run: Callable[..., tuple[int, str, str]], folder: Path
) -> None:
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    arguments = ["preprocess", "a.jsonl", "b.jsonl", "-o", "out", "-f", "chat", "-s", "own:Wide", "--workers", "2"]
    code, out, _ = run(*arguments)
    assert code == 0
    assert re.search(r"^documents +2$", out, re.MULTILINE)


def test_documents_keep_the_scheme_given_in_their_file(printed: Printed, folder: Path) -> None:
    first = printed("positions", "3,4x2x3,1", "-s", "rope-tie-v2,rounding=floor,axes=3", "--json")
    (folder / "first.json").write_text(first)
    assert printed("positions", "first.json", "--json") == first
    assert json.loads(printed("positions", "first.json", "5", "--json", "-s", "mrope"))["scheme"] == "mrope"
    np.save("ids.npy", json.loads(first)["position_ids"])
    output = printed("check", "ids.npy", "--spec", "first.json")
    assert output.endswith("have the ids of rope-tie-v2(axes=3, rounding=floor).\n")
    assert "in rope-tie-v2" not in printed("explain", "first.json", "3", "-s", "mrope")
    assert printed("plot", "ids", "first.json", "-o", "a.svg") == "a.svg\n"
    assert "rope-tie-v2" in (folder / "a.svg").read_text()


def test_files_must_agree_on_a_scheme(fail: Callable[..., tuple[int, str]], folder: Path) -> None:
    for name in ("mrope", "rows"):
        (folder / f"{name}.json").write_text(json.dumps({"documents": [[{"text": 1}]], "scheme": name}))
    two = "scheme: got 'mrope' in mrope.json, 'rows' in rows.json, want one for all documents"
    assert fail("positions", "mrope.json", "rows.json") == (2, two)
    (folder / "rows.json").write_text('{"documents": [[{"text": 1}]], "scheme": 3}')
    assert fail("positions", "rows.json") == (2, "rows.json: scheme: got 3, want a name")
