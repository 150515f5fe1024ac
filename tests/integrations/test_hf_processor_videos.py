"""Compare MMPosProcessor with the processors of Qwen-VL: chats with videos, token counts, and generation."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chat_tokenizer import QWENS
from data_corpus import photo
from model_configs import config_of as config_of_type
from PIL import Image
from qwen_processors import KINDS, assert_same, both, config_of, drawn_chats
from refusals import assert_refused
from rope_batches import method_of
from tolerance import assert_within, normalised

import mmpos
from mmpos import InvalidInputError, MmposError
from mmpos.integrations.hf import MMPosProcessor
from mmpos.integrations.hf.chat import Frames


def video_metadata(chats: Any, random: np.random.Generator) -> dict[str, Any]:
    """Draw the frames per second of each video; return no arguments if there are no videos."""
    blocks = [block for chat in chats for message in chat for block in message["content"] if isinstance(block, dict)]
    videos = [block["video"] for block in blocks if block["type"] == "video"]
    metadata = [
        {"total_num_frames": len(video), "fps": float(fps), "frames_indices": list(range(len(video)))}
        for video, fps in zip(videos, random.choice([1, 2, 5, 24, 29.97], len(videos)), strict=True)
    ]
    return {"video_metadata": metadata} if metadata else {}


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
@pytest.mark.parametrize("calls", [3, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", KINDS)
def test_batches_and_positions_of_video_chats_equal_those_of_transformers(model: str, calls: int) -> None:
    ours, theirs = both(model)
    method = method_of(model, config_of(model))
    bound = normalised(ours.images.mean, ours.images.std)
    videos = 0
    for seed in range(calls):
        random = np.random.default_rng(seed)
        chats = drawn_chats(random)
        options: dict[str, Any] = {"padding": True, "return_tensors": "pt", **video_metadata(chats, random)}
        if random.random() < 0.4:
            options |= {"min_pixels": 56 * 56, "max_pixels": int(random.choice([28 * 28 * 10, 28 * 28 * 30]))}
        if model == "qwen3_vl":
            options["do_sample_frames"] = bool(random.random() < 0.5)
        want = theirs.apply_chat_template(chats, tokenize=True, return_dict=True, processor_kwargs=dict(options))
        assert_same(ours(text=chats, **options), want, bound)
        got = ours(text=chats, return_positions=True, **options)
        grids = {name: want.get(name) for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
        seconds = {"second_per_grid_ts": grids.pop("second_per_grid_ts")} if model == "qwen2_5_vl" else {}
        tokens = {name: want[name] for name in ("input_ids", "mm_token_type_ids", "attention_mask")}
        ids, deltas = method(**tokens, **grids, **seconds)
        assert torch.equal(got["mm_position_ids"], ids * want["attention_mask"])
        assert torch.equal(got["deltas"], deltas[:, 0])
        again = ours.positions(
            want["input_ids"], grids["image_grid_thw"], want["attention_mask"],
            video_grid_thw=grids["video_grid_thw"], second_per_grid_ts=seconds.get("second_per_grid_ts"),
        )  # fmt: skip
        np.testing.assert_array_equal(again.table, got["positions"].table)
        videos += "video_grid_thw" in want
    assert videos > calls / 3


@pytest.mark.parametrize("model", KINDS)
def test_unpatched_models_generate_the_same_tokens_from_both_batches(model: str) -> None:
    ours, theirs = both(model)
    torch.manual_seed(0)
    network = getattr(transformers, f"{KINDS[model]}ForConditionalGeneration")(config_of(model)).eval()
    chats = drawn_chats(np.random.default_rng(2))
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    want = theirs.apply_chat_template(chats, tokenize=True, return_dict=True, processor_kwargs=dict(options))
    got = ours(text=chats, **options)
    assert {"pixel_values", "pixel_values_videos"} <= set(got)
    assert_within(got["pixel_values"], want["pixel_values"], normalised(ours.images.mean, ours.images.std))
    # Resized pixels may differ in their last bits, which can change the most likely token of a random model.
    got["pixel_values"] = want["pixel_values"]
    tokens = [network.generate(**batch, max_new_tokens=5, do_sample=False).tolist() for batch in (got, want)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0][0]) == got["input_ids"].shape[1] + 5


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
@pytest.mark.parametrize("model", KINDS)
def test_token_counts_equal_those_of_transformers(model: str) -> None:
    ours, theirs = both(model)
    random = np.random.default_rng(0)
    images = random.integers(200, 1000, (40, 2)).tolist()
    videos = [(int(n), *size) for n, size in zip(random.integers(2, 50, 40), images, strict=True)]
    options: list[dict[str, Any]] = [
        {},
        {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 9},
        {"images_kwargs": {"max_pixels": 28 * 28 * 40}},
    ]
    for limits in options:
        counted = [processor._get_num_multimodal_tokens(images, videos, **limits) for processor in (ours, theirs)]
        assert counted[0] == counted[1]
    assert ours._get_num_multimodal_tokens(image_sizes=images).num_video_tokens is None
    assert "num_image_tokens" not in ours._get_num_multimodal_tokens(video_sizes=videos)
    batch = ours([mmpos.ImageSize(*images[0])], QWENS[2])
    assert [sum(batch["mm_token_type_ids"][0])] == ours._get_num_multimodal_tokens(images[:1]).num_image_tokens


def test_all_forms_of_a_video_give_the_same_batch(tmp_path: Path) -> None:
    ours, _ = both("qwen2_vl")
    random = np.random.default_rng(0)
    frames = [random.integers(0, 256, (60, 80, 3), np.uint8) for _ in range(4)]
    paths = [tmp_path / f"{k}.png" for k in range(4)]
    for path, frame in zip(paths, frames, strict=True):
        Image.fromarray(frame).save(path)
    text = "".join(QWENS[token] for token in (0, 3, 1))
    want = ours(text=text, videos=np.stack(frames))
    pictures = [Image.fromarray(frame) for frame in frames]
    files = [path.read_bytes() for path in paths]
    chat = [{"role": "user", "content": [{"type": "video", "video": [str(path) for path in paths]}]}]
    tensor = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    forms: list[Any] = [frames, pictures, files, [frames], [[pictures]], [np.stack(frames)], tensor]
    for videos in forms:
        got = ours(text=[text], videos=videos)
        assert got["input_ids"] == want["input_ids"]
        np.testing.assert_array_equal(got["pixel_values_videos"], want["pixel_values_videos"])
    np.testing.assert_array_equal(ours(text=chat)["pixel_values_videos"], want["pixel_values_videos"])
    assert sorted(ours(videos=frames)) == ["pixel_values_videos", "video_grid_thw"]
    (metadata,) = ours(text=text, videos=frames, return_metadata=True, return_tensors="pt")["video_metadata"]
    assert metadata.total_num_frames == 4


def test_invalid_videos_are_refused() -> None:
    ours, _ = both("qwen2_vl")
    frames = [np.zeros((60, 80, 3), np.uint8)] * 4
    text = "".join(QWENS[token] for token in (0, 3, 1))
    chat = [{"role": "user", "content": [{"type": "video", "video": frames}]}]
    two = {"fps": 2, "num_frames": 2, "do_sample_frames": True}
    by_path = [{"role": "user", "content": [{"type": "video", "path": 3}]}]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("videos: got frames of shapes [(30, 80, 3), (60, 80, 3)]", {"videos": [frames[0], frames[1][:30]]}),
        ("videos[0].frames[0]: image: got ", {"videos": [[b"no"]]}),
        ("videos: got the text 'https://a/b.mp4', want the path of a file, a list", {"videos": "https://a/b.mp4"}),
        ("videos.frames[0]: image: got int, want", {"videos": [3]}),
        ("videos[0]: got ndarray, want the path of a file, a list of frames", {"videos": [np.zeros((2, 2, 2, 2, 2))]}),
        ("videos: got 0 videos, want 1, the placeholders of text", {"videos": None}),
        ("videos: got 2 lists, want 1, one per text", {"videos": [[frames], [frames]]}),
        ("videos[0]: got 2 videos, want 1, the placeholders of text[0]", {"videos": [[frames, frames]]}),
        ("video_metadata: got 2 entries, want 1, one per video", {"videos": frames, "video_metadata": [{}, {}]}),
        ("videos[0]: video: ", {"videos": [frames], "videos_kwargs": two}),
        ("videos cannot be combined with a chat: pass them in its blocks", {"videos": frames, "text": chat}),
        ("conversation[0].content[0].path: got int, want text or a path", {"text": by_path}),
    ]
    for message, options in refused:
        assert_refused(message, partial(ours, **{"text": [text], **options}))
    assert not is_dataclass(Frames(()))  # Transformers 5.24 converts dataclasses in a chat to mappings


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen3_vl"])
def test_markers_are_inserted_around_every_grid_of_a_video(model: str) -> None:
    ours, _ = both(model)
    timestamp = "<{seconds:.1f} seconds>" if model == "qwen3_vl" else None
    marked = MMPosProcessor(
        ours.tokenizer, ours.images, "mrope-qwen3" if timestamp else "mrope", ours.markers, temporal_patch_size=2,
        video_processor=ours.video_processor, video_token=QWENS[3], timestamp=timestamp,
    )  # fmt: skip
    video = np.zeros((4, 56, 56, 3), np.uint8)
    options: dict[str, Any] = {"videos": video, "add_special_tokens": False, "do_sample_frames": False}
    options["return_positions"] = True
    begin, placeholder, end = (QWENS[token] for token in (0, 3, 1))
    text = f"A{placeholder}A" if timestamp else f"A{begin}{placeholder}{end}A"
    got, want = marked(text=f"A{placeholder}A", **options), ours(text=text, **options)
    assert got["input_ids"] == want["input_ids"]
    np.testing.assert_array_equal(got["positions"].dense(), want["positions"].dense())


def test_a_row_that_ends_at_a_fractional_id_has_no_next_position() -> None:
    qwen, _ = both("qwen2_vl")
    ours = MMPosProcessor(
        qwen.tokenizer, qwen.images, "tmrope-qwen3", qwen.markers, temporal_patch_size=2,
        video_processor=qwen.video_processor, video_token=QWENS[3],
    )  # fmt: skip
    text = f"A{QWENS[3]}A"
    metadata = {"fps": 3, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]}
    options: dict[str, Any] = {"do_sample_frames": False, "add_special_tokens": False}
    # The second pair of frames is 2/3 s, or 26/3 ids, after the first.
    for count, is_integer in ((4, False), (2, True)):
        frames = np.zeros((count, 28, 28, 3), np.uint8)
        batch = ours(text=text, videos=frames, video_metadata=metadata, **options)
        assert ("mm_next_positions" in batch, "deltas" in batch) == (is_integer, is_integer)
        assert batch["positions"].resumable.tolist() == [is_integer]


def test_the_tokens_of_a_video_have_the_offsets_of_its_placeholder() -> None:
    ours, _ = both("qwen3_vl")
    text = f"A {QWENS[3]} cat {QWENS[2]}"
    options: dict[str, Any] = {"return_offsets_mapping": True, "add_special_tokens": False}
    batch = ours(mmpos.ImageSize(56, 56), text, videos=np.zeros((4, 56, 56, 3), np.uint8), **options)
    (offsets,), (ids,) = batch["offset_mapping"], batch["input_ids"]
    spans = dict.fromkeys(map(tuple, offsets))
    assert [text[a:b] for a, b in spans if text[a:b].startswith("<|")] == [QWENS[3], QWENS[2]]
    assert {text[a:b] for (a, b), token in zip(offsets, ids, strict=True) if token in (5, 6, 8)} == {QWENS[3]}


def test_invalid_video_settings_are_refused() -> None:
    ours, _ = both("qwen2_vl")
    tokenizer, videos = ours.tokenizer, ours.video_processor
    make: Any = partial(MMPosProcessor, tokenizer, ours.images, ours.scheme, ours.markers)
    of_model: Any = partial(MMPosProcessor.from_hf_config, images=ours.images)
    refused: dict[str, Any] = {
        "video_processor requires video_token": lambda: make(video_processor=videos),
        "video_token requires video_processor": lambda: make(video_token=8),
        "video_processor: got 5, want a video processor of Transf": lambda: make(video_token=8, video_processor=5),
        "video_processor: got {": lambda: make(video_token=8, video_processor={"video_processor_type": "AutoModel"}),
        "video_token: got 'no', want a token with": lambda: make(video_token="no", video_processor=videos),
        "tokenizer: got None with a config, want a tokenizer, or": lambda: of_model(config_of("qwen2_vl")),
        "video_processor: got one for 'glm4v', want None; its videos are unsupported": lambda: of_model(
            config_of_type("glm4v"), tokenizer, video_processor=videos
        ),
        "config: got 'llama', want a model whose config has temporal_patch_size": lambda: of_model(
            transformers.LlamaConfig(), tokenizer
        ),
        "video_sizes requires a processor with video_processor": lambda: make()._get_num_multimodal_tokens(
            video_sizes=[(2, 28, 28)]
        ),
    }
    for message, call in refused.items():
        assert_refused(message, call, MmposError)


def test_text_may_name_files_only_if_read_files_allows_it(tmp_path: Path) -> None:
    ours, _ = both("qwen2_vl")
    path = tmp_path / "a photo.jpg"
    path.write_bytes(photo(1))
    closed = MMPosProcessor(ours.tokenizer, ours.images, ours.scheme, ours.markers, False, read_files=False)
    want = ours(path, QWENS[2])["pixel_values"]
    message = r"content\[0\]: got the text .*; read_files=False forbids paths$"
    for text in (str(path), path.as_uri()):
        blocks = [{"type": "image", "image": text}, {"type": "image_url", "image_url": {"url": text}}]
        for block in blocks:
            chat = [{"role": "user", "content": [block]}]
            np.testing.assert_array_equal(ours(text=chat)["pixel_values"], want)
            with pytest.raises(InvalidInputError, match=message):
                closed(text=chat)
        np.testing.assert_array_equal(ours(text, QWENS[2])["pixel_values"], want)
    with pytest.raises(InvalidInputError, match=message):
        closed(text=[{"role": "user", "content": [{"type": "image", "path": str(path)}]}])
    assert closed(path, QWENS[2])["input_ids"] == ours(path, QWENS[2])["input_ids"]
