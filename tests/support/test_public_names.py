"""The public names, what importing them requires, and the name of the distribution wherever it is written."""

import re
import subprocess
import sys
import tomllib
import warnings
from importlib import import_module, metadata
from pathlib import Path

import pytest

import mmpos
from mmpos.__main__ import main
from mmpos.support.extras import lazy_names, needed_for

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = [*(ROOT / "mmpos").rglob("*.py"), *(ROOT / "server").rglob("*.py")]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"]


def python(code: str) -> str:
    """Run a program that prints nothing to stderr, and return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == ""
    return done.stdout


def test_names_of_the_root_exist_and_its_packages_are_imported_on_first_access() -> None:
    assert all(hasattr(mmpos, name) for name in mmpos.__all__)
    assert set(mmpos.__all__) <= set(dir(mmpos))
    rooms = ["analysis", "client", "data", "encodings", "integrations", "rotary", "schemes"]
    code = "import mmpos; print([getattr(mmpos, name).__name__ for name in {0}], {{*{0}}} - {{*dir(mmpos)}})"
    assert python(code.format(rooms)) == f"{[f'mmpos.{name}' for name in rooms]} set()\n"
    with pytest.raises(AttributeError, match="module 'mmpos' has no attribute 'nonsense'"):
        _ = mmpos.nonsense  # type: ignore[attr-defined]


def test_importing_mmpos_requires_only_numpy() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys("torch torchvision PIL triton grpc google typer matplotlib".split()))
import mmpos
print(mmpos.SequenceBuilder().build(["a", mmpos.Grid(1, 2)]).positions.dense().tolist())
"""
    assert python(code) == "[[0, 1, 4, 4, 7], [0, 1, 3, 5, 7]]\n"


def test_a_missing_package_raises_an_error_with_its_name_and_the_pip_command() -> None:
    with pytest.raises(ImportError) as raised, needed_for("ducks", extra="pond"):
        import_module("no_such_package")
    commands = 'pip install "multimodal-positions[pond]" (in a clone: pip install ".[pond]")'
    assert str(raised.value) == f"ducks: no_such_package is not installed; install it with: {commands}"
    assert raised.value.name == "no_such_package"
    assert type(raised.value) is ImportError


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudart.so: no such file", name="torch"),  # installed, but broken
        ModuleNotFoundError("could not import", name=None),  # raised by the package itself
        ModuleNotFoundError("No module named 'mmpos.nothing'", name="mmpos.nothing"),  # our own mistake
        ModuleNotFoundError("No module named 'mmpos_server.nothing'", name="mmpos_server.nothing"),
    ],
    ids=str,
)
def test_other_import_errors_are_left_unchanged(error: ImportError) -> None:
    with pytest.raises(ImportError) as raised, needed_for("ducks", extra="pond"):
        raise error
    assert raised.value is error


def test_lazy_names_are_imported_on_first_access(monkeypatch: pytest.MonkeyPatch) -> None:
    get, names = lazy_names("mmpos.sequence", {"video": "video", "Video": "video", "Duck": "pond"}, extra="hf")
    assert (get("video"), get("Video")) == (import_module("mmpos.sequence.video"), mmpos.Video)
    assert {"video", "Video", "Duck", "SequenceBuilder"} <= set(names())
    with pytest.raises(AttributeError, match=r"^module 'mmpos.sequence' has no attribute 'Goose'$"):
        get("Goose")
    with pytest.raises(ModuleNotFoundError, match=r"mmpos\.sequence\.pond"):  # our own mistake, no missing package
        get("Duck")
    monkeypatch.delitem(vars(mmpos), "fingerprint", raising=False)
    listed, first = dir(mmpos), mmpos.fingerprint
    monkeypatch.setattr(mmpos, "__getattr__", None)
    assert (dir(mmpos), mmpos.fingerprint) == (listed, first)


def test_only_one_module_writes_pip_commands_and_every_extra_has_one() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in SOURCES}
    assert [name for name, text in texts.items() if "pip install" in text] == ["mmpos/support/extras.py"]
    hinting = "\n".join(text for text in texts.values() if "mmpos.support.extras" in text)
    named = re.findall(r"""(?<!ConfigDict\()(?:\bextra=|pip_install\()["'](\w+)["']""", hinting)
    assert {*named, "otel"} == set(PROJECT["optional-dependencies"])  # for the program opentelemetry-instrument


def packages_of(extra: str) -> set[str]:
    """Return the names of the packages that an extra installs, including those of the extras that it names."""
    names: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        name, *extras = re.findall(r"[\w-]+", requirement.partition(">")[0])
        names |= {package for e in extras for package in packages_of(e)} if name == PROJECT["name"] else {name}
    return names


def test_only_the_extra_server_installs_the_server() -> None:
    client = {"grpcio", "grpcio-health-checking", "protobuf"}
    assert packages_of("all") == {*client, "pillow", "torch", "torchvision", "triton"}
    own = packages_of("server") - packages_of("all") - packages_of("cli")
    assert own == {"cryptography", "grpcio-reflection", "prometheus-client"}
    others = PROJECT["optional-dependencies"].keys() - {"server"}
    assert [extra for extra in others if own & packages_of(extra)] == []


def test_the_versions_tested_together_are_releases() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    early = [name for name, version in pins.items() if re.search(r"\d(a|b|rc)\d|dev", version)]
    assert [name for name in early if not name.startswith("opentelemetry-")] == []  # never released except as betas


def test_the_install_page_lists_every_extra() -> None:
    table = (ROOT / "docs/install.md").read_text().partition("| extra | installs |")[2].partition("\n\n")[0]
    listed = [extra for row in table.splitlines()[2:] for extra in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pip_commands_on_a_page_name_the_distribution_and_its_extras(path: Path) -> None:
    text = path.read_text()
    commands = re.findall(r"([\w.-]+)\[([a-z,]+)\]", " ".join(re.findall(r"pip install [^`#\n]*", text)))
    for name, extras in commands:
        assert name in (PROJECT["name"], "."), name
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), extras
    assert not re.search(r"pip install (-\S+ )*[\"']?mmpos\b(?!`)|\bmmpos\[", text)


def test_all_files_that_state_a_version_state_the_project_version() -> None:
    assert mmpos.__version__ == mmpos.info()["mmpos"] == metadata.version("multimodal-positions") == PROJECT["version"]
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert re.fullmatch(rf"## {re.escape(PROJECT['version'])} \((unreleased|\d{{4}}-\d\d-\d\d)\)", heading)
    copies = [
        copy
        for name in ("CITATION.cff", "deploy/helm/Chart.yaml", "deploy/kubernetes.yaml")
        for copy in re.findall(
            r"(?:^version: |^appVersion: |image: mmpos:)(\S+)$", (ROOT / name).read_text(), re.MULTILINE
        )
    ]
    assert copies == [PROJECT["version"]] * 4


def test_release_notes_are_the_first_section_of_the_changelog() -> None:
    done = subprocess.run(["make", "-s", "release-notes"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout in (ROOT / "CHANGELOG.md").read_text()
    assert [line for line in done.stdout.splitlines() if line.startswith("## ")] == done.stdout.splitlines()[:1]


def test_another_distribution_with_the_same_import_name_raises_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = mmpos.info()
    other = tmp_path / "mmpos-0.2.3.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: mmpos\nVersion: 0.2.3\n")
    (other / "top_level.txt").write_text("mmpos\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = (
        "import mmpos: got it from mmpos, multimodal-positions, want multimodal-positions alone: "
        "pip uninstall mmpos multimodal-positions, then install multimodal-positions again"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        assert mmpos.info() == alone
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["info"]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"mmpos: warning: {message}\n"
    assert captured.out.splitlines()[0].split() == ["mmpos", PROJECT["version"]]


def test_info_needs_no_typer_and_no_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("mmpos.cli")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("typer", "rich"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["info"]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed == mmpos.info()
    assert printed.keys() >= {"mmpos", "python", "machine", "extension", "numpy", "av", "datasets", "pyarrow"}
