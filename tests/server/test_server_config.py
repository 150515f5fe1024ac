"""Test the server's settings: sixteen of them, each on the page, with one line for each mistake."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import pytest

from mmpos.errors import InvalidInputError
from mmpos.rotary import Linear, Rotary
from mmpos.rpc.v1 import info_pb2
from mmpos.schemes import MRopeQwen25, RopeTieV2
from mmpos.sequence.builder import MarkerIds, Markers, SequenceBuilder
from mmpos_server.__main__ import main
from mmpos_server.config import Limits, Profiles, ServerConfig, load
from mmpos_server.flags import Flags

PAGE = (Path(__file__).parents[2] / "docs/service-operation.md").read_text()
NUMBERS = {"request_bytes": 2**24, "streams_per_connection": 16, "overload_ms": 250, "log_sample": 100}
SETTINGS = [*NUMBERS, "schemes", "profiles"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mmpos.toml"


def built(file: Path, text: str) -> Profiles:
    file.write_text(text)
    return Profiles.from_config(load(file))


def test_there_are_sixteen_settings_and_flags_and_the_page_has_a_line_for_each() -> None:
    flags = [f"--{name.replace('_', '-')}" for name in inspect.signature(Flags).parameters]
    table = re.findall(r"^\| `([^`]*)`.* \| .+ \| .+ \|$", PAGE, re.MULTILINE)
    named = [line.split()[0].replace("[profiles.NAME]", "profiles") for line in table if "mmpos_" not in line]
    assert sorted(named) == sorted([*flags, *SETTINGS])
    assert len(named) == 16


def test_the_embedded_file_lists_the_defaults(file: Path) -> None:
    text = (Path(sys.modules[Limits.__module__].__file__ or "").parent / "default.toml").read_text()
    assert list(tomllib.loads(text)) == SETTINGS
    config = load()
    assert {name: getattr(config, name) for name in NUMBERS} == NUMBERS
    assert ServerConfig(config.profiles, schemes=[]) == config
    profile = Profiles.from_config(config).get(None)
    images = profile.builder.images
    assert images is not None
    assert profile.builder == SequenceBuilder(images=images, scheme="rope-tie", markers=Markers())
    assert (images.backend, images.patch_size, images.spatial_merge_size) == ("pillow", 14, 2)
    assert (profile.name, profile.rotary) == ("default", Rotary(head_dim=128))
    # A file without profiles keeps this one, and changes only what it names.
    file.write_text("request_bytes = 2048\n")
    assert (load(file).profiles, load(file).overload_ms) == (config.profiles, 250)
    assert (load(file).limits.request_bytes, load(file).limits.message_bytes) == (2048, 2048)


def test_the_limits_are_those_of_the_protocol() -> None:
    known = {field.name for field in info_pb2.Limits.DESCRIPTOR.fields}
    assert {field.name for field in fields(Limits)} == known - {"views"}


def test_profiles_are_built_from_their_tables_and_the_first_is_the_default(file: Path) -> None:
    profiles = built(
        file,
        """
        [profiles.qwen]
        scheme = { name = "mrope-qwen2.5", tokens_per_second = "25/2" }
        markers = { begin = 7, end = 8, patch = 9 }
        images = { backend = "pillow", patch_size = 16, mean = [0.5, 0.5, 0.5], background = [1, 2, 3] }
        rotary = { head_dim = 64, axes = 3, scaling = { type = "linear", factor = 2.0 } }
        [profiles.tie]
        scheme = { name = "rope-tie-v2", axes = 3, rounding = "floor" }
        markers = { row = 300 }
        """,
    )
    qwen, tie = profiles
    assert qwen.builder.scheme == MRopeQwen25(tokens_per_second=Fraction(25, 2))
    assert qwen.builder.marker_ids == MarkerIds(7, 8, 9)
    images = qwen.builder.images
    assert images is not None
    assert (images.patch_size, images.mean, images.background) == (16, (0.5, 0.5, 0.5), (1, 2, 3))
    assert qwen.rotary == Rotary(head_dim=64, axes=3, scaling=Linear(2.0))
    assert tie.builder.marker_ids == MarkerIds(256, 257, 258, 300)
    assert (tie.builder.scheme, tie.rotary) == (RopeTieV2(axes=3, rounding="floor"), None)
    assert profiles.get("qwen") is profiles.get(None) is profiles.default is qwen
    with pytest.raises(InvalidInputError, match=r"^profile: got 'x', want one of 'qwen', 'tie'$"):
        profiles.get("x")


KNOWN = f"want one of {', '.join(SETTINGS)}"


MISTAKES = [
    ("[limits]\ntokens = 1\n", f"limits: got an unknown setting, {KNOWN}"),
    ("request_bytes = 67108865\n", "request_bytes: got 67108865, want <= 67108864"),
    ("streams_per_connection = 0\n", "streams_per_connection: got 0, want >= 1"),
    ("log_sample = 2147483648\n", "log_sample: got 2147483648, want <= 2147483647"),
    ("schemes = 'a:B'\n", "schemes: got 'a:B', want a list of \"module:Class\""),
    ("schemes = [1]\n", "schemes[0]: got 1, want text"),
    ("[profiles]\n", "profiles: want at least one, each with a name"),
    ("[profiles.a]\nimage = {}\n", "profiles.a.image: got an unknown setting, want one of model, scheme, tokenizer, "),
    ("[profiles.a]\nscheme = 1\n", "profiles.a.scheme: got 1, want text or a table"),
    ("[profiles.a.images]\nsize = 1\n", "profiles.a.images.size: got an unknown setting, want one of backend, "),
    ("[profiles.a.markers]\nbegin = '<i>'\n", "profiles.a.markers.begin: got '<i>', want a token with a single id"),
    (
        "[profiles.a]\nscheme = { name = 'rope-tie', stride = 1 }\n",
        "profiles.a.scheme: got 'stride' of 'rope-tie', want",
    ),
    (
        "[profiles.a]\nscheme = { name = 'mrope-qwen2.5', tokens_per_second = 'x' }\n",
        "profiles.a.scheme.tokens_per_second: got 'x', want a number or a fraction such as \"25/2\"",
    ),
    ("[profiles.a]\ntokenizer = 'none.json'\n", "profiles.a.tokenizer: got 'none.json', want \"bytes\" or the path"),
]


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the line that the program prints when it ends with status 2."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("mmpos_server: error: ")


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_check_reports_a_mistake(file: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    assert mistake(capsys, "--check", str(file)).startswith(f"{file}: {message}")


def test_check_accepts_valid_settings_with_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("overload_ms = 100\n[profiles.a]\n[profiles.b]\nscheme = 'mrope'\n")
    assert main(["--check", str(file)]) == 0
    assert capsys.readouterr() == (f"{file}: the settings and the profiles a, b are valid\n", "")
    file.unlink()
    want = f"{file}: got No such file or directory, want a file that can be read\n"
    assert mistake(capsys, "--check", str(file)) == want
    file.write_bytes(b"\xff")
    assert mistake(capsys, "--config", str(file)).startswith(f"{file}: got bytes that are not UTF-8")


HOST_PORT = "want HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051"
FLAGS = [
    ("--listen unix:s --workers 2", "--workers: got 2 with --listen unix:PATH, which allows one process"),
    (
        "--listen 127.0.0.1:1 --listen [::1]:1",
        "--listen: got 127.0.0.1:1 and [::1]:1, want one HOST:PORT, one unix:PATH, or both",
    ),
    ("--listen 50051", f"--listen: got '50051', {HOST_PORT}"),
    ("--metrics ::1:9090", f"--metrics: got '::1:9090', {HOST_PORT}"),
    ("--check c --config c", "--check: got --config too, want one settings file"),
    ("--tls-cert c", "--tls-cert requires --tls-key"),
    ("--tls-client-ca c", "--tls-client-ca requires --tls-cert and --tls-key"),
    (
        "--listen unix:s --tls-cert c --tls-key k",
        "--tls-cert requires --listen HOST:PORT: a unix socket is never encrypted",
    ),
    ("--metrics-port 1", "No such option: --metrics-port"),
    ("--listen 192.0.2.1:0", "--listen: got 192.0.2.1:0 (Cannot assign requested address), want a free"),
]


@pytest.mark.parametrize(("arguments", "message"), FLAGS)
def test_wrong_flags_are_reported_in_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(capsys, *arguments.split()).startswith(message)
