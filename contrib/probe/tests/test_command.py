"""``mmpos probe run`` on dumped keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mmpos_probe import Meant, judge
from mmpos_probe.command import app
from mmpos_probe.confidence import ONE_KEY
from typer.testing import CliRunner

from mmpos import Grid, InvalidInputError, MmposError, SegmentTable, Text, from_hf_config

TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "head_dim": 128,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_theta": 5000000,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}
CONFIG = {
    "model_type": "qwen3_vl",
    "text_config": TEXT,
    "vision_config": {"model_type": "qwen3_vl", "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
TOKENS = {"image_token_id": 555, "video_token_id": 556, "vision_start_token_id": 552, "vision_end_token_id": 553}
SPEC = "3,2x4,5"
IDS = np.array(
    [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 7, 8, 9, 10, 11],
        [0, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 7, 8, 9, 10, 11],
        [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    ]
)
AXIS = np.zeros(64, np.int64)
AXIS[1:60:3], AXIS[2:60:3] = 1, 2


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))


OTHER = "The keys do not belong to reference.npz: weights, heads or the order of channels differ."
UNJUDGED = "The attention factor was not judged"


def rotated(
    ids: npt.NDArray[np.int64], seed: int = 0, axis: npt.NDArray[np.int64] = AXIS, theta: float = 5e6
) -> npt.NDArray[np.float32]:
    """Rotate one key as Qwen3-VL does, and return (tokens, 2, 128) keys."""
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(2, 64, 2)).view(np.complex128)[..., 0]
    angle = ids[axis].T * theta ** -(np.arange(64) / 64)
    pairs = key * np.exp(1j * angle)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float32)


def unrotated(seed: int = 0) -> npt.NDArray[np.float32]:
    """Return the unrotated (2, 128) key."""
    return rotated(0 * IDS[:, :1], seed)[0]


def save_reference(*keys: npt.NDArray[np.float32]) -> None:
    """Write each layer's unrotated keys next to the config."""
    arrays: dict[str, Any] = {str(layer): key for layer, key in enumerate(keys)}
    np.savez("reference.npz", **arrays)


def heads(*parts: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Combine head 0 of the first keys, head 1 of the second keys, and so on."""
    return np.concatenate([part[:, head : head + 1] for head, part in enumerate(parts)], axis=1)


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run() -> Run:
    """Return a function that runs the command with this config, and returns its exit code and output."""

    def command(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["run", *arguments, "--config", "config.json"])
        if isinstance(result.exception, MmposError):
            raise result.exception
        return result.exit_code, result.output

    return command


Layers = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def judge_layers(run: Run) -> Layers:
    """Return a function that saves arrays, runs the command, and returns its exit code and each layer's JSON."""

    def command(*arguments: str, **arrays: Any) -> tuple[int, dict[str, dict[str, Any]]]:
        np.savez("keys.npz", **arrays)
        code, out = run("keys.npz", *arguments, "--json")
        return code, json.loads(out)["layers"]

    return command


def test_correctly_rotated_keys_are_equal(run: Run) -> None:
    layers: dict[str, Any] = {"first": rotated(IDS), "second": rotated(IDS, seed=1)}
    np.savez("alone.npz", **layers)
    np.savez("with.npz", **layers, position_ids=IDS)
    np.save("ids.npy", IDS)
    for meant in (["with.npz"], ["alone.npz", "--spec", SPEC], ["alone.npz", "--ids", "ids.npy"]):
        code, out = run(*meant)
        assert code == 0
        assert out.startswith("first: 48 of 48 ids read, residual at most ")
        assert "\nsecond: 48 of 48 ids read" in out
        assert "All 16 tokens of 1 document have the ids of" in out
        assert "Ids are relative to token 0: an offset of all ids cannot be seen." in out


@pytest.mark.parametrize("noise", [0, 1e-4])
def test_values_and_unrotated_keys_are_reported_as_one_key(run: Run, noise: float) -> None:
    keys = rotated(0 * IDS)
    np.savez("keys.npz", values=keys + noise * np.random.default_rng(1).normal(size=keys.shape))
    rest = (
        "  All tokens have one key: values, keys before their rotation, copies of heads, or one id for all.\n"
        "  To do: dump keys as they enter the cache, after their rotation.\n"
        "The attention factor was not judged: there is no unrotated reference key.\n"
    )
    code, out = run("keys.npz", "--spec", SPEC)
    assert code == 3
    assert out.partition("\n")[2] == (
        "  documents[0], token 1, is token 1 of a run of text (segment 0): "
        "got (0, 0, 0), want (1, 1, 1) in mrope-qwen3.\n"
        "  15 of 16 tokens differ, in 1 of 1 document.\n" + rest
    )
    np.savez("keys.npz", values=keys, position_ids=0 * IDS)
    code, out = run("keys.npz")
    assert (code, "one key" in out) == (0, False)


def test_pairs_on_other_axes_are_named_with_the_first_wrong_token(judge_layers: Layers) -> None:
    code, layers = judge_layers(
        "--spec", SPEC, right=rotated(IDS), mixed=rotated(IDS, axis=np.repeat([0, 1, 2], [24, 20, 20]))
    )
    assert (code, layers["right"]["equal"], layers["right"]["first_wrong"]) == (3, True, None)
    assert (layers["mixed"]["equal"], layers["mixed"]["first_wrong"]) == (False, 4)
    message = str(layers["mixed"]["message"])
    assert "The first token with a wrong key is 4. Cause: pairs are allocated as 'sections'" in message
    assert message.count("Cause") == 1, "read with the intended rotation, the ids look like a dropped axis"


def test_a_lost_delta_is_named_without_blaming_the_rotation(run: Run) -> None:
    ids = IDS.copy()
    ids[:, 13:] = [13, 14, 15]
    np.save("keys.npy", rotated(ids))
    code, out = run("keys.npy", "--spec", SPEC)
    assert (code, "the delta -4 is forgotten" in out, "rotation" in out) == (3, True, False)


def test_the_attention_factor_is_judged_by_the_reference_next_to_the_config(run: Run, judge_layers: Layers) -> None:
    dump: dict[str, Any] = {"layers.0.attn": rotated(IDS), "layers.1.attn": 1.1 * rotated(IDS, seed=1)}
    np.savez("keys.npz", **dump)
    code, out = run("keys.npz", "--spec", SPEC)
    assert (code, out.splitlines()[-1][: len(UNJUDGED)]) == (0, UNJUDGED)
    save_reference(unrotated(), unrotated(1))
    code, out = run("keys.npz", "--spec", SPEC)
    assert (code, UNJUDGED in out) == (3, False)
    assert "cos and sin are multiplied by 1.1, not by 1." in out
    save_reference(unrotated(1), unrotated(1))  # the first reference belongs to other weights
    _, layers = judge_layers("--spec", SPEC, **dump)
    assert [(layer["equal"], layer["factor_judged"]) for layer in layers.values()] == [(False, False), (False, True)]
    assert [OTHER in layer["message"] for layer in layers.values()] == [True, False]
    keys = rotated(IDS)
    keys[6:, 1] = rotated(IDS + 1)[6:, 1]
    (layer,) = judge_layers("--spec", SPEC, layers_0=keys)[1].values()
    assert (layer["wrong_heads"], layer["message"][-1]) == ([1], OTHER)


def test_a_reference_reveals_an_offset_of_all_ids(run: Run) -> None:
    np.savez("keys.npz", layer0=rotated(IDS + 3))
    assert run("keys.npz", "--spec", SPEC)[0] == 0
    save_reference(unrotated())
    code, out = run("keys.npz", "--spec", SPEC)
    assert (code, "got (3, 3, 3), want (0, 0, 0) in mrope-qwen3" in out) == (3, True)


GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 128,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 5e6},
    },
}


def test_layers_are_judged_by_the_rotation_of_their_layer_type(run: Run, judge_layers: Layers) -> None:
    Path("config.json").write_text(json.dumps(GEMMA3))
    count = np.arange(40)[None]
    full = rotated(np.tile(count, (3, 1)))
    sliding = rotated(np.tile(count, (3, 1)), theta=1e4)
    arguments = "keys.npz", "--spec", "40"
    code, layers = judge_layers("--spec", "40", arr_0=sliding, arr_1=full)
    kinds = {name: layer["layer_type"] for name, layer in layers.items()}
    assert (code, kinds) == (0, {"arr_0": "sliding_attention", "arr_1": "full_attention"})
    np.savez("keys.npz", full)
    assert run(*arguments)[0] == 3
    assert run(*arguments, "--layer-type", "full_attention")[0] == 0
    np.savez("keys.npz", keys=full)
    with pytest.raises(InvalidInputError, match=r"^layer_type: got None, want one of 'full_attention', 'sliding_a"):
        run(*arguments)


def save_qwen25(head_dim: int, sections: list[int], theta: float) -> None:
    """Write the config of a Qwen2.5-VL model."""
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}
    text = {
        **TEXT,
        "model_type": "qwen2_5_vl_text",
        "head_dim": head_dim,
        "rope_scaling": None,
        "rope_parameters": rope,
    }
    vision = {"model_type": "qwen2_5_vl", "tokens_per_second": 4, "spatial_merge_size": 2}
    config = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision, **TOKENS}
    Path("config.json").write_text(json.dumps(config))


def test_placement_mistakes_have_the_same_names_as_in_mmpos_check() -> None:
    save_qwen25(head_dim=128, sections=[24, 20, 20], theta=5e6)
    settings = from_hf_config(Path())
    applied, intended = (
        SegmentTable.from_documents([[Text(2), Grid(1, 2, frames=4, seconds_per_frame=seconds), Text(3)]])
        for seconds in (1, 0.5)
    )
    keys = rotated(settings.place(applied).dense(), axis=np.repeat([0, 1, 2], [24, 20, 20]))
    verdict = judge(keys, settings.rotary, Meant(intended, settings.scheme))
    assert "Cause: seconds_per_frame is forgotten: frames are one second apart." in verdict.sentences


def test_a_single_wrong_head_is_named(judge_layers: Layers) -> None:
    right, still, other = rotated(IDS), rotated(0 * IDS), rotated(IDS, theta=1e4)
    dump = {
        "still": heads(right, still),
        "another": heads(other, right),
        "both": other,
        "missing": heads(right, 0 * right),
    }
    code, layers = judge_layers("--spec", SPEC, **dump)
    assert (code, [layer["equal"] for layer in layers.values()]) == (3, [False] * 4)
    assert [layer["wrong_heads"] for layer in layers.values()] == [[1], [0], [], [1]]
    first = [layer["message"][0] for layer in layers.values()]
    assert [first[0], first[1], first[3]] == [f"Kv head {head} (of 2):" for head in (1, 0, 1)]
    assert ONE_KEY in layers["still"]["message"]
    assert all("theta is 10,000, not 5,000,000" in str(layers[name]["message"]) for name in ("another", "both"))
    assert layers["missing"]["message"][1].startswith("reference: token 0: got nothing but zeros")


QWEN3 = {"model_type": "qwen3", "head_dim": 128, "hidden_size": 256, "num_attention_heads": 2, "rope_theta": 5e6}


def shifted(*offsets: int) -> npt.NDArray[np.float32]:
    """Return (6, heads, 128) keys of text, with one id offset for each head."""
    ids = [np.tile(np.arange(6) + offset, (3, 1)) for offset in offsets]
    return np.stack([rotated(ids[head])[:, head] for head in range(len(offsets))], axis=1)


@pytest.mark.parametrize(
    ("keys", "wrong", "factor", "sentences"),
    [
        (shifted(0, 300), [1], True, ["Kv head 1 (of 2):", "Cause: documents start at 300, not at 0."]),
        (shifted(300, 500), [0, 1], True, ["Kv head 1 (of 2):", "Cause: documents start at 500, not at 0."]),
        (shifted(0, 0)[:, ::-1], [], False, [OTHER]),
        (shifted(0), [], False, [OTHER]),
    ],
)
def test_each_head_is_judged_by_its_own_row_of_the_reference(
    keys: npt.NDArray[np.float32], wrong: list[int], factor: bool, sentences: list[str], judge_layers: Layers
) -> None:
    Path("config.json").write_text(json.dumps(QWEN3))
    save_reference(unrotated())
    code, layers = judge_layers("--spec", "6", layer0=keys)
    layer = layers["layer0"]
    assert (code, layer["equal"], layer["wrong_heads"], layer["factor_judged"]) == (3, False, wrong, factor)
    assert set(sentences) <= set(layer["message"])
    assert layer["message"].count(OTHER) == sentences.count(OTHER)


@pytest.mark.parametrize(
    ("empty", "reference", "since"), [(0, False, 12), (0, True, 12), (np.nan, False, 12), (np.nan, True, 5)]
)
def test_tokens_are_wrong_from_the_first_unwritten_key(
    empty: float, reference: bool, since: int, judge_layers: Layers
) -> None:
    if reference:
        save_reference(*[unrotated()] * 4)
    keys = rotated(IDS)
    head, late = keys.copy(), keys.copy()
    head[:, 1], late[since:] = empty, empty
    code, layers = judge_layers("--spec", SPEC, layer0=keys * np.float32(empty), layer1=keys, layer2=head, layer3=late)
    assert (code, [layer["equal"] for layer in layers.values()]) == (3, [False, True, False, False])
    assert [layer["first_wrong"] for layer in layers.values()] == [0, None, 0, since]
    assert [layer["wrong_heads"] for layer in layers.values()] == [[], [], [1], []]
    assert [layer["known"] for layer in layers.values()][:3] == [0, 1, 0.5]
    assert OTHER not in str(layers)
    assert all(layers[name]["factor_judged"] == reference for name in ("layer1", "layer2", "layer3"))


def test_known_ids_are_counted_over_all_heads(run: Run, judge_layers: Layers) -> None:
    keys = heads(rotated(IDS), rotated(IDS + 40 * (np.arange(16) >= 3)))
    layer = judge_layers("--spec", SPEC, keys=keys, reference=unrotated())[1]["keys"]
    assert (layer["known"], layer["unknown_tokens"], layer["wrong_heads"]) == (1, 0, [1])
    assert run("keys.npz", "--spec", SPEC)[1].startswith("keys: 96 of 96 ids of 2 kv heads read, residual at most ")


def test_unrotated_keys_are_reported_as_one_key_even_with_too_few_pairs_for_ids(judge_layers: Layers) -> None:
    save_qwen25(head_dim=16, sections=[2, 3, 3], theta=1e6)
    key = np.random.default_rng(0).normal(size=(2, 8, 2)).view(np.complex128)[..., 0]
    angle = IDS[np.repeat([0, 1, 2], [2, 3, 3])].T * 1e6 ** -(np.arange(8) / 8)
    right, still = (
        np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float32)
        for pairs in (key * np.exp(1j * turns)[:, None] for turns in (angle, 0 * angle))
    )
    for references in ([], [still[0]] * 3):
        save_reference(*references)
        code, layers = judge_layers("--spec", SPEC, layer0=right, layer1=heads(right, still), layer2=still)
        assert (code, [layer["wrong_heads"] for layer in layers.values()]) == (3, [[], [1], []])
        assert [layer["message"].count(ONE_KEY) for layer in layers.values()] == [0, 1, 1]
        assert [layer["first_wrong"] for layer in layers.values()] == [None, 1, 1]
        assert "Cause" not in str(layers)


def test_a_single_token_proves_nothing_without_a_reference(judge_layers: Layers) -> None:
    code, layers = judge_layers("--spec", "1", keys=rotated(IDS[:, :1]))
    note = "The only token is the reference: its ids relative to itself are 0, which shows nothing."
    assert (code, note in layers["keys"]["message"]) == (3, True)
    assert judge_layers(keys=rotated(IDS[:, 7:8]), reference=unrotated(), position_ids=IDS[:, 7:8])[0] == 0


@pytest.mark.parametrize(
    ("arrays", "arguments", "message"),
    [
        (
            {"position_ids": IDS},
            [],
            "keys.npz: got only position_ids, want at least one array of keys",
        ),
        (
            {"keys": IDS},
            [],
            "keys.npz: got keys of shape (3, 16), want keys (tokens, kv_heads, head_dim), or",
        ),
        (
            {"keys": rotated(IDS)},
            ["--spec", "3"],
            "keys.npz: keys of shape (16, 2, 128), reading: got 3 axes and 16 tokens, want 3 axes and 3",
        ),
        (
            {"keys": rotated(IDS).astype(np.int8)},
            ["--spec", SPEC],
            "keys.npz: keys of shape (16, 2, 128), keys: got dtype int8, want floats",
        ),
        (
            {"keys": rotated(IDS), "position_ids": IDS},
            ["--spec", SPEC],
            "--spec cannot be combined with position_ids in the dump",
        ),
        (
            {"keys": rotated(IDS), "position_ids": IDS[[0, 0, 1, 2]]},
            [],
            "position_ids: got shape (4, 16), want (3, tokens); leave out the text row",
        ),
        (
            {"keys": rotated(IDS), "position_ids": np.int64(3)},
            [],
            "position_ids: got shape (), want (3, tokens)",
        ),
        ({"keys": rotated(IDS)}, [], "got no intended positions, want one of --spec, --ids, position_ids in the dump"),
        ({"keys": rotated(IDS)[None]}, ["--spec", SPEC], "keys.npz: got keys of shape (1, 16, 2, 128), want keys (tok"),
        ({"keys": rotated(IDS), "position_ids": IDS}, ["--start", "3"], "--start requires --spec"),
        ({"keys": rotated(IDS)}, ["--spec", "3", "--ids", "x"], "--spec cannot be combined with --ids"),
        ({"a": rotated(IDS), "keys": rotated(IDS)}, ["--ids", "keys.npz"], "--ids: got 2 arrays, want one"),
        ({"keys": rotated(IDS)}, ["--spec", "3,2x"], "--spec: got '3,2x', want text and grids, such as 3,2x3,2 or"),
    ],
)
def test_invalid_dumps_are_refused(arrays: dict[str, Any], arguments: list[str], message: str, run: Run) -> None:
    np.savez("keys.npz", **arrays)
    with pytest.raises(InvalidInputError) as error:
        run("keys.npz", *arguments)
    assert str(error.value).startswith(message)


def test_files_that_are_not_dumps_are_refused(run: Run) -> None:
    Path("keys.npz").write_bytes(b"no archive")
    for name, got in (("keys.npz", "got "), ("missing.npz", "got No such file")):
        with pytest.raises(InvalidInputError, match=f"^{name}: {got}"):
            run(name)


@pytest.mark.parametrize("shape", [(2, 8), (4, 4)])
def test_sentences_do_not_contradict_each_other(run: Run, shape: tuple[int, int]) -> None:
    """Test keys with few bits, whose rotation looks as intended although one axis is used in place of another."""
    height, width = shape
    patch = np.arange(16)
    ids = np.concatenate([np.tile(np.arange(90), (3, 1)), np.stack([0 * patch, patch // width, patch % width]) + 90], 1)
    ids = np.concatenate([ids, np.tile(np.arange(300), (3, 1)) + 90 + max(height, width)], axis=1)
    np.save("ids.npy", ids)
    keys = rotated(ids[[0, 1, 0]])
    keys = keys * (1 + 0.03 * np.random.default_rng(3).normal(size=keys.shape).astype(np.float32))  # the noise of e4m3
    np.save("keys.npy", keys)
    code, out = run("keys.npy", "--ids", "ids.npy")
    assert code == 3
    assert "axis 0 (frame) is used in place of axis 2 (col)" in out
    assert "intended rotation" not in out


def test_the_first_wrong_token_is_counted_over_all_documents_in_json_and_sentences(judge_layers: Layers) -> None:
    ids = np.concatenate([np.tile(np.arange(16), (3, 1)), IDS], axis=1)
    late = ids + (np.arange(32) >= 29)
    code, layers = judge_layers("--spec", "16", "--spec", SPEC, late=rotated(late), other=rotated(ids[[0, 0, 0]]))
    assert (code, {name: layer["first_wrong"] for name, layer in layers.items()}) == (3, {"late": 29, "other": 20})
    late_message = " ".join(layers["late"]["message"])
    assert "documents[1], token 13, is token 2 of a run of text (segment 3)" in late_message
    assert "Counted over all documents, this is token 29." in late_message
    other = " ".join(layers["other"]["message"])
    assert "The first token with a wrong key is 20. Cause: all pairs rotate by axis 0" in other


def test_unreadable_tokens_are_reported_as_different_and_uncertain_tokens_are_counted(judge_layers: Layers) -> None:
    ids = np.tile(np.arange(200), (3, 1))
    keys = rotated(ids)
    keys[150] = np.nan
    code, layers = judge_layers(nan=keys, position_ids=ids)
    layer = layers["nan"]
    assert (code, layer["equal"], layer["unknown_tokens"], layer["first_wrong"]) == (3, False, 0, 150)
    assert "Cause: no id explains the keys of 1 token." in layer["message"]
    keys[150] = keys[149]
    keys[150, :, np.arange(128) % 64 % 3 == 2] = 0  # only one axis
    layer = judge_layers(half=keys, position_ids=ids)[1]["half"]
    assert (layer["equal"], layer["first_wrong"]) == (False, 150)
