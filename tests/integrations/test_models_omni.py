"""The Qwen Omni models: ids and deltas beside their own get_rope_index, the order of clips beside their processors."""

from __future__ import annotations

import importlib
import random
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import TEXT, config_of, settings_of
from test_models_peers import classes, modeling, padded, turned

import mmpos
from mmpos.integrations.models import ModelSettings
from mmpos.schemes import Grids, TMRope, TMRopeQwen3
from mmpos.segments import Audio, Clip
from mmpos.support import native

MODELS = ("qwen2_5_omni", "qwen3_omni_moe")
IMAGE, VIDEO, AUDIO = 151655, 151656, 151646
VISION, VISION_END, SOUND, SOUND_END = 151652, 151653, 151647, 151648
SECONDS = [*(Fraction(2, fps) for fps in (1, 2, 3, 4, 5, 8)), Fraction(5), Fraction(9)]


def theirs(model: str) -> tuple[Any, Any]:
    """get_rope_index of a model, and what stands in for the model itself."""
    (kind,) = (
        value
        for value in classes(modeling(model))
        if "get_rope_index" in vars(value)
        and hasattr(value, "get_llm_pos_ids_for_vision")
        and "PreTrained" in value.__name__
    )
    config = config_of(model).thinker_config
    config.vision_start_token_id = VISION
    if model == "qwen3_omni_moe":
        config.position_id_per_seconds = 13
    told = SimpleNamespace(config=config, spatial_merge_size=2)
    for name in ("get_llm_pos_ids_for_vision", "get_chunked_index"):
        setattr(told, name, getattr(kind, name).__get__(told))
    return kind.get_rope_index, told


def ours(model: str) -> ModelSettings:
    config = config_of(model)
    if model == "qwen3_omni_moe":
        config.thinker_config.position_id_per_seconds = 13
    return mmpos.from_hf_config(config)


def audio_tokens(model: str, features: int) -> int:
    module = importlib.import_module(f"transformers.models.{model}.processing_{model}")
    return int(module._get_feat_extract_output_lengths(features))


@dataclass
class Prompts:
    """Rows of token ids, and what stands in them."""

    rows: list[list[int]] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int]] = field(default_factory=list)
    seconds: list[Fraction] = field(default_factory=list)
    features: list[int] = field(default_factory=list)
    audio: list[int] = field(default_factory=list)

    def sound(self, model: str, rng: random.Random) -> list[int]:
        self.features.append(rng.choice([3, 8, 20, 60, 200, 600]))
        self.audio.append(audio_tokens(model, self.features[-1]))
        return [AUDIO] * self.audio[-1]

    def part(self, model: str, rng: random.Random, what: str) -> list[int]:
        height, width = rng.choice([(1, 1), (2, 3), (3, 2), (1, 30), (40, 1), (4, 4)])
        if what == "text":
            return [TEXT] * rng.randint(1, 5)
        if what == "audio":
            return [SOUND, *self.sound(model, rng), SOUND_END]
        if what == "image":
            self.images.append((1, 2 * height, 2 * width))
            return [VISION, *[IMAGE] * (height * width), VISION_END]
        frames = rng.randint(1, 6)
        self.videos.append((frames, 2 * height, 2 * width))
        self.seconds.append(rng.choice(SECONDS))
        patches = [VIDEO] * (frames * height * width)
        if what == "video":
            return [VISION, *patches, VISION_END]
        mixed = patches[1:] + self.sound(model, rng)
        rng.shuffle(mixed)  # neither side reads the order
        return [VISION, SOUND, VIDEO, *mixed, SOUND_END, VISION_END]


def prompts(model: str, rng: random.Random, clips: bool) -> Prompts:
    made = Prompts()
    while not made.images and not made.videos:
        made = Prompts()
        for _ in range(rng.randint(1, 3)):
            row = [TEXT] * rng.randint(1, 4)
            for _ in range(rng.randint(0, 4)):
                row += made.part(model, rng, rng.choice(["text", "image", "audio", "clip" if clips else "video"]))
            made.rows.append(row + [TEXT] * rng.randint(0, 3))
    return made


def compare(model: str, batches: int, seed: int) -> None:
    """Compare ids and deltas of random batches: images, audio, videos, silent or with their sound."""
    rng = random.Random(seed)
    index, told = theirs(model)
    settings = ours(model)
    for _ in range(batches):
        clips, side = rng.random() < 0.6, rng.choice(["left", "right"])
        made = prompts(model, rng, clips)
        ids, mask = padded(made.rows, side), padded([[1] * len(row) for row in made.rows], side)
        grids = [torch.tensor(grid) if grid else None for grid in (made.images, made.videos)]
        want, delta = index(
            told,
            ids,
            *grids,
            attention_mask=mask,
            use_audio_in_video=clips,
            audio_seqlens=torch.tensor(made.features) if made.features else None,
            second_per_grids=torch.tensor([float(s) for s in made.seconds]) if made.seconds else None,
        )
        segments = settings.segments(
            ids, *grids, attention_mask=mask, seconds_per_frame=made.seconds or None, audio_lengths=made.audio
        )
        positions = settings.place(segments)
        got = positions.dense().reshape(want.shape)
        if model == "qwen2_5_omni":
            np.testing.assert_array_equal(got, want * mask)
        else:  # theirs are sums of float32
            np.testing.assert_allclose(got, want * mask, rtol=1e-6, atol=1e-4)
        for row, following, (change,) in zip(made.rows, positions.documents[2], delta.tolist(), strict=True):
            end = len(row) + change
            # Where theirs lies between two ids, no integer follows.
            assert (abs(end - following) < 1e-3) or (
                following == np.iinfo(np.int64).min and abs(end - round(end)) > 1e-2
            )


@pytest.mark.parametrize("numpy_alone", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_ids_and_deltas_are_those_of_get_rope_index(
    model: str, numpy_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if numpy_alone:
        monkeypatch.setattr(native, "core", None)
    compare(model, 50, seed=numpy_alone)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_many_batches_are_those_of_get_rope_index(model: str, batches: int) -> None:
    compare(model, batches, seed=7)


@pytest.mark.parametrize("model", MODELS)
def test_the_talker_and_the_thinker_alone_have_the_same_settings(model: str) -> None:
    whole, thinker = settings_of(model), settings_of(f"{model}_thinker")
    assert (whole.scheme, whole.rotary, whole.placeholders.audio) == (thinker.scheme, thinker.rotary, AUDIO)
    with pytest.raises(mmpos.InvalidInputError, match=r"config\.thinker_config: got none, want the config of"):
        mmpos.from_hf_config({"model_type": model})


@pytest.mark.parametrize("model", MODELS)
def test_audio_has_as_many_tokens_as_the_processor_of_the_model_writes(model: str) -> None:
    frames = [*range(420), 3000, 29999, 30000]
    assert settings_of(model).audio_tokens(frames).tolist() == [audio_tokens(model, n) for n in frames]


def test_audio_of_chunks_of_another_length_is_counted_by_them() -> None:
    """40 frames are a chunk: 13 tokens, and 25 more are 13, then 7, then 4 after each convolution."""
    config = config_of("qwen3_omni_moe")
    config.thinker_config.audio_config.n_window = 20
    assert mmpos.from_hf_config(config).audio_tokens([65]).tolist() == [17]
    with pytest.raises(mmpos.UnsupportedError, match=r"^audio_tokens: got 'qwen2_vl', want a model of Qwen Omni$"):
        settings_of("qwen2_vl").audio_tokens([65])
    with pytest.raises(mmpos.InvalidInputError, match=r"^frames\[1\]: got -1, want >= 0$"):
        mmpos.from_hf_config(config).audio_tokens([65, -1])


def test_serving_engines_have_ids_of_their_own() -> None:
    assert settings_of("qwen2_5_omni", engine="serving").scheme == TMRope(engine="serving")
    assert settings_of("qwen3_omni_moe", engine="serving").scheme == TMRopeQwen3(25, "serving")


@pytest.mark.parametrize("model", MODELS)
def test_rotations_are_those_of_the_language_model(model: str) -> None:
    settings, text, module = settings_of(model), config_of(model).thinker_config.text_config, modeling(model)
    clip = Clip(2, 3, frames=3, audio=40, seconds_per_frame=1)
    positions = settings.place(mmpos.SegmentTable.from_documents([[mmpos.Text(3), clip, Audio(2), mmpos.Grid(2, 5)]]))
    ids = torch.from_numpy(positions.dense(dtype="float64"))[:, None]
    name = "Qwen2_5OmniRotaryEmbedding" if model == "qwen2_5_omni" else "Qwen3OmniMoeThinkerTextRotaryEmbedding"
    cos, sin = getattr(module, name)(text)(torch.zeros(1), ids)
    turned(settings.rotary, positions, module, cos, sin, "apply_rotary_pos_emb")


def processor_order(model: str, frames: int, patches: int, audio: int, seconds: Fraction) -> list[int]:
    """Token types of a clip as the processor of the model writes it: 1 for video, 3 for audio, 0 for markers."""
    module = importlib.import_module(f"transformers.models.{model}.processing_{model}")
    (kind,) = (value for value in classes(module) if hasattr(value, "replace_video_with_audio_token"))
    told = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=1),
        audio_bos_token="0",
        audio_eos_token="0",
        video_token="1",
        audio_token="3",
    )
    told.get_chunked_index = kind.get_chunked_index.__get__(told)
    written = kind.replace_video_with_audio_token(
        told,
        {"video_grid_thw": [(frames, patches, 1)], "video_second_per_grid": [float(seconds)]},
        0,
        {"num_audio_tokens": [audio]},
        0,
        position_id_per_seconds=25 if model == "qwen2_5_omni" else 13,
        seconds_per_chunk=2.0,
    )
    return [0, *map(int, written), 0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seconds", SECONDS)
def test_patches_and_audio_take_turns_as_the_processor_writes_them(model: str, seconds: Fraction) -> None:
    scheme = TMRope() if model == "qwen2_5_omni" else TMRopeQwen3()
    for frames, patches, audio in [(1, 1, 1), (4, 3, 90), (6, 1, 20), (5, 40, 700)]:
        time = np.array([[seconds.numerator], [seconds.denominator]])
        extra_tokens, clip = np.array([audio]), np.ones(1, np.bool_)
        grids = Grids(
            np.array([[frames], [patches], [1]]),
            np.zeros(1, np.int64),
            np.zeros(1, np.int64),
            None,
            time,
            clip,
            ~clip,
            ~clip,
            extra_tokens,
        )
        runs = scheme.runs(grids)
        assert runs is not None
        types = np.array([1, 3, 0, 0])[runs.content].repeat(runs.tokens)
        want = processor_order(model, frames, patches, audio, seconds)
        assert types.tolist() == want
        segments = mmpos.SegmentTable.from_documents(
            [[Clip(patches, 1, frames=frames, audio=audio, seconds_per_frame=seconds)]]
        )
        assert mmpos.place(segments, scheme).token_types(segments).tolist() == want
