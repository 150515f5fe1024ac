"""MMPosProcessor: batches equal to the sequences of SequenceBuilder, chats, saving and loading, and errors."""

from __future__ import annotations

import base64
import importlib
import json
import pickle
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote_from_bytes

import numpy as np
import pytest
import torch
from chat_tokenizer import OURS, TEMPLATE, chat_tokenizer
from data_corpus import photo
from refusals import assert_refused
from tokenizers.processors import TemplateProcessing

import mmpos
from mmpos import SCHEMES, ImageProcessor, ImageSize, InvalidInputError, Markers, MmposError
from mmpos.integrations.hf import MMPosProcessor
from mmpos.integrations.hf.processor import scheme_of, scheme_to_json
from mmpos.integrations.hf.texts import expand
from mmpos.schemes import Flatten, MRopeQwen25, RopeTie, RopeTieV2
from mmpos.sequence.builder import MarkerIds

BOS, EOS, PAD, USER, ASSISTANT, BEGIN, END, PATCH, ROW = range(9)
IMAGES = ImageProcessor("pillow", patch_size=4, spatial_merge_size=2, min_pixels=0, max_tokens=12)
WIDE, TALL = photo(1), photo(0)  # 24x32 and 16x40 pixels: 4x3 and 5x2 tokens, checked by the first test
TEXTS = ["What is [PATCH] this?", "A cat", "[PATCH] a cup of coffee [PATCH]"]


def make_processor(tokenizer: Any = None, **options: Any) -> MMPosProcessor:
    tokenizer = chat_tokenizer() if tokenizer is None else tokenizer
    return MMPosProcessor(tokenizer, **{"images": IMAGES, "chat_template": TEMPLATE, **options})


def build(processor: MMPosProcessor, text: str, images: list[Any]) -> mmpos.InterleavedSequence:
    """Build one row with SequenceBuilder from pieces of text and images."""
    remaining, parts = iter(images), ["<s>"]
    for n, piece in enumerate(text.split("[PATCH]")):
        parts += ([next(remaining)] if n else []) + ([piece] if piece else [])
    tokenizer = processor.tokenizer
    ids = [part if not isinstance(part, str) else tokenizer.encode(part, add_special_tokens=False) for part in parts]
    return mmpos.SequenceBuilder(
        tokenizer, processor.images, processor.scheme, processor.markers, processor.start
    ).build(ids)


def unpadded(batch: Any, key: str, row: int) -> Any:
    """Return the values of a row without its padding."""
    value = batch[key][:, row] if key == "mm_position_ids" else batch[key][row]
    return value[..., batch["attention_mask"][row] == 1].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "options",
    [{}, {"scheme": RopeTieV2(), "start": 7}, {"markers": Markers(row="[ROW]")}, {"scheme": "mrope"}],
    ids=["default", "half-integers", "row-separators", "mrope"],
)
def test_every_row_equals_the_sequence_that_the_builder_builds(options: dict[str, Any], side: str) -> None:
    processor = make_processor(**options)
    photos = [[WIDE], [], [TALL, WIDE]]
    batch = processor(photos, TEXTS, padding=True, padding_side=side, return_tensors="np")
    rows = [build(processor, text, images) for text, images in zip(TEXTS, photos, strict=True)]
    lengths = [row.input_ids.size for row in rows]
    width = max(lengths)
    real = [[1] * n + [0] * (width - n) for n in lengths]
    assert batch["attention_mask"].tolist() == [row[::-1] if side == "left" else row for row in real]
    for i, row in enumerate(rows):
        assert unpadded(batch, "input_ids", i) == row.input_ids.tolist()
        assert unpadded(batch, "mm_token_type_ids", i) == row.token_type_ids.tolist()
        assert unpadded(batch, "mm_position_ids", i) == row.positions.dense().tolist()
    padding = batch["attention_mask"] == 0
    assert (batch["input_ids"][padding] == PAD).all()
    assert not batch["mm_token_type_ids"][padding].any()
    assert not batch["mm_position_ids"][:, padding].any()
    assert batch["mm_next_positions"].tolist() == [int(row.positions.next_positions[0]) for row in rows]
    assert batch["deltas"].tolist() == [int(row.positions.deltas[0]) for row in rows]
    grids = np.concatenate([row.grid_thw for row in rows])
    assert grids.tolist() == [[1, 4, 3], [1, 5, 2], [1, 4, 3]]
    assert batch["image_grid_thw"].tolist() == [[1, 8, 6], [1, 10, 4], [1, 8, 6]]  # before merging
    np.testing.assert_array_equal(batch["patches"], np.concatenate([r.patches for r in rows if r.patches is not None]))
    np.testing.assert_array_equal(batch["positions"].dense().reshape(-1, 3, width), batch["mm_position_ids"])


def test_rows_without_padding_are_lists() -> None:
    processor = make_processor()
    batch = processor([WIDE], TEXTS[:2])
    rows = [build(processor, TEXTS[0], [WIDE]), build(processor, TEXTS[1], [])]
    assert batch["input_ids"] == [row.input_ids.tolist() for row in rows]
    assert batch["attention_mask"] == [[1] * row.input_ids.size for row in rows]
    assert batch["mm_token_type_ids"] == [row.token_type_ids.tolist() for row in rows]
    assert [ids.tolist() for ids in batch["mm_position_ids"]] == [row.positions.dense().tolist() for row in rows]
    wide = processor([WIDE], TEXTS[:2], padding=True)
    assert [ids.shape for ids in wide["mm_position_ids"]] == [(2, len(batch["input_ids"][0]))] * 2
    assert wide["input_ids"][1][-1] == PAD


def test_lists_of_rows_convert_to_the_same_tensors_as_a_call_even_after_pickling() -> None:
    processor = make_processor(scheme="rope-tie-v2")
    images, texts = [[WIDE], [], [TALL]], ["[PATCH]A", "cat", "A [PATCH]"]
    listed = processor(images, texts, padding=True)
    for batch in (pickle.loads(pickle.dumps(listed)), listed):
        batch.convert_to_tensors("pt")
        want = processor(images, texts, padding=True, return_tensors="pt")
        assert all(torch.equal(batch[key], want[key]) for key in want.keys() - {"positions"})
    with pytest.raises(ValueError, match="padding=True"):
        processor(text=["A", "A cat"]).convert_to_tensors("pt")


def test_padding_requires_a_padding_token() -> None:
    without = make_processor(chat_tokenizer(pad_token=None))
    (row,) = without(text=["this"])["input_ids"]
    assert without(text=["this", "this"], padding=True, return_tensors="pt")["input_ids"].tolist() == [row, row]
    message = "tokenizer.pad_token: got None, want a padding token"
    assert_refused(message, lambda: without(text=["A cat", "this"], padding=True))


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_never_removes_an_image_token(side: str) -> None:
    processor = make_processor(chat_tokenizer(truncation_side=side))
    text = "What is [PATCH] this?"
    untruncated = processor([TALL], text)["input_ids"][0]
    spare = 2 + (len(untruncated) - untruncated.index(END) - 1 if side == "right" else untruncated.index(BEGIN))
    kept = int(side == "left")  # the <s> that the tokenizer adds
    room = len(untruncated) - spare + 2 + kept  # leaves no tokens between the image and the cut
    cut = processor([TALL], [text, "this"], truncation=True, max_length=room, padding=True, return_tensors="np")
    expected = untruncated[:room] if side == "right" else [BOS, *untruncated[1 - room :]]
    assert cut["input_ids"][0].tolist() == expected
    assert unpadded(cut, "input_ids", 1) == processor(text="this")["input_ids"][0]
    again = processor.positions(cut["input_ids"], cut["image_grid_thw"], cut["attention_mask"])
    np.testing.assert_array_equal(again.dense().reshape(2, 2, -1), cut["mm_position_ids"])
    options: dict[str, Any] = {"return_offsets_mapping": True, "return_tensors": "pt"}
    (offsets,) = processor([TALL], text, truncation=True, max_length=room, **options)["offset_mapping"]
    assert type(offsets) is list  # accessed one by one
    spelling = {PATCH: "[PATCH]", BEGIN: "[PATCH]", END: "[PATCH]", BOS: ""}
    decode = processor.tokenizer.decode
    assert [text[a:b] for a, b in offsets] == [spelling.get(token) or decode(token) * (token > 8) for token in expected]
    assert processor([TALL], text, truncation=True)["input_ids"] == [untruncated]  # the tokenizer sets no limit
    message = (
        rf"^max_length: got {room - 1}, which removes tokens of image 0 from text\[0\] of {len(untruncated)} tokens"
    )
    with pytest.raises(InvalidInputError, match=message):
        processor([TALL], text, truncation=True, max_length=room - 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_spans_of_images_follow_truncation(side: str) -> None:
    grids = np.array([[1, 1, 2], [1, 2, 1]])
    rows = expand(
        [[9, 9, PATCH, 9, 9], [9, 9, 9, PATCH, 9, 9, 9]], grids, None, MarkerIds(BEGIN, END, PATCH, None, None)
    )
    image = [BEGIN, PATCH, PATCH, END]
    for length in (9, 8):
        rows = rows.truncated(length, side, np.zeros((2, 2), np.int64))
        assert [rows.input_ids[a:b].tolist() for a, b in zip(rows.first, rows.stop, strict=True)] == [image, image]
    second = [9] * 3 + image + [9] * 3
    assert rows.input_ids[8:].tolist() == (second[:8] if side == "right" else second[-8:])
    assert rows.segments().extents[2].tolist() == ([3, 2, 3, 4, 1, 2] if side == "right" else [3, 2, 3, 2, 1, 4])


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_special_tokens_added_by_the_tokenizer(side: str) -> None:
    processor = make_processor(chat_tokenizer(truncation_side=side))
    special = [("<s>", BOS), ("</s>", EOS)]
    processor.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=special)
    untruncated = processor(text="What is </s> this?")["input_ids"][0]
    assert (untruncated[0], untruncated[-1], untruncated.count(EOS)) == (BOS, EOS, 2)  # one </s> is in the text
    for length in range(2, len(untruncated) + 2):
        text = (
            untruncated[1:-1][: length - 2]
            if side == "right"
            else untruncated[1:-1][max(len(untruncated) - length, 0) :]
        )
        assert processor(text="What is </s> this?", max_length=length)["input_ids"] == [[BOS, *text, EOS]]
    with pytest.raises(InvalidInputError, match=r"^max_length: got 1, want >= 2, the number of special tokens"):
        processor(text="What is </s> this?", max_length=1)
    assert processor(text="", max_length=2)["input_ids"] == [[BOS, EOS]]


def test_a_call_without_text_returns_only_images() -> None:
    batch = make_processor()(WIDE, return_tensors="pt")
    assert sorted(batch) == ["image_grid_thw", "patches"]
    assert batch["patches"].dtype == torch.uint8
    values = make_processor(temporal_patch_size=2)([WIDE], return_tensors="pt")["pixel_values"]
    assert torch.equal(values, IMAGES.pixel_values(batch["patches"]))


def chat(*content: Any, answer: str | None = None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": list(content)}]
    return messages + [{"role": "assistant", "content": [{"type": "text", "text": answer}]}] * (answer is not None)


def text_block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def image_block(image: object) -> dict[str, Any]:
    return {"type": "image", "image": image}


@pytest.mark.parametrize("method", ["call", "template"])
def test_chats_equal_the_text_that_their_template_renders(method: str) -> None:
    processor = make_processor()
    chats = [
        chat(image_block(WIDE), text_block("What is this?"), answer="A cat"),
        [{"role": "user", "content": "coffee"}],
    ]
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    if method == "call":
        batch = processor(text=chats, add_generation_prompt=True, **options)
    else:
        batch = processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, add_generation_prompt=True, processor_kwargs=options
        )
    texts = ["<s><|user|>[PATCH]What is this?<|assistant|>A cat</s><|assistant|>", "<s><|user|>coffee<|assistant|>"]
    assert processor.apply_chat_template(chats, add_generation_prompt=True) == texts
    want = processor([WIDE], texts, add_special_tokens=False, **options)
    assert sorted(batch) == sorted(want)
    for key in sorted(batch.keys() - {"positions"}):
        assert torch.equal(batch[key], want[key]), key
    assert batch["input_ids"][0, :4].tolist() == [BOS, USER, BEGIN, PATCH]


def test_every_kind_of_image_source_is_supported_in_a_chat(tmp_path: Path) -> None:
    processor = make_processor()
    path = tmp_path / "a photo.jpg"
    path.write_bytes(WIDE)
    encoded = base64.b64encode(WIDE).decode()
    url = f"data:image/jpeg;base64,{encoded}"
    blocks: list[dict[str, Any]] = [
        image_block(WIDE),
        image_block("data:image/jpeg," + quote_from_bytes(WIDE)),
        image_block(url),
        {"type": "image", "path": str(path)},
        {"type": "image", "url": url},
        {"type": "image", "base64": encoded},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    patches = [processor(text=chat(block))["patches"] for block in blocks]
    separate = processor([WIDE], chat({"type": "image"}))
    assert all((each == separate["patches"]).all() for each in patches)


def test_separate_images_fill_the_empty_image_blocks_of_chats_in_order() -> None:
    processor = make_processor()
    empty = {"type": "image"}
    chats = [chat(empty, text_block("A"), empty), chat(text_block("cat")), chat(empty)]
    with_images = [
        chat(image_block(WIDE), text_block("A"), image_block(TALL)),
        chat(text_block("cat")),
        chat(image_block(TALL)),
    ]
    got = processor([[WIDE, TALL], [], [TALL]], chats)
    want = processor(text=with_images)
    assert got["input_ids"] == want["input_ids"]
    np.testing.assert_array_equal(got["patches"], want["patches"])
    pixels = np.zeros((16, 16, 3), np.uint8)
    alone = processor(text=chat(image_block(pixels)))["patches"]
    np.testing.assert_array_equal(processor(pixels, chats[2])["patches"], alone)
    # Rows read from a table have every key in every block; most keys are None.
    rows = chat({**text_block("A"), "image": None}, {"type": "image", "image": None, "url": None, "text": None})
    np.testing.assert_array_equal(processor(pixels, rows)["patches"], alone)
    for images, text, message in (
        ([[WIDE], [], [TALL]], chats, r"^images\[0\]: got 1 image, want 2, the placeholders of text\[0\]$"),
        ([WIDE, TALL, TALL], chats, r"^images: got list, want a list of images for each of 3 chats$"),
        (WIDE, with_images[0], r"^images cannot be combined with chats that contain images$"),
        (None, chats[2], r"^images: got 0 images, want 1, the placeholders of text$"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            processor(images, text)


@pytest.mark.parametrize("key", ["images", "processor_kwargs"])
def test_separate_images_do_not_replace_those_of_a_chat(key: str) -> None:
    processor = make_processor()
    separate: Any = [TALL] if key == "images" else {"images": [TALL]}
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, key: separate}
    assert processor.apply_chat_template(chat({"type": "image"}), **options)["image_grid_thw"].tolist() == [[1, 10, 4]]
    with pytest.raises(InvalidInputError, match=r"^images cannot be combined with chats that contain images$"):
        processor.apply_chat_template(chat(image_block(WIDE)), **options)


def test_the_final_message_can_be_continued() -> None:
    processor = make_processor(chat_template=TEMPLATE.replace("{{ eos_token }}", ""))
    messages = chat(image_block(TALL), text_block("What is <s> this?"), answer="A cat")
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "continue_final_message": True}
    ids = processor.apply_chat_template(messages, **options)["input_ids"][0]
    assert processor.tokenizer.decode(ids[ids.index(ASSISTANT) :]) == "<|assistant|>A cat"


def test_templates_receive_every_key_and_render_all_special_tokens() -> None:
    template = (
        "{% for m in messages %}{{ m.name }}: {% for c in m.content %}[PATCH] {{ c.detail }}{% endfor %}{% endfor %}"
    )
    processor = make_processor(chat_template=template)
    block = {"type": "image", "path": mmpos.__path__[0] + "/photos/coffee.jpg", "detail": "high"}
    messages = [{"role": "user", "name": "Ann", "content": [block]}]
    assert processor.apply_chat_template(messages) == "Ann: [PATCH] high"
    ids = processor(text=messages)["input_ids"][0]
    assert BOS not in ids
    assert processor.tokenizer.decode(ids).startswith("Ann: [IMG][PATCH]")
    assert "path" in block  # the caller's messages are unchanged


def test_special_tokens_spelled_out_by_users_remain_text() -> None:
    processor = make_processor()
    words = "is </s> [PATCH] or [IMG]?"
    batch = processor(text=chat(image_block(WIDE), text_block(words)))
    ids = batch["input_ids"][0]
    assert ids.count(PATCH) == 12
    assert ids.count(BEGIN) == ids.count(END) == 1
    assert EOS not in ids
    assert processor.tokenizer.decode(ids[ids.index(END) + 1 :]) == words
    # They become special tokens on request, and in plain text, which the caller writes.
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "sanitize_control_tokens": False}
    with pytest.raises(InvalidInputError, match=r"^images\[0\]: got 1 image, want 2, the placeholders of text\[0\]$"):
        processor.apply_chat_template(chat(image_block(WIDE), text_block(words)), **options)


def test_the_assistant_mask_covers_the_answer() -> None:
    processor = make_processor()
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    chats = [
        chat(image_block(WIDE), text_block("What is this?"), answer="A cat"),
        chat(text_block("coffee"), answer="this"),
    ]
    padding = {"padding": True, "padding_side": "left"}
    batch = processor.apply_chat_template(chats, processor_kwargs=padding, return_tensors="pt", **options)
    grouped = processor.apply_chat_template(
        chats, processor_kwargs={"text_kwargs": {**padding, "return_tensors": "pt"}}, **options
    )
    assert torch.equal(grouped["assistant_masks"], batch["assistant_masks"])
    masked = [ids[mask == 1] for ids, mask in zip(batch["input_ids"], batch["assistant_masks"], strict=True)]
    assert [processor.tokenizer.decode(ids) for ids in masked] == ["A cat</s>", "this</s>"]


def test_a_saved_processor_loads_with_the_same_settings(tmp_path: Path) -> None:
    processor = make_processor(
        scheme=RopeTieV2(rounding="floor"),
        markers=Markers(patch=PATCH, row="[ROW]"),
        add_markers=False,
        start=3,
        temporal_patch_size=1,
        read_files=False,
    )
    processor.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings["scheme"] == {"name": "rope-tie-v2", "axes": 2, "rounding": "floor"}
    loaded = pickle.loads(pickle.dumps(MMPosProcessor.from_pretrained(tmp_path)))
    names = ["images", "scheme", "markers", "add_markers", "start", "temporal_patch_size", "read_files"]
    names.append("chat_template")
    assert [getattr(loaded, name) for name in names] == [getattr(processor, name) for name in names]
    rows = chat(image_block(TALL), text_block("this"))
    got, want = loaded(text=rows, return_tensors="np"), processor(text=rows, return_tensors="np")
    assert sorted(got) == sorted(want)
    assert all((got[key] == want[key]).all() for key in want if key != "positions")
    assert MMPosProcessor.from_pretrained(tmp_path, scheme="mrope").scheme == mmpos.schemes.MRope()


def test_transformers_loads_a_registered_processor(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = type("TinyConfig", (transformers.PreTrainedConfig,), {"model_type": "tiny-with-positions"})
    make_processor().save_pretrained(tmp_path)
    transformers.AutoProcessor.register(config, MMPosProcessor)
    mapping = importlib.import_module("transformers.models.auto.processing_auto").PROCESSOR_MAPPING
    try:
        loaded = transformers.AutoProcessor.from_pretrained(tmp_path)
    finally:
        del mapping._extra_content[config]
    assert type(loaded) is MMPosProcessor
    assert loaded.images == IMAGES


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme_survives_json(name: str) -> None:
    for scheme in (SCHEMES[name](), MRopeQwen25(tokens_per_second=Fraction(3, 2)), RopeTie(axes=np.int64(3))):  # type: ignore[arg-type]
        assert scheme_of(json.loads(json.dumps(scheme_to_json(scheme)))) == scheme


def test_fractional_ids_survive_a_cast() -> None:
    processor = make_processor(scheme="rope-tie-fractional", start=100_000)
    batch = processor([TALL], "A [PATCH]", return_tensors="pt")
    ids = batch["mm_position_ids"].clone()
    assert ids.dtype == torch.float64
    assert (ids.to(torch.bfloat16) != ids).any()
    input_ids = batch.pop("input_ids")  # callers may pass inputs_embeds instead
    cast = batch.to("meta", torch.bfloat16)
    assert cast["mm_position_ids"].device == cast["attention_mask"].device == torch.device("meta")
    cast = processor([TALL], "A [PATCH]", return_tensors="pt").to("cpu", torch.bfloat16)
    assert torch.equal(cast["mm_position_ids"], ids)
    assert torch.equal(cast["input_ids"], input_ids)
    assert cast["positions"].fractional
    values = make_processor(scheme="rope-tie-v2", temporal_patch_size=2)(TALL, "[PATCH]", return_tensors="pt")
    assert values.to(torch.bfloat16)["pixel_values"].dtype == torch.bfloat16


@pytest.mark.parametrize("markers", [Markers(), Markers(row="[ROW]"), Markers(None, None, row="[ROW]", last_row=EOS)])
def test_positions_computed_from_tokens_equal_those_of_the_call(markers: Markers) -> None:
    processor = make_processor(start=5, markers=markers)
    batch = processor([WIDE, TALL, WIDE], TEXTS, padding=True, padding_side="left", return_tensors="pt")
    again = processor.positions(batch["input_ids"], batch["image_grid_thw"], batch["attention_mask"])
    np.testing.assert_array_equal(again.table, batch["positions"].table)
    np.testing.assert_array_equal(again.documents, batch["positions"].documents)


def test_a_processor_has_the_attributes_of_transformers() -> None:
    processor = make_processor()
    assert (processor.image_token, processor.image_token_id, processor.image_token_ids) == ("[PATCH]", PATCH, [PATCH])
    batch = processor([WIDE], "[PATCH]", return_tensors="pt")
    assert set(processor.model_input_names) <= set(batch)
    assert "pixel_values" in make_processor(temporal_patch_size=2).model_input_names
    assert repr(processor).startswith("MMPosProcessor(")
    decode: Any = processor.batch_decode
    assert decode(processor(text=["A cat"])["input_ids"]) == ["<s>A cat"]
    assert chat_tokenizer().convert_tokens_to_ids(list(OURS)) == [BEGIN, END, PATCH, ROW]
    processor = make_processor(chat_tokenizer(chat_template="{{ messages[0].content }}"), chat_template=None)
    assert processor.apply_chat_template([{"role": "user", "content": "A cat"}]) == "A cat"


# Errors.


@dataclass(frozen=True)
class Unregistered(Flatten):
    name: ClassVar[str] = "unregistered"


URL = "data:image/jpeg"
PAIR = ["A", "sixteen:"]
FLOOR, NO_RATE = ({"name": "rope-tie", "rounding": "floor"}, {"name": "mrope-qwen2.5", "tokens_per_second": "x"})
CALLS: list[tuple[str, object, object, dict[str, Any]]] = [
    ("images: got 1 image, want 0, the placeholders of text", [WIDE], ["A", "cat"], {}),
    ("images: got 0 images, want 1, the placeholders of text", None, "A [PATCH]", {}),
    ("images[0]: got 1 image, want 2, the placeholders of text[0]", [[WIDE]] * 2, ["[PATCH][PATCH]", "A"], {}),
    ("images: got 1 lists, want 2, one per text", [[WIDE]], ["[PATCH]", "A"], {}),
    ("images[1]: got bytes, want all images in lists, or none in lists", [[WIDE], WIDE], ["[PATCH]", "[PATCH]"], {}),
    ("images[1][0]: image: got ", [[], [b"no"]], ["A", "[PATCH]"], {}),
    ("images[0]: got the text 'no.jpg', want the path of an existing file, bytes, a", ["no.jpg"], "[PATCH]", {}),
    ("images[0]: got the text 'x://a.jpg', want the path of a file, bytes", ["x://a.jpg"], "[PATCH]", {}),
    (f"images[0]: got the data URL '{URL};base64', want a comma", [f"{URL};base64"], "[PATCH]", {}),
    ("images: got images with and without pixels", [WIDE, ImageSize(9, 9)], "[PATCH] [PATCH]", {}),
    ("text: got None, want text, a chat, images or videos", None, None, {}),
    ("text: got [], want text, a chat, a list of texts", None, [], {}),
    ("text[1]: got int, want text", None, ["A", 3], {}),
    ("text[1]: got no tokens, want at least one", None, ["A", ""], {"add_special_tokens": False}),
    ("pading: got an unknown option, want return_tensors, padding", None, PAIR, {"pading": True}),
    (
        "padding cannot be combined with text_kwargs['padding']", None, PAIR,
        {"padding": True, "text_kwargs": {"padding": False}},
    ),
    ("text_kwargs: got list, want a mapping from names to options", None, PAIR, {"text_kwargs": ["padding"]}),
    ("return_tensors: got 'tf', want one of None, 'pt', 'np'", None, PAIR, {"return_tensors": "tf"}),
    (
        "pad_to_multiple_of: got 8, want a divisor of max_length = 11", None, PAIR,
        {"padding": True, "truncation": True, "max_length": 11, "pad_to_multiple_of": 8},
    ),
    ("padding: got None, want one of True, False", None, PAIR, {"padding": None}),
    ("truncation: got 'only_second', want one of None, True", None, PAIR, {"truncation": "only_second"}),
    (
        "text[1]: got 8 tokens, want <= max_length = 5, or truncation", None, PAIR,
        {"padding": "max_length", "max_length": 5},
    ),
    ("padding: got False for rows of 2 to 8 tokens, want True for return", None, PAIR, {"return_tensors": "pt"}),
    ("max_length: got 0, want >= 1", None, PAIR, {"truncation": True, "max_length": 0}),
    ("add_special_tokens: got 1, want True or False", None, PAIR, {"add_special_tokens": 1}),
    ("add_generation_prompt: got True with text, want a chat", None, PAIR, {"add_generation_prompt": True}),
    (
        "return_offsets_mapping: got True, want False: sanitize_control_tokens=True returns no offsets", None,
        chat(text_block("A")), {"return_offsets_mapping": True},
    ),
    ("videos requires a processor with video_processor", None, "A", {"videos": [np.zeros((2, 3, 8, 8))]}),
    ("audio: got list, want None", None, "A", {"audio": [np.zeros(8)]}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "images", "text", "options"), CALLS, ids=range(len(CALLS)))
def test_invalid_arguments_in_a_call_are_refused(
    message: str, images: object, text: object, options: dict[str, Any]
) -> None:
    assert_refused(message, lambda: make_processor()(images, text, **options), MmposError)


SETTINGS: dict[str, dict[str, Any]] = {
    "scheme: got the field 'rounding', want axes": {"scheme": FLOOR},
    "scheme.tokens_per_second: got 'x'": {"scheme": NO_RATE},
    "scheme: got None, want a Scheme or one of": {"scheme": {}},
    "images: got the field 'patch', want backend, patch_size": {"images": {"patch": 14}},
    "images: got int, want ImageProcessor or its fields": {"images": 14},
    "markers.patch: got '[NO]', want a token with a single id": {"markers": {"patch": "[NO]"}},
    "add_markers: got 'no', want True or False": {"add_markers": "no"},
    "temporal_patch_size: got 0, want >= 1": {"temporal_patch_size": 0},
    "scheme: got Unregistered, want one of mmpos.SCHEMES to write it to a file": {"scheme": Unregistered()},
}


@pytest.mark.parametrize("message", SETTINGS)
def test_invalid_settings_are_refused(message: str) -> None:
    assert_refused(message, lambda: make_processor(**SETTINGS[message]).to_dict(), MmposError)


CONTENT = [{"role": "user", "content": {"type": "image", "image": WIDE}}]
BLOCK = "conversation[1][0].content[0]"
CHATS: dict[str, Any] = {
    "conversation: got str, want a list of messages or a list of conversations": "A cat",
    "conversation: got none, want a list of messages": [],
    "conversation[1]: got none, want a list of messages": [chat(text_block("A")), []],
    "conversation[1]: got str, want a list of messages": [chat(text_block("A")), "A"],
    "conversation[1]: got str, want a message with role and content": [*chat(text_block("A")), "A"],
    "conversation[0].content: got dict, want text, a list of blocks or None": CONTENT,
    **{
        f"{BLOCK}{message}": [chat(text_block("A")), chat(content)]
        for message, content in (
            (".type: got 'video', want text or an image", {"type": "video", "path": "a.mp4"}),
            (".type: got 'audio'", {"type": "audio", "path": "a.mp3"}),
            (".type: got 'video_url'", {"type": "video_url", "video_url": {}}),
            (".type: got 'input_audio'", {"type": "input_audio", "input_audio": {}}),
            (": got the text 'https://a/b.jpg'", {"type": "image", "url": "https://a/b.jpg"}),
            (": got url and path, want one of", {"type": "image", "path": "a", "url": "b"}),
            (".image_url: got None, want the URL of the image", {"type": "image_url", "image_url": {}}),
            (": got dict, want a block with a type", {"text": "A"}),
            (".path: got int, want text or a path", {"type": "image", "path": 5}),
            (".image: got this key in a block of type 'text', want type 'image'", {**text_block("A"), "image": b""}),
            (
                ".image_url: got this key in a block of type 'input_image'",
                {"type": "input_image", "image_url": "data:,"},
            ),
        )
    },
}


@pytest.mark.parametrize("message", CHATS)
def test_invalid_chats_and_blocks_are_refused(message: str) -> None:
    assert_refused(message, lambda: make_processor().apply_chat_template(CHATS[message], tokenize=True), MmposError)
