"""Test the server's settings: each is on the page, a mistake is one line, and profiles come from folders of models."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
import tomllib
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import pytest
from chat_tokenizer import QWENS, chat_tokenizer
from own_schemes import OWN
from qwen_processors import NAMES
from refusals import assert_refused
from server_program import PATIENT, Start

from mmpos.client import Client, InputIds
from mmpos.errors import InvalidInputError
from mmpos.rotary import Linear, Rotary
from mmpos.rpc.v1 import info_pb2
from mmpos.schemes import MRopeQwen25, RopeTie, RopeTieV2
from mmpos.segments import Grid, Placeholders, SegmentTable, Text
from mmpos.sequence.builder import MarkerIds, Markers, SequenceBuilder
from mmpos_server.__main__ import main
from mmpos_server.config import Limits, Profile, Profiles, ServerConfig, load
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


# Profiles from the folder of a model, and schemes of the user's own

CONFIG = {
    "model_type": "qwen3_vl",
    **dict(zip(NAMES, range(5, 9), strict=True)),  # of the test's tokenizer
    "text_config": {"rope_theta": 5_000_000},
    "vision_config": {},
}
"""The fields of Qwen3-VL-8B that differ from the defaults of its type."""
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the folder of a model, and return the folder that contains it and the settings."""
    model = tmp_path / "model"
    model.mkdir()
    for name, values in (("config", CONFIG), ("preprocessor_config", IMAGES)):
        (model / f"{name}.json").write_text(json.dumps(values))
    (model / "tokenizer.json").write_text(chat_tokenizer(QWENS).backend_tokenizer.to_str())
    return tmp_path


def profile(folder: Path, text: str) -> Profile:
    return built(folder / "mmpos.toml", text).default


def test_the_explicit_profile_on_the_page_equals_the_one_read_from_the_folder(folder: Path) -> None:
    (block,) = re.findall(r"^```toml\n(\[profiles\.qwen3-vl\]\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "tokenizer.json").write_bytes((folder / "model/tokenizer.json").read_bytes())
    written, read = profile(folder, block), profile(folder, '[profiles.a]\nmodel = "model"\n')
    assert written.builder.marker_ids == read.builder.marker_ids == MarkerIds(5, 6, 7, video=8)
    assert written.builder.images == read.builder.images
    assert written.builder.scheme == read.builder.scheme
    assert written.rotary == read.rotary


def test_settings_in_a_profile_replace_those_of_the_folder(folder: Path) -> None:
    text = """
        [profiles.a]
        model = "model"
        scheme = "rope-tie"
        tokenizer = "bytes"
        markers = { begin = "" }
        images = { max_pixels = 70_000 }
        rotary = { head_dim = 64 }
    """
    changed = profile(folder, text)
    assert changed.builder.scheme == RopeTie()
    assert changed.builder.markers == Markers(begin=None)
    assert changed.builder.images is not None
    assert (changed.builder.images.max_pixels, changed.builder.images.order) == (70_000, "merged")
    assert changed.rotary == Rotary(head_dim=64)


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("", None, "model: got '{model}', want the folder of a model"),
        ("config.json", '{"model_type": "eliza"}', "model.config.model_type: got 'eliza', want a model type of"),
        (
            "tokenizer.json",
            None,
            "tokenizer: got 'model/tokenizer.json', want \"bytes\" or the path of a tokenizer.json; "
            "there is no file {model}/tokenizer.json",
        ),
        ("preprocessor_config.json", None, "images.image_processor: got no mean, std, min_pixels, max_pixels, which"),
    ],
)
def test_an_error_names_the_unusable_file(folder: Path, path: str, content: str | None, message: str) -> None:
    file = folder / "model" / path
    file.unlink() if path else shutil.rmtree(file)
    if content is not None:
        file.write_text(content)
    want = f"{folder}/mmpos.toml: profiles.a.{message.format(model=folder / 'model')}"
    assert_refused(want, lambda: profile(folder, '[profiles.a]\nmodel = "model"\n'))


SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]])
IDS = [[0, 1, 2, 3, 3, 3, 4, 4, 4, 9, 10], [0, 1, 2, 3, 5, 7, 3, 5, 7, 9, 10]]
SERVED = """
schemes = ["served_schemes:Wide", "served_schemes:Plain"]
[profiles.default]
[profiles.wider]
scheme = { name = "wide", stride = 3 }
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the user's module into the working folder, where servers look for modules; return the folder."""
    (tmp_path / "served_schemes.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_workers_serve_a_scheme_of_the_users_own_like_any_other(start: Start, module: Path) -> None:
    (module / "mmpos.toml").write_text(PATIENT + SERVED)
    server = start("--config", str(module / "mmpos.toml"), "--workers", "2")
    with Client(server.address, timeout=300) as client:
        for scheme in ("wide", "plain"):
            placed = client.place(SEGMENTS, scheme)
            assert (placed.dense().tolist(), placed.scheme, placed.next_positions.tolist()) == (IDS, scheme, [11])
        ids = InputIds([1, 1, 1, *[5] * 6, 1, 1], Placeholders(image=5), [[1, 2, 3]])
        assert client.place(ids, "wide").dense().tolist() == IDS
        assert client.build(["abc", Grid(2, 3), "d"], scheme="wide").positions.dense().tolist() == [
            [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 10, 11],
            [0, 1, 2, 3, 4, 6, 8, 4, 6, 8, 10, 11],
        ]
        assert client.place(SEGMENTS).scheme == "rope-tie"
        wider = client.with_options(profile="wider").place(SEGMENTS)
        assert wider.dense().tolist() == [[0, 1, 2, 3, 3, 3, 4, 4, 4, 12, 13], [0, 1, 2, 3, 6, 9, 3, 6, 9, 12, 13]]
        known = {scheme.name: scheme for scheme in client.info().schemes}
        assert (known["plain"].axes, [*known["plain"].parameters]) == (2, ["stride"])
        with pytest.raises(InvalidInputError, match=r"^scheme: got 'mine', want .* omnigen2, wide, plain$"):
            client.place(SEGMENTS, "mine")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere:Own", "No module named 'nowhere'"),
        ("served_schemes:WIDER", ", an object with parameters, want its class"),
        ("pathlib:Path", ", which is PosixPath, want a Scheme"),
        ("served_schemes:Taken", "but the name 'flatten' is already taken"),
    ],
)
def test_a_scheme_that_cannot_be_served_is_refused_by_name(module: Path, path: str, problem: str) -> None:
    config = ServerConfig.read(f'schemes = ["served_schemes:Plain", "{path}"]', module / "mmpos.toml")
    with pytest.raises(InvalidInputError) as raised:
        Profiles.from_config(config)
    message = str(raised.value)
    assert re.match(re.escape(f"{module / 'mmpos.toml'}: schemes[1]: got '{path}'"), message)
    assert problem in message
