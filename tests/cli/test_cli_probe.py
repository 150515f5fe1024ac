"""``mmpos probe run`` on dumps of keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mmpos import Grid, SegmentTable, Text, from_hf_config, place
from mmpos.analysis.probe.confidence import ONE_KEY

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
def config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


OTHER = "The keys do not belong to reference.npz: weights, heads or the order of channels differ."
UNJUDGED = "The attention factor was not judged"


def turned(
    ids: npt.NDArray[np.int64], seed: int = 0, axis: npt.NDArray[np.int64] = AXIS, theta: float = 5e6
) -> npt.NDArray[np.float32]:
    """(tokens, 2, 128) one key, turned as Qwen3-VL does."""
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(2, 64, 2)).view(np.complex128)[..., 0]
    angle = ids[axis].T * theta ** -(np.arange(64) / 64)
    pairs = key * np.exp(1j * angle)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float32)


def unturned(seed: int = 0) -> npt.NDArray[np.float32]:
    """(2, 128) the key before its rotation."""
    return turned(0 * IDS[:, :1], seed)[0]


def save_reference(*keys: npt.NDArray[np.float32]) -> None:
    """Write the keys of layers before their rotation beside the config."""
    arrays: dict[str, Any] = {str(layer): key for layer, key in enumerate(keys)}
    np.savez("reference.npz", **arrays)


def heads(*parts: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The kv heads of several keys, each in its place."""
    return np.concatenate([part[:, head : head + 1] for head, part in enumerate(parts)], axis=1)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(run: Run) -> Run:
    """Run the command with the config."""
    return lambda *arguments: run("probe", "run", *arguments, "--config", "config.json")


Layers = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def judged(run: Run) -> Layers:
    """Save arrays, and give the exit code and what is said of each layer in JSON."""

    def command(*arguments: str, **arrays: Any) -> tuple[int, dict[str, dict[str, Any]]]:
        np.savez("keys.npz", **arrays)
        code, out, _ = run("keys.npz", *arguments, "--json")
        return code, json.loads(out)["layers"]

    return command


def test_keys_as_meant(run: Run) -> None:
    layers: dict[str, Any] = {"first": turned(IDS), "second": turned(IDS, seed=1)}
    np.savez("alone.npz", **layers)
    np.savez("with.npz", **layers, position_ids=IDS)
    np.save("ids.npy", IDS[:, None])
    for meant in (["with.npz"], ["alone.npz", "--spec", SPEC], ["alone.npz", "--ids", "ids.npy"]):
        code, out, err = run(*meant)
        assert (code, err) == (0, "")
        assert out.startswith("first: 48 of 48 ids read, at most ")
        assert "\nsecond: 48 of 48 ids read" in out
        assert "All 16 tokens of 1 document have the ids of" in out
        assert "Ids are relative to token 0: an offset of all ids cannot be seen." in out


def test_padding_of_ids_is_left_out_by_the_lengths_of_rows(run: Run) -> None:
    ids = np.stack([IDS, np.pad(IDS[:, :11], ((0, 0), (0, 5)), constant_values=-1)], axis=1)
    keys = np.stack([turned(IDS), turned(ids[:, 1])])
    np.savez("keys.npz", keys=keys, position_ids=ids, lengths=[16, 11])
    np.savez("alone.npz", keys=keys, lengths=[16, 11])
    np.save("ids.npy", ids)
    for meant in (["keys.npz"], ["alone.npz", "--ids", "ids.npy"]):
        code, out, _ = run(*meant)
        assert code == 0
        assert out.startswith("keys: 81 of 81 ids read")
        assert "All 27 tokens of 1 document have the ids of" in out
    ids[1, 1, 7] = 9
    np.savez("keys.npz", keys=keys, position_ids=ids, lengths=[16, 11])
    code, out, _ = run("keys.npz")
    assert code == 3
    assert "token 23, " in out
    assert "1 of 27 tokens differ" in out


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "positions: got shape (3, 16), want (3, 2), as rotary and keys have; 1 token, the first 1, have "),
        (4, "positions: got shape (3, 16), want (3, 4), as rotary and keys have; 3 tokens, the first 1, have "),
    ],
)
def test_a_layout_that_is_another_is_told_beside_the_number_of_tokens(count: int, words: str, run: Run) -> None:
    keys = np.concatenate([turned(IDS), turned(IDS, seed=1)], axis=1)[:, :count]
    np.savez("keys.npz", keys=keys.swapaxes(0, 1))
    code, out, err = run("keys.npz", "--spec", SPEC)
    assert (code, out) == (2, "")
    assert err.startswith(f"mmpos: error: keys.npz: keys of shape ({count}, 16, 128), {words}")
    assert "Heads differ only by rotations, as tokens should: are the keys (kv_heads, tokens, head_dim)?" in err


def test_a_terminal_shows_how_many_tokens_are_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez("keys.npz", first=turned(IDS), position_ids=IDS)
    silent = run("keys.npz")
    assert silent[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes it a terminal
    code, out, err = run("keys.npz")
    assert (code, out) == silent[:2]
    said = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", err)
    assert re.search("━+ 16/16 tokens first", said)


def test_layers_that_read_differently_are_told_apart_though_nothing_was_meant(run: Run) -> None:
    lost = turned(IDS, seed=3)
    lost[9] = np.nan  # an id that is not known is no other
    np.savez("keys.npz", a=turned(IDS), b=turned(IDS, seed=1), c=turned(IDS[[0, 0, 0]], seed=2), d=lost)
    code, out, _ = run("keys.npz")
    assert code == 3
    assert "  7 tokens, the first 4, have other ids than in a.\n" in out.partition("\nc: ")[2]
    assert out.count("other ids than") == 1


@pytest.mark.parametrize("noise", [0, 1e-4])
def test_values_and_keys_before_their_rotation_are_one_key(run: Run, noise: float) -> None:
    keys = turned(0 * IDS)
    np.savez("keys.npz", values=keys + noise * np.random.default_rng(1).normal(size=keys.shape))
    said = (
        "  All tokens have one key: values, keys before their rotation, copies of heads, or one id for all.\n"
        "  To do: dump keys as they enter the cache, after their rotation.\n"
        "The attention factor was not judged: there is no reference, a key that was not turned.\n"
    )
    code, out, _ = run("keys.npz", "--spec", SPEC)
    assert code == 3
    assert out.partition("\n")[2] == (
        "  documents[0], token 1, is token 1 of a run of text (segment 0): "
        "got (0, 0, 0), want (1, 1, 1) in mrope-qwen3.\n"
        "  15 of 16 tokens differ, in 1 of 1 document.\n" + said
    )
    code, out, _ = run("keys.npz")
    assert code == 3
    nothing = "  Nothing was compared: give --spec or --ids, the positions that were meant.\n"
    assert out.partition("\n")[2] == nothing + said
    np.savez("keys.npz", values=keys, position_ids=0 * IDS)
    code, out, _ = run("keys.npz")
    assert (code, "one key" in out) == (0, False)


def test_pairs_on_other_axes_are_named_with_the_first_token_they_turn_wrong(judged: Layers) -> None:
    code, layers = judged("--spec", SPEC, right=turned(IDS), mixed=turned(IDS, axis=np.repeat([0, 1, 2], [24, 20, 20])))
    assert (code, layers["right"]["equal"], layers["right"]["first_wrong"]) == (3, True, None)
    assert (layers["mixed"]["equal"], layers["mixed"]["first_wrong"]) == (False, 4)
    said = str(layers["mixed"]["message"])
    assert "The first token with a wrong key is 4. Cause: pairs are allocated as 'sections'" in said
    assert said.count("Cause") == 1, "the ids look like a dropped axis, through the rotation that was meant"


def test_a_lost_delta_is_named_and_no_rotation_blamed(run: Run) -> None:
    ids = IDS.copy()
    ids[:, 13:] = [13, 14, 15]
    np.save("keys.npy", turned(ids))
    code, out, _ = run("keys.npy", "--spec", SPEC)
    assert (code, "the delta -4 is forgotten" in out, "rotation" in out) == (3, True, False)


def test_an_attention_factor_is_judged_by_the_reference_beside_the_config(run: Run, judged: Layers) -> None:
    dump: dict[str, Any] = {"layers.0.attn": turned(IDS), "layers.1.attn": 1.1 * turned(IDS, seed=1)}
    np.savez("keys.npz", **dump)
    code, out, _ = run("keys.npz", "--spec", SPEC)
    assert (code, out.splitlines()[-1][: len(UNJUDGED)]) == (0, UNJUDGED)
    save_reference(unturned(), unturned(1))
    code, out, _ = run("keys.npz", "--spec", SPEC)
    assert (code, UNJUDGED in out) == (3, False)
    assert "cos and sin are multiplied by 1.1, not by 1." in out
    save_reference(unturned(1), unturned(1))  # the first is of other weights
    _, layers = judged("--spec", SPEC, **dump)
    assert [(one["equal"], one["factor_judged"]) for one in layers.values()] == [(False, False), (False, True)]
    assert [OTHER in one["message"] for one in layers.values()] == [True, False]
    keys = turned(IDS)
    keys[6:, 1] = turned(IDS + 1)[6:, 1]
    (layer,) = judged("--spec", SPEC, layers_0=keys)[1].values()
    assert (layer["wrong_heads"], layer["message"][-1]) == ([1], OTHER)


def test_a_reference_shows_what_all_ids_have_too_much(run: Run) -> None:
    np.savez("keys.npz", layer0=turned(IDS + 3))
    assert run("keys.npz", "--spec", SPEC)[0] == 0
    save_reference(unturned())
    code, out, _ = run("keys.npz", "--spec", SPEC)
    assert (code, "got (3, 3, 3), want (0, 0, 0) in mrope-qwen3" in out) == (3, True)
    np.savez("keys.npz", layer0=turned(IDS + 3), layer1=turned(IDS + 3, seed=1))  # the second has no reference
    assert "other ids than" not in run("keys.npz")[1]


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


def test_layers_are_judged_by_the_rotation_of_their_type(run: Run, judged: Layers) -> None:
    Path("config.json").write_text(json.dumps(GEMMA3))
    count = np.arange(40)[None]
    full = turned(np.tile(count, (3, 1)))
    sliding = turned(np.tile(count, (3, 1)), theta=1e4)
    asked = "keys.npz", "--spec", "40"
    code, layers = judged("--spec", "40", arr_0=sliding, arr_1=full)
    kinds = {name: one["layer_type"] for name, one in layers.items()}
    assert (code, kinds) == (0, {"arr_0": "sliding_attention", "arr_1": "full_attention"})
    np.savez("keys.npz", full)
    assert run(*asked)[0] == 3
    assert run(*asked, "--layer-type", "full_attention")[0] == 0
    np.savez("keys.npz", keys=full)
    code, _, err = run(*asked)
    assert code == 2
    assert err.startswith("mmpos: error: keys: layer_type: got None, want one of 'full_attention', 'sliding_attention'")


def save_qwen25(head_dim: int, sections: list[int], theta: float) -> None:
    """A config of Qwen2.5-VL."""
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


def test_mistakes_in_placing_documents_are_named_as_mmpos_check_names_them(run: Run) -> None:
    save_qwen25(head_dim=128, sections=[24, 20, 20], theta=5e6)
    video = Grid(1, 2, frames=4, seconds_per_frame=1)
    given = place(SegmentTable.from_documents([[Text(2), video, Text(3)]]), from_hf_config(Path()).scheme).dense()
    np.savez("keys.npz", turned(given, axis=np.repeat([0, 1, 2], [24, 20, 20])))
    spec = [{"text": 2}, {"grid": [4, 1, 2], "seconds_per_frame": 0.5}, {"text": 3}]
    Path("spec.json").write_text(json.dumps({"documents": [spec]}))
    code, out, _ = run("keys.npz", "--spec", "spec.json")
    assert code == 3
    assert "Cause: seconds_per_frame is forgotten: frames are one second apart." in out


def test_a_head_that_is_wrong_alone_is_named(judged: Layers) -> None:
    right, still, other = turned(IDS), turned(0 * IDS), turned(IDS, theta=1e4)
    dump = {
        "still": heads(right, still),
        "another": heads(other, right),
        "both": other,
        "missing": heads(right, 0 * right),
    }
    code, layers = judged("--spec", SPEC, **dump)
    assert (code, [one["equal"] for one in layers.values()]) == (3, [False] * 4)
    assert [one["wrong_heads"] for one in layers.values()] == [[1], [0], [], [1]]
    first = [one["message"][0] for one in layers.values()]
    assert [first[0], first[1], first[3]] == [f"Of 2 kv heads, head {head} alone:" for head in (1, 0, 1)]
    assert ONE_KEY in layers["still"]["message"]
    assert all("theta is 10,000, not 5,000,000" in str(layers[name]["message"]) for name in ("another", "both"))
    assert layers["missing"]["message"][1].startswith("reference: token 0: got nothing but zeros")


QWEN3 = {"model_type": "qwen3", "head_dim": 128, "hidden_size": 256, "num_attention_heads": 2, "rope_theta": 5e6}


def shifted(*late: int) -> npt.NDArray[np.float32]:
    """(6, heads, 128) keys of text, of each head so many ids too late."""
    return np.stack([turned(np.tile(np.arange(6) + by, (3, 1)))[:, head] for head, by in enumerate(late)], axis=1)


@pytest.mark.parametrize(
    ("keys", "wrong", "factor", "said"),
    [
        (shifted(0, 300), [1], True, ["Of 2 kv heads, head 1 alone:", "Cause: documents start at 300, not at 0."]),
        (shifted(300, 500), [0, 1], True, ["Of 2 kv heads, head 1 alone:", "Cause: documents start at 500, not at 0."]),
        (shifted(0, 0)[:, ::-1], [], False, [OTHER]),
        (shifted(0), [], False, [OTHER]),
    ],
)
def test_each_head_is_judged_by_its_own_row_of_the_reference(
    keys: npt.NDArray[np.float32], wrong: list[int], factor: bool, said: list[str], judged: Layers
) -> None:
    Path("config.json").write_text(json.dumps(QWEN3))
    save_reference(unturned())
    code, layers = judged("--spec", "6", layer0=keys)
    layer = layers["layer0"]
    assert (code, layer["equal"], layer["wrong_heads"], layer["factor_judged"]) == (3, False, wrong, factor)
    assert set(said) <= set(layer["message"])
    assert layer["message"].count(OTHER) == said.count(OTHER)


def test_a_reference_of_heads_that_were_turned_apart_is_theirs(run: Run) -> None:
    Path("config.json").write_text(json.dumps(QWEN3))
    save_reference(unturned())
    np.savez("keys.npz", layer0=shifted(0, 300))
    code, out, _ = run("keys.npz")
    assert (code, UNJUDGED in out, OTHER in out, "Kv heads are rotated differently." in out) == (3, False, False, True)


@pytest.mark.parametrize(
    ("empty", "reference", "since"), [(0, False, 12), (0, True, 12), (np.nan, False, 12), (np.nan, True, 5)]
)
def test_keys_that_were_never_written_are_wrong_from_the_first(
    empty: float, reference: bool, since: int, judged: Layers
) -> None:
    if reference:
        save_reference(*[unturned()] * 4)
    keys = turned(IDS)
    head, late = keys.copy(), keys.copy()
    head[:, 1], late[since:] = empty, empty
    code, layers = judged("--spec", SPEC, layer0=keys * np.float32(empty), layer1=keys, layer2=head, layer3=late)
    assert (code, [one["equal"] for one in layers.values()]) == (3, [False, True, False, False])
    assert [one["first_wrong"] for one in layers.values()] == [0, None, 0, since]
    assert [one["wrong_heads"] for one in layers.values()] == [[], [], [1], []]
    assert [one["known"] for one in layers.values()][:3] == [0, 1, 0.5]
    assert OTHER not in str(layers)
    assert all(layers[name]["factor_judged"] == reference for name in ("layer1", "layer2", "layer3"))


def test_most_keys_that_were_never_written_raise_no_warning(judged: Layers) -> None:
    keys = turned(IDS)[:, :1]
    keys[5:] = 0
    code, layers = judged("--spec", SPEC, keys=keys)
    assert (code, layers["keys"]["first_wrong"]) == (3, 5)


def test_ids_are_counted_as_the_heads_that_are_named_tell_them(run: Run, judged: Layers) -> None:
    keys = heads(turned(IDS), turned(IDS + 40 * (np.arange(16) >= 3)))
    layer = judged("--spec", SPEC, keys=keys, reference=unturned())[1]["keys"]
    assert (layer["known"], layer["unknown_tokens"], layer["wrong_heads"]) == (1, 0, [1])
    assert run("keys.npz", "--spec", SPEC)[1].startswith("keys: 96 of 96 ids of 2 kv heads read, at most ")


def test_keys_before_their_rotation_are_one_key_where_few_pairs_tell_no_ids(judged: Layers) -> None:
    save_qwen25(head_dim=16, sections=[2, 3, 3], theta=1e6)
    key = np.random.default_rng(0).normal(size=(2, 8, 2)).view(np.complex128)[..., 0]
    angle = IDS[np.repeat([0, 1, 2], [2, 3, 3])].T * 1e6 ** -(np.arange(8) / 8)
    right, still = (
        np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float32)
        for pairs in (key * np.exp(1j * turns)[:, None] for turns in (angle, 0 * angle))
    )
    for references in ([], [still[0]] * 3):
        save_reference(*references)
        code, layers = judged("--spec", SPEC, layer0=right, layer1=heads(right, still), layer2=still)
        assert (code, [one["wrong_heads"] for one in layers.values()]) == (3, [[], [1], []])
        assert [one["message"].count(ONE_KEY) for one in layers.values()] == [0, 1, 1]
        assert [one["first_wrong"] for one in layers.values()] == [None, 1, 1]
        assert "Cause" not in str(layers)


def test_lengths_of_another_pairing_are_no_factor(judged: Layers) -> None:
    keys = turned(IDS).reshape(16, 2, 2, 64).swapaxes(2, 3).reshape(16, 2, 128)
    code, layers = judged("--spec", SPEC, keys=keys, reference=unturned())
    assert (code, "times as long" in str(layers)) == (3, False)


def test_one_token_alone_is_not_as_meant(judged: Layers) -> None:
    code, layers = judged("--spec", "1", keys=turned(IDS[:, :1]))
    said = "The one token is the reference: its ids are 0 from itself, and nothing is told."
    assert (code, said in layers["keys"]["message"]) == (3, True)
    assert judged(keys=turned(IDS[:, 7:8]), reference=unturned(), position_ids=IDS[:, 7:8])[0] == 0


@pytest.mark.parametrize(
    ("arrays", "arguments", "message"),
    [
        (
            {"position_ids": IDS},
            [],
            "mmpos: error: keys.npz: got ['position_ids'], want an array of keys, such as keys",
        ),
        (
            {"keys": IDS},
            [],
            "mmpos: error: keys.npz: got keys of shape (3, 16), want keys (tokens, kv_heads, head_dim), or",
        ),
        (
            {"keys": turned(IDS)},
            ["--spec", "3"],
            "mmpos: error: keys.npz: keys of shape (16, 2, 128), reading: got 3 axes and 16 tokens, want 3 axes and 3",
        ),
        (
            {"keys": turned(IDS).astype(np.int8)},
            ["--spec", SPEC],
            "mmpos: error: keys.npz: keys of shape (16, 2, 128), keys: got dtype int8, want floats",
        ),
        (
            {"keys": turned(IDS), "position_ids": IDS},
            ["--spec", SPEC],
            "mmpos: error: --spec: got one beside position_ids in the dump, want one of them",
        ),
        (
            {"keys": turned(IDS), "position_ids": IDS[[0, 0, 1, 2]]},
            [],
            "mmpos: error: position_ids: got shape (4, 16), want (3, tokens) or (3, batch, length); leave out the text",
        ),
        (
            {"keys": turned(IDS), "position_ids": np.int64(3)},
            [],
            "mmpos: error: position_ids: got shape (), want (3, tokens) or (3, batch, length)",
        ),
        (
            {"keys": turned(IDS)[None], "position_ids": IDS[:, None], "lengths": [16, 16]},
            [],
            "mmpos: error: position_ids of shape (3, 1, 16), lengths: got shape (2,), want (1,)",
        ),
        (
            {"keys": turned(IDS)[None], "position_ids": IDS[:, None], "lengths": [17]},
            [],
            "mmpos: error: position_ids of shape (3, 1, 16), lengths[0]: got 17, want <= 16",
        ),
        ({"keys": turned(IDS), "position_ids": IDS}, ["--start", "3"], "mmpos: error: --start: got one without --spec"),
        ({"keys": turned(IDS)}, ["--spec", "3", "--ids", "x"], "mmpos: error: --spec: got one beside --ids"),
    ],
)
def test_bad_dumps(arrays: dict[str, Any], arguments: list[str], message: str, run: Run) -> None:
    np.savez("keys.npz", **arrays)
    code, out, err = run("keys.npz", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)


def test_files_that_are_no_dumps(run: Run) -> None:
    Path("keys.npz").write_bytes(b"no archive")
    for name, got in (("keys.npz", "got "), ("missing.npz", "got No such file")):
        code, _, err = run(name)
        assert code == 2
        assert err.startswith(f"mmpos: error: {name}: {got}")


@pytest.mark.parametrize("shape", [(2, 8), (4, 4)])
def test_sentences_do_not_contradict_each_other(run: Run, shape: tuple[int, int]) -> None:
    """An axis that stands in place of another in few bits: the rotation as a whole looks as it was meant."""
    height, width = shape
    patch = np.arange(16)
    ids = np.concatenate([np.tile(np.arange(90), (3, 1)), np.stack([0 * patch, patch // width, patch % width]) + 90], 1)
    ids = np.concatenate([ids, np.tile(np.arange(300), (3, 1)) + 90 + max(height, width)], axis=1)
    np.save("ids.npy", ids)
    keys = turned(ids[[0, 1, 0]])
    keys = keys * (1 + 0.03 * np.random.default_rng(3).normal(size=keys.shape).astype(np.float32))  # of e4m3
    np.save("keys.npy", keys)
    code, out, _ = run("keys.npy", "--ids", "ids.npy")
    assert code == 3
    assert "axis 0 (frame) is used in place of axis 2 (col)" in out
    assert "rotation that was meant" not in out


def test_the_first_wrong_token_is_counted_over_all_rows_in_json_and_in_words(judged: Layers) -> None:
    ids = np.concatenate([np.tile(np.arange(16), (3, 1)), IDS], axis=1)
    late = ids + (np.arange(32) >= 29)
    code, layers = judged("--spec", "16", "--spec", SPEC, late=turned(late), other=turned(ids[[0, 0, 0]]))
    assert (code, {name: layer["first_wrong"] for name, layer in layers.items()}) == (3, {"late": 29, "other": 20})
    said = " ".join(layers["late"]["message"])
    assert "documents[1], token 13, is token 2 of a run of text (segment 3)" in said
    assert "Counted over all rows, this is token 29." in said
    other = " ".join(layers["other"]["message"])
    assert "The first token with a wrong key is 20. Cause: all pairs rotate by axis 0" in other


def test_a_report_draws_the_tokens_of_each_layer(judged: Layers, folder: Path) -> None:
    ids = np.tile(np.arange(16), (3, 1))
    late = ids + (np.arange(16) >= 12)
    judged("--spec", "16", "--html", "report.html", late=turned(late), right=turned(ids))
    late_layer, right_layer = (folder / "report.html").read_text("utf-8").split("<h2>")[1:]
    assert re.findall("<title>(.*?)</title>", late_layer) == ["tokens 0 to 11: right", "tokens 12 to 15: wrong"]
    assert re.findall("<title>(.*?)</title>", right_layer) == ["tokens 0 to 15: ids read"]


def test_tokens_that_cannot_be_read_are_different_and_those_that_may_be_right_are_counted(judged: Layers) -> None:
    ids = np.tile(np.arange(200), (3, 1))
    keys = turned(ids)
    keys[150] = np.nan
    code, layers = judged(nan=keys, position_ids=ids)
    layer = layers["nan"]
    assert (code, layer["equal"], layer["unknown_tokens"], layer["first_wrong"]) == (3, False, 0, 150)
    assert "Cause: no id explains the keys of 1 token." in layer["message"]
    keys[150] = keys[149]
    keys[150, :, np.arange(128) % 64 % 3 == 2] = 0  # one axis alone
    layer = judged(half=keys, position_ids=ids)[1]["half"]
    assert (layer["equal"], layer["first_wrong"]) == (False, 150)
