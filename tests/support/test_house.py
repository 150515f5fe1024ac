"""The rules in CONTRIBUTING.md, and the counts in CONTRIBUTING.md and README.md, compared with the code."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import mmpos

ROOT = Path(__file__).parents[2]
CONTRIB = sorted(path.parent for path in ROOT.glob("contrib/*/pyproject.toml"))
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
WORDS = {13: "thirteen", 14: "fourteen", 15: "fifteen", 16: "sixteen"}


@cache
def modules() -> dict[str, ast.Module]:
    """Parse every hand-written file, and return the trees by module name."""
    trees = {}
    homes = [(".", "mmpos"), ("server", "mmpos_server"), ("benchmarks", "mmpos_bench")]
    for home, package in homes + [(f"contrib/{path.name}", f"mmpos_{path.name}") for path in CONTRIB]:
        for path in sorted((ROOT / home / package).rglob("*.py")):
            if "_pb2" not in path.name:
                name = ".".join(path.relative_to(ROOT / home).with_suffix("").parts)
                trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


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
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}
"""Documented Python names that begin with an underscore."""

ALLOWED = {
    "mmpos.integrations.hf.patching": {"anatomy.base._forward_pre_hooks"},  # a hook is not added twice
    "mmpos.rotary.device": {"torch._C"},  # no public function reports whether a torch mode observes operators
    # Without a dual level, no tensor has a tangent, and unpacking q and k would take 2 of 9 µs.
    "mmpos.rotary.memory": {"torch._C", "_len_torch_dispatch_stack", "_current_level"},
    "mmpos_bench.cuda": {"torch.cuda._sleep"},  # keeps a stream busy for a known time
}
"""Exceptions to rule 8 of CONTRIBUTING.md, by module, each with its reason."""


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield the underscored modules and names of other projects that a file uses."""

    def private(name: object) -> bool:
        text = str(name)
        return text.startswith("_") and not text.endswith("__") and text not in own | PUBLIC

    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = "" if isinstance(node, ast.Import) else f"{node.module}."
            paths = (f"{home}{alias.name}" for alias in node.names)
            yield from (path for path in paths if any(map(private, path.split("."))))
        elif isinstance(node, ast.Attribute) and private(node.attr):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            named = (str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant))
            yield from filter(private, named)


def test_private_names_of_other_projects_are_used_only_where_allowed() -> None:
    own = {name.rpartition(".")[2] for name, _ in functions()}
    for module, tree in modules().items():
        own.add(module.rpartition(".")[2])
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.id if isinstance(node, ast.Name) else node.attr)
    used = {module: {*private_names(tree, own)} for module, tree in modules().items()}
    used = {module: names for module, names in used.items() if names}
    assert used.keys() == ALLOWED.keys(), used
    for module, names in used.items():
        assert all(any(allowed in name for allowed in ALLOWED[module]) for name in names), names
    rooms = ("mmpos_server", "mmpos.client", "mmpos.rpc")
    texts = {module: ast.unparse(tree) for module, tree in modules().items() if module.startswith(rooms)}
    assert {module for module, text in texts.items() if re.search(r"grpc\._|cygrpc", text)} == set()
    wrong = private_names(ast.parse("import grpc._x\nfrom asyncio import _y\na.b._z\ngetattr(a, '_w')"), set())
    assert sorted(wrong) == ["_w", "a.b._z", "asyncio._y", "grpc._x"]


def test_there_are_no_import_cycles() -> None:
    # __init__.py files are excluded, since they only import names for users.
    files = {name: tree for name, tree in modules().items() if not name.startswith("mmpos_server.")}
    imported: dict[str, set[str]] = defaultdict(set)
    for module, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                imported[module] |= names & files.keys()
    assert list(TopologicalSorter(imported).static_order())


def test_the_tree_in_contributing_lists_exactly_the_packages() -> None:
    (picture,) = re.findall(r"```text\nmmpos/\n(.*?)```", PAGES["CONTRIBUTING.md"], re.DOTALL)
    left = " ".join(re.findall(r"^  (\S.*?)   ", picture, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "mmpos").glob("*/__init__.py")}
    assert set(re.findall(r"(\w+)(?:/|\.py)", left)) == rooms | {path.stem for path in (ROOT / "mmpos").glob("*.py")}
    assert len(re.findall(r"^  \S", picture, re.MULTILINE)) <= 16
    assert f"the {WORDS[len(rooms)]} subpackages" in PAGES["README.md"]


def test_the_layers_in_contributing_match_those_checked_by_the_linter() -> None:
    (contract, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert contract["type"] == "layers"
    assert "```text\n" + "\n".join(contract["layers"]) + "\n```" in PAGES["CONTRIBUTING.md"]


def test_only_the_kernels_import_triton() -> None:
    named = [
        module for module, tree in modules().items() if re.search(r"\bimport triton\b|from triton\b", ast.unparse(tree))
    ]
    assert {module.rpartition(".")[0] for module in named if module.startswith("mmpos.")} == {"mmpos.rotary.kernel"}


def public_names() -> dict[str, set[str]]:
    """Return the names in ``__all__`` of the packages in the API reference, whose page of mmpos covers three."""
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference/api").glob("*.md"))
    named = {"mmpos", "mmpos.positions", "mmpos.sequence", *re.findall(r"^::: (mmpos\.[\w.]+)$", text, re.MULTILINE)}
    return {name: {*import_module(name).__all__} for name in named if {name, f"{name}.__init__"} & modules().keys()}


def hidden_names(tree: ast.Module, public: dict[str, set[str]]) -> Iterator[str]:
    """Yield the imports and attributes of mmpos in a file that are not public names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "mmpos"]
            yield from (name for name in names if name != "mmpos" or len(node.names) > 1)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mmpos":
            names = [alias.name for alias in node.names]
            yield from (f"{node.module}.{name}" for name in names if name not in public.get(node.module or "", ()))
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"mmpos(\.\w+)+", path := ast.unparse(node)):
            room, _, name = path.rpartition(".")
            if path not in public and room in public and name not in public[room]:
                yield path


def test_contrib_imports_only_public_names_of_mmpos() -> None:
    public = public_names()
    assert len(public) >= 15
    for path in sorted(ROOT.glob("contrib/**/*.py")):
        hidden = [*hidden_names(ast.parse(path.read_text(encoding="utf-8")), public)]
        assert hidden == [], path.relative_to(ROOT)
    wrong = (
        "import mmpos.support\nimport mmpos as m, os\nfrom mmpos.support.checks import integer\nfrom mmpos import cli\n"
        "from mmpos.schemes.tie import RopeTie\nfrom mmpos.schemes import RopeTie, checked_rate\nmmpos.support\n"
        "import mmpos\nmmpos.place(mmpos.rotary.Rotary(head_dim=8).inv_freq)\nmmpos.rotary.config\n"
    )
    assert sorted(hidden_names(ast.parse(wrong), public)) == [
        *("mmpos", "mmpos.cli", "mmpos.rotary.config", "mmpos.schemes.checked_rate", "mmpos.schemes.tie.RopeTie"),
        *("mmpos.support", "mmpos.support", "mmpos.support.checks.integer"),
    ]


def test_each_distribution_of_contrib_has_a_project_a_page_a_package_and_tests() -> None:
    for folder in CONTRIB:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["name"] == f"mmpos-{folder.name}"
        assert any(re.match(r"multimodal-positions\b", requirement) for requirement in project["dependencies"])
        package = folder / f"mmpos_{folder.name}"
        for path in (folder / "README.md", package / "__init__.py", package / "py.typed"):
            assert path.is_file(), path.relative_to(ROOT)
        assert {*folder.glob("tests/test_*.py")}, folder.name


def test_the_readme_counts_the_schemes() -> None:
    assert len(mmpos.SCHEMES) == 43
    assert "RoPE-Tie, M-RoPE and forty-one other schemes" in " ".join(PAGES["README.md"].split())
    assert "the source of all forty-three" in PAGES["README.md"]


PHRASES = tomllib.loads((ROOT / "tests/support/phrases.toml").read_text(encoding="utf-8"))


def objections(path: str, text: str) -> Iterator[str]:
    """Yield every violation of phrases.toml in a file, each with its line number."""
    for phrase in PHRASES["phrases"]:
        for match in re.finditer(phrase.replace(" ", r"\s+(?:(?:#:?|//|\*|\") )?"), text):
            yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())}"
    if not path.endswith(".py"):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split("\n")[0]
            free = node.name.startswith("test_") or any("property" in ast.unparse(name) for name in node.decorator_list)
            if re.match(PHRASES["beginnings"], words) and not free:
                yield f"{path}:{node.lineno}: {words}"
            if node.name.startswith("test_") and any(word in node.name for word in PHRASES["test_names"]):
                yield f"{path}:{node.lineno}: {node.name}"
        elif isinstance(node, ast.arg) and node.arg in PHRASES["names"]:
            yield f"{path}:{node.lineno}: {node.arg}"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PHRASES["names"]:
            yield f"{path}:{node.lineno}: {node.id}"


def test_files_use_plain_english() -> None:
    rooms = ("mmpos", "server", "benchmarks", "contrib", "csrc", "proto/mmpos", "deploy", "docs", "tests", "examples")
    kinds = {".py", ".c", ".h", ".proto", ".md", ".toml", ".yaml"}
    files = [path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in kinds]
    wrong = [*objections("README.md", PAGES["README.md"])]
    for path in sorted(files):
        name = path.relative_to(ROOT).as_posix()
        if name != "tests/support/phrases.toml" and "_pb2" not in name and "node_modules" not in name:
            wrong += objections(name, path.read_text(encoding="utf-8"))
    assert wrong == []
    bad = 'def f(given):\n    """Of a shard, so\n    many."""\n    found = 1\n'
    assert len([*objections("a.py", bad)]) == 4


def test_limits_of_time_in_tests_are_at_least_five_minutes() -> None:
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("contrib/*/tests/*.py")]:
        waits = re.findall(r"(?:\btimeout=|\b(?:wait|join)\()(\d+)\b", path.read_text(encoding="utf-8"))
        short = [seconds for seconds in map(int, waits) if 10 < seconds < 300]  # shorter limits are those under test
        assert short == [], path.relative_to(ROOT)


BUDGET = tomllib.loads((ROOT / "tests/support/budget.toml").read_text(encoding="utf-8"))


def test_no_room_exceeds_its_budget_of_lines() -> None:
    """A file belongs to the room with the longest path that contains it."""
    rooms = {**BUDGET["product"], **BUDGET["tests"]}
    lines = dict.fromkeys(rooms, 0)
    for top in {Path(room).parts[0] for room in rooms}:
        for path in (ROOT / top).rglob("*"):
            name = path.relative_to(ROOT)
            if path.suffix in {".py", ".c", ".h"} and "_pb2" not in path.name and "node_modules" not in name.parts:
                room = next((str(home) for home in name.parents if str(home) in rooms), None)
                assert room is not None, f"{name} belongs to no room of tests/support/budget.toml"
                lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    assert {room: (lines[room], most) for room, most in rooms.items() if lines[room] > most} == {}
    assert [room for room in rooms if not lines[room]] == []


def test_the_pages_do_not_exceed_their_budget_of_words() -> None:
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md"))
    assert words <= BUDGET["words"]["docs"]
