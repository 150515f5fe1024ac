"""Behaviour that all commands share: input and output streams, exit codes, shell completion and help."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.runtime_version import VersionError

from mmpos import info
from mmpos.__main__ import main
from mmpos.errors import ServiceOverloadedError
from mmpos.support.extras import pip_install
from mmpos.support.program import EXIT_CODES, run_program

ROOT = Path(__file__).parents[2]
PHOTO = Path(str(resources.files("mmpos"))) / "photos" / "chelsea.jpg"
Run = Callable[..., tuple[int, str, str]]
CAT_SPEC = "1,8x11,1"


def start(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> Any:
    """Run the program in another process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", **(env or {})}
    environment.pop("PYTHONUNBUFFERED", None)  # what is still in a buffer must not fail at exit
    command = [sys.executable, "-m", "mmpos", *arguments]
    return subprocess.run(command, env=environment, **{"capture_output": True, "check": False} | options)


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Set the standard input of the next command."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        (b"3,2x3,2\n\n 5 \n", ["3,2x3,2", "5"]),
        (b'\n {"documents": [[{"text": 3}, {"grid": [2, 3]}]]}', ["3,2x3"]),
        (PHOTO.read_bytes(), [CAT_SPEC]),
    ],
)
def test_documents_are_read_from_standard_input(
    data: bytes, arguments: list[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, data)
    assert run("positions", "-") == run("positions", *arguments)


def test_ids_are_read_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = io.BytesIO()
    np.save(ids, [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    feed(monkeypatch, ids.getvalue())
    equal = (0, "All 6 tokens of 1 document have the ids of mrope.\n", "")
    assert run("check", "-", "--spec", "1,2x2,1", "-s", "mrope") == equal


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (b"", "positions -", "standard input: got nothing, want specs (one per line), a JSON file or an image"),
        (b"3,x\n", "positions -", None),
        (b"{", "positions -", None),
        (b"\xff\xd8\xff", "positions -", None),
        (b"", "check - --spec 3", "standard input: got no .npy file, want an array saved with numpy.save"),
        (b"\x93NUMPY\x01\x00", "check - --spec 3", None),
    ],
)
def test_invalid_standard_input_is_a_one_line_error(
    data: bytes, arguments: str, message: str | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, data)
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(r"mmpos: error: (SPEC|standard input)[^\n]+\n", err)
    assert message is None or err == f"mmpos: error: {message}\n"


def test_ids_and_plots_are_written_to_standard_output(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    for command, file in (("positions 3,2x3,2 -s mrope", "ids.npy"), ("plot ids 3,2x3,2", "ids.png")):
        assert main([*command.split(), "-o", "-"]) == 0
        written = capsysbinary.readouterr()
        assert main([*command.split(), "-o", file]) == 0
        assert written == (Path(file).read_bytes(), b"")
        capsysbinary.readouterr()


def test_standard_output_is_refused_with_json_and_on_a_terminal(
    fail: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "--output - (standard output) cannot be combined with --json"
    assert fail("positions", "3", "--json", "-o", "-") == (2, refused)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    assert fail("positions", "3", "-o", "-") == (2, "-: standard output is a terminal, want a pipe or a file")


@pytest.mark.parametrize("arguments", [["positions", "3"], ["info"]])  # info runs without click
def test_a_closed_pipe_ends_the_program_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = start(*arguments, capture_output=False, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="requires a shell and /dev/full")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("positions 3 >/dev/full", 1, "mmpos: error: No space left on device\n"),
        ("positions 3 -o - >/dev/full", 1, "mmpos: error: No space left on device\n"),
        ("positions 3 >&-", 0, ""),
        ("positions - <&-", 2, "mmpos: error: -: standard input is closed\n"),
        ("positions 3 --bogus 2>&-", 2, ""),
    ],
)
def test_standard_streams_may_be_full_or_closed(arguments: str, code: int, message: str) -> None:
    command = ["sh", "-c", f'"$0" -m mmpos {arguments}', sys.executable]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (code, b"", message)


def ends(error: BaseException) -> Callable[..., Any]:
    """Return a function that returns an app which raises this error."""

    def app(**options: object) -> None:
        raise error

    return lambda: app


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ServiceOverloadedError("max_pending: got too many", 1.0), 4, "error: max_pending: got too many\n"),
        (PermissionError(13, "Permission denied", "here.png"), 1, "error: here.png: Permission denied\n"),
        (OSError("no disk at all"), 1, "error: no disk at all\n"),
        (MemoryError("Unable to allocate 8 EiB"), 1, "error: Unable to allocate 8 EiB\n"),
        (MemoryError(), 1, "error: not enough memory\n"),
        (ImportError("no paint: pip install paint", name="rich"), 1, "error: no paint: pip install paint\n"),
        (
            VersionError("Detected incompatible versions."),
            1,
            "error: Detected incompatible versions. Install all packages that need protobuf in one command: "
            f"{pip_install('server')}\n",
        ),
    ],
)
def test_every_error_produces_an_exit_code_and_at_most_one_line(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError):  # an unexpected error keeps its traceback
        run_program("mmpos", ends(ZeroDivisionError()), [])
    assert run_program("mmpos", ends(error), []) == code
    assert code in EXIT_CODES
    assert capsys.readouterr() == ("", message and f"mmpos: {message}")


@pytest.mark.slow  # five processes
@pytest.mark.parametrize(
    ("package", "command"),
    [
        *((package, ["-m", "mmpos", "positions", "3"]) for package in ("numpy", "rich", "typer")),
        ("numpy", ["-m", "mmpos_server"]),
        ("numpy", ["-c", "import sys; from mmpos.__main__ import main; sys.exit(main(['info']))"]),
    ],
)
def test_ctrl_c_during_imports_is_quiet(package: str, command: list[str], folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(
        "import signal, sys\nfrom importlib.abc import MetaPathFinder\n"
        "class Interrupt(MetaPathFinder):\n    def find_spec(self, name, *_):\n"
        f"        if name == '{package}':\n            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_an_ascii_terminal_shows_similar_characters(run: Run) -> None:
    assert run_program("mmpos", lambda: lambda **_: 0, []) == 0  # registers the error handler
    assert "✓ ✗ 2×3–4…·−² ≥→ ⌊δ⌋ é 図 \udcff".encode("ascii", "mmpos.similar") == (
        rb"y n 2x3-4...*-\xb2 >=-> floor(delta) \xe9 \u56f3 \udcff"
    )
    for arguments in (["positions", "3,2x3,2"], ["positions", "2×é"]):
        code, *texts = run(*arguments)
        done = start(*arguments, env={"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "LC_ALL": "C.UTF-8"})
        assert not "".join(texts).isascii()
        assert b"?" not in done.stdout + done.stderr
        assert (done.returncode, done.stdout.count(b"\n")) == (code, texts[0].count("\n"))
        assert (b"2x\\xe9" if code else b"| grid 2x3 | (6, 5)") in done.stdout + done.stderr


def test_warnings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def app(**options: object) -> None:
        warnings.warn("a glyph\nis missing", UserWarning, stacklevel=1)

    warnings.simplefilter("always")
    assert run_program("mmpos", lambda: app, []) == 0
    assert capsys.readouterr() == ("", "mmpos: warning: a glyph is missing\n")


def test_the_documentation_lists_every_exit_code() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8").replace("`", "")
    assert re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE) == [(str(k), v) for k, v in EXIT_CODES.items()]


@pytest.mark.parametrize("command", ["", "plot", "plot ids"])
def test_help_can_be_requested_as_a_command(command: str, run: Run) -> None:
    assert run("help", *command.split()) == run(*command.split(), "--help")


def test_the_version_has_a_short_option(run: Run) -> None:
    assert run("-V") == run("--version") == (0, f"mmpos {info()['mmpos']}\n", "")


COMPLETIONS = [
    ("mmpos pos", ["positions"]),
    ("mmpos help pl", ["plot"]),
    ("mmpos plot ", ["ids", "attention"]),
    ("mmpos positions 3 --sch", ["--scheme"]),
    ("mmpos positions 3 -s rope-tie-", ["rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm"]),
    ("mmpos remote positions 3 --scheme mrope-q", ["mrope-qwen2.5", "mrope-qwen3"]),
    ("mmpos plot attention 3 --allocation s", ["split", "sections"]),
    ("mmpos check ids.npy --padding l", ["left"]),
    ("mmpos preprocess x -f ch", ["chat"]),
    ("mmpos bench pos", ["positions"]),
    ("mmpos bench positions --malloc t", ["tuned"]),
    ("mmpos serve --rot", ["--rotations"]),
    ("mmpos check id", []),  # the shell completes file names
    ("mmpos serve --rota", []),  # without its package: no error is printed into the command line
]


@pytest.mark.parametrize(("line", "values"), COMPLETIONS, ids=[line for line, _ in COMPLETIONS])
def test_command_lines_are_completed(
    line: str, values: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if line == "mmpos serve --rota":
        monkeypatch.setitem(sys.modules, "mmpos_server.options", None)
    monkeypatch.setenv("_MMPOS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        main([])
    captured = capsys.readouterr()
    assert (captured.out.split(), captured.err) == (values, "")


def test_the_help_for_a_completion_is_one_line() -> None:
    line = {"_MMPOS_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": "mmpos positions 3 --sch"}
    done = start(env={**line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"})
    assert re.fullmatch(rb"--scheme\t[^\n]{200,}\n", done.stdout)


@pytest.mark.skipif(shutil.which("bash") is None, reason="requires bash")
def test_the_printed_completion_script_works_in_bash(folder: Path) -> None:
    program = folder / "mmpos"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mmpos "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(mmpos --show-completion)"
        COMP_WORDS=(mmpos positions 3 -s v2) COMP_CWORD=4
        _mmpos_completion mmpos
        echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("v2pe\n", "")


@pytest.mark.parametrize("name", ["explore", "probe"])
def test_a_command_of_contrib_that_is_not_installed_names_its_pip_command(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("mmpos.cli.commands"), "entry_points", lambda group: [])
    command = f"in a clone, install it with: pip install ./contrib/{name}"
    assert run(name, "3") == (1, "", f"mmpos: error: mmpos {name}: mmpos-{name} is not installed; {command}\n")
    assert (ROOT / "contrib" / name / "pyproject.toml").exists()


def test_commands_of_other_distributions_are_listed_without_an_import_and_run(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "stand_in.py").write_text(
        "import typer\napp = typer.Typer()\n@app.command()\ndef shout(word: str) -> None:\n    print(word.upper())\n"
    )
    (folder / "stand_in-1.dist-info").mkdir()
    (folder / "stand_in-1.dist-info/METADATA").write_text("Metadata-Version: 2.4\nName: stand-in\nSummary: Shout it.\n")
    (folder / "stand_in-1.dist-info/entry_points.txt").write_text("[mmpos.commands]\nshout = stand_in:app\n")
    monkeypatch.syspath_prepend(folder)
    code, out, _ = run("--help")
    assert code == 0
    assert re.search(r"│ shout +Shout it\.", re.sub(r"\x1b\[[0-9;]*m", "", out))
    assert "stand_in" not in sys.modules
    assert run("shout", "loud") == (0, "LOUD\n", "")
    assert run("help", "shout") == run("shout", "--help")


def test_help_imports_no_large_packages() -> None:
    code = (
        "import sys; from mmpos.__main__ import main; main(['--help']); "
        "heavy = {'torch', 'matplotlib', 'PIL', 'grpc', 'pyarrow', 'transformers', 'mmpos.rotary', 'mmpos.encodings', "
        "'mmpos.analysis.plot', 'mmpos.analysis.diagnosis', 'mmpos.integrations.models', 'mmpos_bench'}; "
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")
