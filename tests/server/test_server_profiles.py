"""Test profiles that are read from the folder of a model, and schemes of the user's own, which settings name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from chat_tokenizer import QWENS, chat_tokenizer
from own_schemes import OWN
from qwen_processors import NAMES
from server_program import PATIENT, Start

from mmpos.client import Client, InputIds
from mmpos.errors import InvalidInputError
from mmpos.rotary import Rotary
from mmpos.schemes import RopeTie
from mmpos.segments import Grid, Placeholders, SegmentTable, Text
from mmpos.sequence.builder import MarkerIds, Markers
from mmpos_server.config import Profile, Profiles, ServerConfig, load

PAGE = Path(__file__).parents[2] / "docs" / "service-operation.md"
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
    """Return the default profile of a settings file in this folder."""
    (folder / "mmpos.toml").write_text(text)
    return Profiles.from_config(load(folder / "mmpos.toml")).get(None)


def test_the_explicit_profile_on_the_page_equals_the_one_read_from_the_folder(folder: Path) -> None:
    (block,) = re.findall(r"^```toml\n(\[profiles\.qwen3-vl\]\n.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
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
    with pytest.raises(InvalidInputError) as raised:
        profile(folder, '[profiles.a]\nmodel = "model"\n')
    assert str(raised.value).startswith(f"{folder}/mmpos.toml: profiles.a.{message.format(model=folder / 'model')}")


SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]])
IDS = [[0, 1, 2, 3, 3, 3, 4, 4, 4, 9, 10], [0, 1, 2, 3, 5, 7, 3, 5, 7, 9, 10]]
SETTINGS = """
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
    (module / "mmpos.toml").write_text(PATIENT + SETTINGS)
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
