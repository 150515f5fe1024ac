"""Qwen Omni and NeoMME: ids, audio token counts and the token order of clips match their processors."""

from __future__ import annotations

import importlib
from fractions import Fraction
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from layouts import OMNI, classes, padded
from model_configs import CONFIGS, config_of, settings_of
from rope_batches import AUDIO, SECONDS, audio_tokens
from torch import Tensor
from transformers.models.neomme.processing_neomme import NeoMMEProcessor

import mmpos
from mmpos.schemes import TMRope, TMRopeQwen3
from mmpos.segments import Clip


@pytest.mark.parametrize("model", OMNI)
def test_the_whole_model_and_its_thinker_have_the_same_settings(model: str) -> None:
    whole, thinker = settings_of(model), settings_of(f"{model}_thinker")
    assert (whole.scheme, whole.rotary, whole.placeholders.audio) == (thinker.scheme, thinker.rotary, AUDIO)
    with pytest.raises(mmpos.InvalidInputError, match=r"config\.thinker_config: got none, want the config of"):
        mmpos.from_hf_config({"model_type": model, "talker_config": {}})


@pytest.mark.parametrize("model", OMNI)
def test_audio_token_counts_equal_those_of_the_processor(model: str) -> None:
    frames = [*range(420), 3000, 29999, 30000]
    assert settings_of(model).audio_tokens(frames).tolist() == [audio_tokens(model, n) for n in frames]


def test_audio_tokens_depend_on_the_chunk_length() -> None:
    """A chunk of 40 frames counts as 13 tokens; the three convolutions reduce the other 25 to 13, 7 and 4."""
    config = config_of("qwen3_omni_moe")
    config.thinker_config.audio_config.n_window = 20
    assert mmpos.from_hf_config(config).audio_tokens([65]).tolist() == [17]
    with pytest.raises(mmpos.UnsupportedError, match=r"^audio_tokens: got 'qwen2_vl', want a Qwen Omni model$"):
        settings_of("qwen2_vl").audio_tokens([65])
    with pytest.raises(mmpos.InvalidInputError, match=r"^frames\[1\]: got -1, want >= 0$"):
        mmpos.from_hf_config(config).audio_tokens([65, -1])


def processor_order(model: str, frames: int, patches: int, audio: int, seconds: Fraction) -> list[int]:
    """Return the token types of a clip from the model's processor: 1 for video, 3 for audio, 0 for markers."""
    module = importlib.import_module(f"transformers.models.{model}.processing_{model}")
    kinds = [value for value in classes(module) if hasattr(value, "replace_video_with_audio_token")]
    if not kinds:
        pytest.skip("this Transformers interleaves tokens inside the processor's call")
    (kind,) = kinds
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=1),
        audio_bos_token="0",
        audio_eos_token="0",
        video_token="1",
        audio_token="3",
    )
    processor.get_chunked_index = kind.get_chunked_index.__get__(processor)
    written = kind.replace_video_with_audio_token(
        processor,
        {"video_grid_thw": [(frames, patches, 1)], "video_second_per_grid": [float(seconds)]},
        0,
        {"num_audio_tokens": [audio]},
        0,
        position_id_per_seconds=25 if model == "qwen2_5_omni" else 13,
        seconds_per_chunk=2.0,
    )
    return [0, *map(int, written), 0]


@pytest.mark.parametrize("model", OMNI)
@pytest.mark.parametrize("seconds", SECONDS)
def test_patches_and_audio_are_interleaved_as_in_the_processor(model: str, seconds: Fraction) -> None:
    scheme = TMRope() if model == "qwen2_5_omni" else TMRopeQwen3()
    for frames, patches, audio in [(1, 1, 1), (4, 3, 90), (6, 1, 20), (5, 40, 700)]:
        want = processor_order(model, frames, patches, audio, seconds)
        segments = mmpos.SegmentTable.from_documents(
            [[Clip(patches, 1, frames=frames, audio=audio, seconds_per_frame=seconds)]]
        )
        assert mmpos.place(segments, scheme).token_types(segments).tolist() == want


ROW, WORD = 7, 9
"""The token ids for the end of a row, which only the tokenizer defines, and for text."""


def document_image(config: Any, height: int, width: int) -> list[int]:
    """Return the tokens that the processor writes for a page."""
    rows = [*[config.image_token_id] * width, ROW] * height
    return [config.document_token_id, config.image_token_id, *rows]


def processor_positions(config: Any, ids: Tensor, mask: Tensor, grids: list[tuple[int, int]]) -> Any:
    """Return the (2, batch, seq) ids of the processor."""
    tokenizer = SimpleNamespace(document_token_id=config.document_token_id, row_token_id=ROW)
    processor: Any = SimpleNamespace(
        image_token_id=config.image_token_id, tokenizer=tokenizer, _image_positions=NeoMMEProcessor._image_positions
    )
    return NeoMMEProcessor._build_position_ids(processor, ids, mask, grids)


def test_ids_equal_those_of_the_processor() -> None:
    settings, config, random = settings_of("neomme"), CONFIGS["neomme"](), Random(0)
    for _ in range(200):
        sizes = [
            random.choice([None, (random.randint(1, 5), random.randint(1, 5))]) for _ in range(random.randint(1, 4))
        ]
        rows = [[WORD] * random.randint(1, 30) if size is None else document_image(config, *size) for size in sizes]
        side = random.choice(["left", "right"])
        ids, mask = padded(rows, side), padded([[1] * len(row) for row in rows], side)
        grids = [size for size in sizes if size is not None]
        theirs, thw = processor_positions(config, ids, mask, grids), [(1, *size) for size in grids]
        ours = settings.place(settings.segments(ids, thw, attention_mask=mask)).dense().reshape(theirs.shape)
        np.testing.assert_array_equal(ours * mask.numpy(), (theirs * mask).numpy())
        packed, bounds = [token for row in rows for token in row], np.cumsum([0, *map(len, rows)])
        options: Any = {"cu_seqlens": bounds, "rows": random.choice([None, (ROW, ROW)])}
        ours = settings.place(settings.segments(packed, thw, **options)).dense()
        np.testing.assert_array_equal(ours, theirs.numpy()[:, mask.numpy() == 1])


@pytest.mark.parametrize(
    ("page", "grid", "message"),
    [
        ([5, 6, 6, 6, ROW, 6, 6, WORD], (2, 2), "got a run of 5 placeholders at document 0, token 2, want 6"),
        ([5, 6, 6, 6, ROW], (2, 2), "got a run of 3 placeholders at document 0, token 2, want 6"),
        ([5, 6, 6, 6], (1, 2), "got a run of 2 placeholders at document 0, token 2, want 3"),
    ],
)
def test_pages_that_do_not_fit_their_grids_are_refused(page: list[int], grid: tuple[int, int], message: str) -> None:
    with pytest.raises(mmpos.InvalidInputError) as caught:
        settings_of("neomme").segments(page, [(1, *grid)], rows=(ROW, ROW))
    assert message in str(caught.value)
