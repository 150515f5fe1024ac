"""Test the server's settings: the embedded file lists the defaults, and an error names its file and field."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import pytest

from mmpos.errors import InvalidInputError
from mmpos.rotary import Linear, Rotary
from mmpos.schemes import MRopeQwen25, RopeTie, RopeTieV2
from mmpos.sequence.builder import MarkerIds, Markers, SequenceBuilder
from mmpos_server.config import ClientLimits, Concurrency, Limits, Profiles, load


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mmpos.toml"


def mistake(file: Path, text: str) -> str:
    """Return the error that a file with this text causes, without the file's name."""
    file.write_text(text)
    with pytest.raises(InvalidInputError) as raised:
        Profiles.from_config(load(file))
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(f"{file}: ")
    return message.removeprefix(f"{file}: ")


def test_the_embedded_file_lists_the_defaults() -> None:
    config = load(None)
    assert (config.limits, config.concurrency, config.clients) == (Limits(), Concurrency(), ClientLimits())
    assert list(config.profiles) == ["default"]
    written = config.profiles["default"]
    assert (written.scheme, written.tokenizer) == ("rope-tie", "bytes")
    assert Markers(**written.markers) == Markers()
    assert written.images == {"patch_size": 14, "spatial_merge_size": 2}


def test_the_default_profile_places_with_rope_tie_and_reads_images_with_pillow() -> None:
    profile = Profiles.from_config(load(None)).get(None)
    images = profile.builder.images
    assert images is not None
    assert profile.name == "default"
    assert profile.builder == SequenceBuilder(images=images, scheme="rope-tie", markers=Markers())
    assert (images.backend, images.patch_size, images.spatial_merge_size) == ("pillow", 14, 2)
    assert profile.rotary == Rotary(head_dim=128)


def test_a_file_changes_only_the_settings_that_it_names(file: Path) -> None:
    file.write_text("[limits]\ntokens = 1000\n[concurrency]\nimage_threads = 3\n")
    config = load(file)
    assert config.limits == Limits(tokens=1000)
    assert config.concurrency == Concurrency(image_threads=3)
    assert config.profiles == load(None).profiles


def test_profiles_in_a_file_replace_the_embedded_one_and_the_first_is_the_default(file: Path) -> None:
    file.write_text(
        """
        [profiles.qwen]
        scheme = { name = "mrope-qwen2.5", tokens_per_second = "25/2" }
        markers = { begin = 7, end = 8, patch = 9 }
        images = { backend = "pillow", patch_size = 16, mean = [0.5, 0.5, 0.5], background = [1, 2, 3] }
        rotary = { head_dim = 64, axes = 3, scaling = { type = "linear", factor = 2.0 } }
        [profiles.tie]
        scheme = { name = "rope-tie-v2", axes = 3, rounding = "floor" }
        markers = { row = 300 }
        """
    )
    qwen, tie = profiles = list(Profiles.from_config(load(file)))
    assert [profile.name for profile in profiles] == ["qwen", "tie"]
    assert qwen.builder.scheme == MRopeQwen25(tokens_per_second=Fraction(25, 2))
    assert qwen.builder.marker_ids == MarkerIds(7, 8, 9)
    images = qwen.builder.images
    assert images is not None
    assert (images.backend, images.patch_size, images.mean, images.background) == (
        "pillow",
        16,
        (0.5, 0.5, 0.5),
        (1, 2, 3),
    )
    assert qwen.rotary == Rotary(head_dim=64, axes=3, scaling=Linear(2.0))
    assert tie.builder.marker_ids == MarkerIds(256, 257, 258, 300)
    assert (tie.builder.scheme, tie.rotary) == (RopeTieV2(axes=3, rounding="floor"), None)


def test_profiles_are_selected_by_name() -> None:
    profiles = Profiles.from_config(load(None))
    assert profiles.get("default") is profiles.get(None) is profiles.default
    with pytest.raises(InvalidInputError, match=r"^profile: got 'x', want one of 'default'$"):
        profiles.get("x")


def test_tokenizer_paths_are_relative_to_the_settings_file(file: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[IMG]": 0, "[/IMG]": 1, "[PATCH]": 2, "a": 3, "b": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.enable_truncation(1)  # truncates every text, as many tokenizer files do
    model.enable_padding(length=6)
    model.save(str(file.parent / "words.json"))
    file.write_text('[profiles.words]\ntokenizer = "words.json"\n')
    builder = Profiles.from_config(load(file)).get("words").builder
    assert builder.marker_ids == MarkerIds(0, 1, 2)
    assert builder.build(["b a b"]).input_ids.tolist() == [4, 3, 4]
    assert builder.scheme == RopeTie()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limits]\ntokens = 'x'\n", "limits.tokens: got 'x', want integer"),
        ("[limits]\nrequest_bytes = 4294967296\n", "limits.request_bytes: got 4294967296, want <= 2147483647"),
        (
            "[limits]\ntoken = 1\n",
            "limits.token: got an unknown field, want one of request_bytes, message_bytes, response_bytes, "
            "documents, segments, tokens, images, pixels",
        ),
        ("limit = 1\n", "limit: got an unknown field, want one of limits, concurrency, clients, profiles"),
        ("[profiles.a]\nimages = 1\n", "profiles.a.images: got 1, want a table"),
        (
            "[profiles.a]\nimage = {}\n",
            "profiles.a.image: got an unknown field, want one of model, scheme, tokenizer, markers, images, rotary",
        ),
        (
            "[profiles.a.images]\nsize = 1\n",
            "profiles.a.images.size: got an unknown field, want one of backend, patch_size, spatial_merge_size, "
            "min_pixels, max_pixels, max_tokens, order, dtype, mean, std, background, max_source_pixels, "
            "small_images, scaled_decoding",
        ),
        ("[profiles.a.images]\npatch_size = 'x'\n", "profiles.a.images.patch_size: got 'x', want an integer"),
        ("[profiles.a.images]\nmean = 1.0\n", "profiles.a.images.mean: got 1.0, want three finite numbers"),
        ("[profiles.a.markers]\npatch = 1.5\n", "profiles.a.markers.patch: got 1.5, want an integer"),
        (
            "[profiles.a.markers]\nstart = 1\n",
            "profiles.a.markers.start: got an unknown field, want one of begin, end, patch, row, last_row, video, "
            "audio, audio_begin, audio_end",
        ),
        ("[profiles]\n", "profiles: got {}, want at least one profile, each with a name"),
        ("[profiles.a]\nscheme = 1\n", "profiles.a.scheme: got 1, want string"),
        (
            "[profiles.a]\nscheme = { name = 'rope-tie', stride = 1 }\n",
            "profiles.a.scheme.stride: scheme 'rope-tie' has no such parameter",
        ),
        (
            "[profiles.a]\nscheme = { name = 'mrope-qwen2.5', tokens_per_second = 'x' }\n",
            "profiles.a.scheme.tokens_per_second: got 'x', want a number or a fraction such as \"25/2\"",
        ),
        (
            "[profiles.a.markers]\nbegin = '<img>'\n",
            "profiles.a.markers.begin: got '<img>', want a token with a single id in the tokenizer",
        ),
        (
            "[profiles.a.images]\nbackend = 'opencv'\n",
            "profiles.a.images.backend: got 'opencv', want one of 'torchvision', 'pillow'",
        ),
        ("[profiles.a.rotary]\nhead_dim = 0\n", "profiles.a.rotary.head_dim: got 0, want >= 2"),
        ("[profiles.a.rotary]\n", "profiles.a.rotary: got [], want head_dim among them"),
        ("a = \n", "want valid TOML (Invalid value (at line 1, column 5))"),
    ],
)
def test_an_error_in_a_file_is_reported_in_one_line(file: Path, text: str, message: str) -> None:
    assert mistake(file, text) == message


def test_an_unreadable_file_is_reported(file: Path) -> None:
    with pytest.raises(InvalidInputError) as raised:
        load(file)
    assert str(raised.value) == f"{file}: got No such file or directory, want a file that can be read"
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidInputError, match="got bytes that are not UTF-8"):
        load(file)


def test_missing_tokenizers_are_reported_with_the_pip_command(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    file.write_text("[profiles.a]\ntokenizer = 'x.json'\n")
    with pytest.raises(ImportError) as raised:
        Profiles.from_config(load(file))
    want = 'install it with: pip install "multimodal-positions[tokenizers]" (in a clone: pip install ".[tokenizers]")'
    assert str(raised.value) == f"{file}: profiles.a.tokenizer: 'x.json': tokenizers is not installed; {want}"
