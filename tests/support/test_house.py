"""The house as CONTRIBUTING.md draws it: what its rules and README say of the code, counted."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import mmpos

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
WORDS = {13: "thirteen", 14: "fourteen", 15: "fifteen", 16: "sixteen"}


@cache
def modules() -> dict[str, ast.Module]:
    """Every file that is written by hand, by its name as a module."""
    found = {}
    for home, package in ((".", "mmpos"), ("server", "mmpos_server"), ("benchmarks", "mmpos_bench")):
        for path in sorted((ROOT / home / package).rglob("*.py")):
            if "_pb2" not in path.name:
                name = ".".join(path.relative_to(ROOT / home).with_suffix("").parts)
                found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}.{node.name}", node


def test_no_function_is_longer_than_sixty_lines() -> None:
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}


def test_no_two_classes_share_a_name() -> None:
    homes = defaultdict(list)
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_files_import_each_other_in_a_circle() -> None:
    # The pages of names, __init__.py, are no part of one: they import for others.
    files = {name: tree for name, tree in modules().items() if not name.startswith("mmpos_server.")}
    imported: dict[str, set[str]] = defaultdict(set)
    for module, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
                imported[module] |= names & files.keys()
    assert list(TopologicalSorter(imported).static_order())


def test_the_picture_of_the_house_has_every_room_and_no_other() -> None:
    (picture,) = re.findall(r"```text\nmmpos/\n(.*?)```", PAGES["CONTRIBUTING.md"], re.DOTALL)
    left = " ".join(re.findall(r"^  (\S.*?)   ", picture, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "mmpos").glob("*/__init__.py")}
    assert set(re.findall(r"(\w+)(?:/|\.py)", left)) == rooms | {path.stem for path in (ROOT / "mmpos").glob("*.py")}
    assert len(re.findall(r"^  \S", picture, re.MULTILINE)) <= 16
    assert f"the {WORDS[len(rooms)]} rooms of the package" in PAGES["README.md"]


def test_triton_is_named_by_the_kernels_alone() -> None:
    named = [
        module for module, tree in modules().items() if re.search(r"\bimport triton\b|from triton\b", ast.unparse(tree))
    ]
    assert {module.rpartition(".")[0] for module in named if module.startswith("mmpos.")} == {"mmpos.rotary.kernel"}


def test_the_schemes_are_as_many_as_the_pages_say() -> None:
    assert len(mmpos.SCHEMES) == 20
    assert "RoPE-Tie, M-RoPE and eighteen\nother schemes" in PAGES["README.md"]
    assert "the source of all twenty" in PAGES["README.md"]
