"""The processor of Transformers: its batches beside the sequences of the builder, chats, what is saved, refusals."""

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
WIDE, TALL = photo(1), photo(0)  # 24x32 and 16x40 pixels: 4x3 and 5x2 tokens, as the first test says
TEXTS = ["What is [PATCH] this?", "A cat", "[PATCH] a cup of coffee [PATCH]"]


def processor(tokenizer: Any = None, **told: Any) -> MMPosProcessor:
    tokenizer = chat_tokenizer() if tokenizer is None else tokenizer
    return MMPosProcessor(tokenizer, **{"images": IMAGES, "chat_template": TEMPLATE, **told})


def built(made: MMPosProcessor, text: str, images: list[Any]) -> mmpos.InterleavedSequence:
    """The row as the builder makes it, of pieces of text and images."""
    given, parts = iter(images), ["<s>"]
    for n, piece in enumerate(text.split("[PATCH]")):
        parts += ([next(given)] if n else []) + ([piece] if piece else [])
    tokenizer = made.tokenizer
    ids = [part if not isinstance(part, str) else tokenizer.encode(part, add_special_tokens=False) for part in parts]
    return mmpos.SequenceBuilder(tokenizer, made.images, made.scheme, made.markers, made.start).build(ids)


def of_row(batch: Any, key: str, row: int) -> Any:
    """The tokens of a row without its padding."""
    value = batch[key][:, row] if key == "mm_position_ids" else batch[key][row]
    return value[..., batch["attention_mask"][row] == 1].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "told",
    [{}, {"scheme": RopeTieV2(), "start": 7}, {"markers": Markers(row="[ROW]")}, {"scheme": "mrope"}],
    ids=["default", "half-integers", "row-separators", "mrope"],
)
def test_every_row_is_the_sequence_of_the_builder(told: dict[str, Any], side: str) -> None:
    made = processor(**told)
    photos = [[WIDE], [], [TALL, WIDE]]
    batch = made(photos, TEXTS, padding=True, padding_side=side, return_tensors="np")
    rows = [built(made, text, images) for text, images in zip(TEXTS, photos, strict=True)]
    lengths = [row.input_ids.size for row in rows]
    width = max(lengths)
    real = [[1] * n + [0] * (width - n) for n in lengths]
    assert batch["attention_mask"].tolist() == [row[::-1] if side == "left" else row for row in real]
    for i, row in enumerate(rows):
        assert of_row(batch, "input_ids", i) == row.input_ids.tolist()
        assert of_row(batch, "mm_token_type_ids", i) == row.token_type_ids.tolist()
        assert of_row(batch, "mm_position_ids", i) == row.positions.dense().tolist()
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
    made = processor()
    batch = made([WIDE], TEXTS[:2])
    rows = [built(made, TEXTS[0], [WIDE]), built(made, TEXTS[1], [])]
    assert batch["input_ids"] == [row.input_ids.tolist() for row in rows]
    assert batch["attention_mask"] == [[1] * row.input_ids.size for row in rows]
    assert batch["mm_token_type_ids"] == [row.token_type_ids.tolist() for row in rows]
    assert [ids.tolist() for ids in batch["mm_position_ids"]] == [row.positions.dense().tolist() for row in rows]
    wide = made([WIDE], TEXTS[:2], padding=True)
    assert [ids.shape for ids in wide["mm_position_ids"]] == [(2, len(batch["input_ids"][0]))] * 2
    assert wide["input_ids"][1][-1] == PAD


def test_lists_of_rows_become_the_tensors_of_a_call_also_after_a_pickle() -> None:
    made = processor(scheme="rope-tie-v2")
    images, texts = [[WIDE], [], [TALL]], ["[PATCH]A", "cat", "A [PATCH]"]
    listed = made(images, texts, padding=True)
    for batch in (pickle.loads(pickle.dumps(listed)), listed):
        batch.convert_to_tensors("pt")
        asked = made(images, texts, padding=True, return_tensors="pt")
        assert all(torch.equal(batch[key], asked[key]) for key in asked.keys() - {"positions"})
    with pytest.raises(ValueError, match="padding=True"):
        made(text=["A", "A cat"]).convert_to_tensors("pt")


def test_a_token_to_pad_with_is_needed_where_rows_are_padded() -> None:
    without = processor(chat_tokenizer(pad_token=None))
    (row,) = without(text=["this"])["input_ids"]
    assert without(text=["this", "this"], padding=True, return_tensors="pt")["input_ids"].tolist() == [row, row]
    message = "tokenizer.pad_token: got None, want a token to pad with"
    assert_refused(message, lambda: without(text=["A cat", "this"], padding=True))


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_are_cut_but_no_image_is(side: str) -> None:
    made = processor(chat_tokenizer(truncation_side=side))
    text = "What is [PATCH] this?"
    whole = made([TALL], text)["input_ids"][0]
    spare = 2 + (len(whole) - whole.index(END) - 1 if side == "right" else whole.index(BEGIN))
    stays = int(side == "left")  # the <s> that the tokenizer adds
    room = len(whole) - spare + 2 + stays  # up to the image on that side
    cut = made([TALL], [text, "this"], truncation=True, max_length=room, padding=True, return_tensors="np")
    expected = whole[:room] if side == "right" else [BOS, *whole[1 - room :]]
    assert cut["input_ids"][0].tolist() == expected
    assert of_row(cut, "input_ids", 1) == made(text="this")["input_ids"][0]
    again = made.positions(cut["input_ids"], cut["image_grid_thw"], cut["attention_mask"])
    np.testing.assert_array_equal(again.dense().reshape(2, 2, -1), cut["mm_position_ids"])
    told: dict[str, Any] = {"return_offsets_mapping": True, "return_tensors": "pt"}
    (offsets,) = made([TALL], text, truncation=True, max_length=room, **told)["offset_mapping"]
    assert type(offsets) is list  # to be read one by one
    spelled = {PATCH: "[PATCH]", BEGIN: "[PATCH]", END: "[PATCH]", BOS: ""}
    decode = made.tokenizer.decode
    assert [text[a:b] for a, b in offsets] == [spelled.get(token) or decode(token) * (token > 8) for token in expected]
    assert made([TALL], text, truncation=True)["input_ids"] == [whole]  # this tokenizer knows no limit
    with pytest.raises(
        InvalidInputError, match=rf"^max_length: got {room - 1}, which cuts image 0 off text\[0\] of {len(whole)}"
    ):
        made([TALL], text, truncation=True, max_length=room - 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_that_were_cut_know_where_their_images_are(side: str) -> None:
    grids = np.array([[1, 1, 2], [1, 2, 1]])
    rows = expand(
        [[9, 9, PATCH, 9, 9], [9, 9, 9, PATCH, 9, 9, 9]], grids, None, MarkerIds(BEGIN, END, PATCH, None, None)
    )
    image = [BEGIN, PATCH, PATCH, END]
    for length in (9, 8):
        rows = rows.cut(length, side, np.zeros((2, 2), np.int64))
        assert [rows.input_ids[a:b].tolist() for a, b in zip(rows.first, rows.stop, strict=True)] == [image, image]
    spared = [9] * 3 + image + [9] * 3
    assert rows.input_ids[8:].tolist() == (spared[:8] if side == "right" else spared[-8:])
    assert rows.segments().extents[2].tolist() == ([3, 2, 3, 4, 1, 2] if side == "right" else [3, 2, 3, 2, 1, 4])


@pytest.mark.parametrize("side", ["left", "right"])
def test_special_tokens_that_the_tokenizer_adds_are_not_cut_off(side: str) -> None:
    made = processor(chat_tokenizer(truncation_side=side))
    special = [("<s>", BOS), ("</s>", EOS)]
    made.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=special)
    whole = made(text="What is </s> this?")["input_ids"][0]
    assert (whole[0], whole[-1], whole.count(EOS)) == (BOS, EOS, 2)  # one is text
    for length in range(2, len(whole) + 2):
        text = whole[1:-1][: length - 2] if side == "right" else whole[1:-1][max(len(whole) - length, 0) :]
        assert made(text="What is </s> this?", max_length=length)["input_ids"] == [[BOS, *text, EOS]]
    with pytest.raises(InvalidInputError, match=r"^max_length: got 1, want >= 2, the special tokens of a row$"):
        made(text="What is </s> this?", max_length=1)
    assert made(text="", max_length=2)["input_ids"] == [[BOS, EOS]]


def test_images_alone_are_processed_alone() -> None:
    batch = processor()(WIDE, return_tensors="pt")
    assert sorted(batch) == ["image_grid_thw", "patches"]
    assert batch["patches"].dtype == torch.uint8
    values = processor(temporal_patch_size=2)([WIDE], return_tensors="pt")["pixel_values"]
    assert torch.equal(values, IMAGES.pixel_values(batch["patches"]))


def chat(*content: Any, answer: str | None = None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": list(content)}]
    return messages + [{"role": "assistant", "content": [{"type": "text", "text": answer}]}] * (answer is not None)


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def seen(image: object) -> dict[str, Any]:
    return {"type": "image", "image": image}


@pytest.mark.parametrize("way", ["call", "template"])
def test_chats_are_the_text_that_their_template_writes(way: str) -> None:
    made = processor()
    chats = [chat(seen(WIDE), said("What is this?"), answer="A cat"), [{"role": "user", "content": "coffee"}]]
    told: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    if way == "call":
        batch = made(text=chats, add_generation_prompt=True, **told)
    else:
        batch = made.apply_chat_template(
            chats, tokenize=True, return_dict=True, add_generation_prompt=True, processor_kwargs=told
        )
    texts = ["<s><|user|>[PATCH]What is this?<|assistant|>A cat</s><|assistant|>", "<s><|user|>coffee<|assistant|>"]
    assert made.apply_chat_template(chats, add_generation_prompt=True) == texts
    written = made([WIDE], texts, add_special_tokens=False, **told)
    assert sorted(batch) == sorted(written)
    for key in sorted(batch.keys() - {"positions"}):
        assert torch.equal(batch[key], written[key]), key
    assert batch["input_ids"][0, :4].tolist() == [BOS, USER, BEGIN, PATCH]


def test_images_of_chats_come_in_every_form(tmp_path: Path) -> None:
    made = processor()
    path = tmp_path / "a photo.jpg"
    path.write_bytes(WIDE)
    encoded = base64.b64encode(WIDE).decode()
    url = f"data:image/jpeg;base64,{encoded}"
    blocks: list[dict[str, Any]] = [
        seen(WIDE),
        seen("data:image/jpeg," + quote_from_bytes(WIDE)),
        seen(url),
        {"type": "image", "path": str(path)},
        {"type": "image", "url": url},
        {"type": "image", "base64": encoded},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    patches = [made(text=chat(block))["patches"] for block in blocks]
    beside = made([WIDE], chat({"type": "image"}))
    assert all((each == beside["patches"]).all() for each in patches)


def test_images_beside_chats_fill_their_blocks_in_order() -> None:
    made = processor()
    photo_of = {"type": "image"}
    chats = [chat(photo_of, said("A"), photo_of), chat(said("cat")), chat(photo_of)]
    held = [chat(seen(WIDE), said("A"), seen(TALL)), chat(said("cat")), chat(seen(TALL))]
    beside = made([[WIDE, TALL], [], [TALL]], chats)
    expected = made(text=held)
    assert beside["input_ids"] == expected["input_ids"]
    np.testing.assert_array_equal(beside["patches"], expected["patches"])
    pixels = np.zeros((16, 16, 3), np.uint8)
    alone = made(text=chat(seen(pixels)))["patches"]
    np.testing.assert_array_equal(made(pixels, chats[2])["patches"], alone)
    # Rows of a table have every key in every block, of which most are None.
    rows = chat({**said("A"), "image": None}, {"type": "image", "image": None, "url": None, "text": None})
    np.testing.assert_array_equal(made(pixels, rows)["patches"], alone)
    for images, text, message in (
        ([[WIDE], [], [TALL]], chats, r"^images\[0\]: got 1 image, want 2, the placeholders of text\[0\]$"),
        ([WIDE, TALL, TALL], chats, r"^images: got list, want a list of images for each of 3 chats$"),
        (WIDE, held[0], r"^images: got images beside chats that hold theirs, want them in one place$"),
        (None, chats[2], r"^images: got 0 images, want 1, the placeholders of text$"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            made(images, text)


@pytest.mark.parametrize("key", ["images", "processor_kwargs"])
def test_images_beside_a_template_do_not_replace_those_of_its_chat(key: str) -> None:
    made = processor()
    beside: Any = [TALL] if key == "images" else {"images": [TALL]}
    told: dict[str, Any] = {"tokenize": True, "return_dict": True, key: beside}
    assert made.apply_chat_template(chat({"type": "image"}), **told)["image_grid_thw"].tolist() == [[1, 10, 4]]
    with pytest.raises(InvalidInputError, match=r"^images: got images beside chats that hold theirs"):
        made.apply_chat_template(chat(seen(WIDE)), **told)


def test_a_message_can_be_gone_on_with() -> None:
    made = processor(chat_template=TEMPLATE.replace("{{ eos_token }}", ""))
    messages = chat(seen(TALL), said("What is <s> this?"), answer="A cat")
    told: dict[str, Any] = {"tokenize": True, "return_dict": True, "continue_final_message": True}
    ids = made.apply_chat_template(messages, **told)["input_ids"][0]
    assert made.tokenizer.decode(ids[ids.index(ASSISTANT) :]) == "<|assistant|>A cat"


def test_templates_see_all_that_messages_say_and_write_all_special_tokens() -> None:
    template = (
        "{% for m in messages %}{{ m.name }}: {% for c in m.content %}[PATCH] {{ c.detail }}{% endfor %}{% endfor %}"
    )
    made = processor(chat_template=template)
    block = {"type": "image", "path": mmpos.__path__[0] + "/photos/coffee.jpg", "detail": "high"}
    messages = [{"role": "user", "name": "Ann", "content": [block]}]
    assert made.apply_chat_template(messages) == "Ann: [PATCH] high"
    ids = made(text=messages)["input_ids"][0]
    assert BOS not in ids
    assert made.tokenizer.decode(ids).startswith("Ann: [IMG][PATCH]")
    assert "path" in block  # the caller's own stay as they are


def test_what_users_say_stays_text() -> None:
    made = processor()
    spelled = "is </s> [PATCH] or [IMG]?"
    batch = made(text=chat(seen(WIDE), said(spelled)))
    ids = batch["input_ids"][0]
    assert ids.count(PATCH) == 12
    assert ids.count(BEGIN) == ids.count(END) == 1
    assert EOS not in ids
    assert made.tokenizer.decode(ids[ids.index(END) + 1 :]) == spelled
    # Not so where it was asked for, nor in text, which is the caller's to write.
    told: dict[str, Any] = {"tokenize": True, "return_dict": True, "sanitize_control_tokens": False}
    with pytest.raises(InvalidInputError, match=r"^images\[0\]: got 1 image, want 2, the placeholders of text\[0\]$"):
        made.apply_chat_template(chat(seen(WIDE), said(spelled)), **told)


def test_the_mask_of_the_assistant_covers_the_answer() -> None:
    made = processor()
    told: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    chats = [chat(seen(WIDE), said("What is this?"), answer="A cat"), chat(said("coffee"), answer="this")]
    sided = {"padding": True, "padding_side": "left"}
    batch = made.apply_chat_template(chats, processor_kwargs=sided, return_tensors="pt", **told)
    grouped = made.apply_chat_template(
        chats, processor_kwargs={"text_kwargs": {**sided, "return_tensors": "pt"}}, **told
    )
    assert torch.equal(grouped["assistant_masks"], batch["assistant_masks"])
    masked = [ids[mask == 1] for ids, mask in zip(batch["input_ids"], batch["assistant_masks"], strict=True)]
    assert [made.tokenizer.decode(ids) for ids in masked] == ["A cat</s>", "this</s>"]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    made = processor(
        scheme=RopeTieV2(rounding="floor"),
        markers=Markers(patch=PATCH, row="[ROW]"),
        add_markers=False,
        start=3,
        temporal_patch_size=1,
        read_files=False,
    )
    made.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings["scheme"] == {"name": "rope-tie-v2", "axes": 2, "rounding": "floor"}
    loaded = pickle.loads(pickle.dumps(MMPosProcessor.from_pretrained(tmp_path)))
    names = (
        "images",
        "scheme",
        "markers",
        "add_markers",
        "start",
        "temporal_patch_size",
        "read_files",
        "chat_template",
    )
    assert [getattr(loaded, name) for name in names] == [getattr(made, name) for name in names]
    rows = chat(seen(TALL), said("this"))
    theirs, ours = loaded(text=rows, return_tensors="np"), made(text=rows, return_tensors="np")
    assert sorted(theirs) == sorted(ours)
    assert all((theirs[key] == ours[key]).all() for key in ours if key != "positions")
    assert MMPosProcessor.from_pretrained(tmp_path, scheme="mrope").scheme == mmpos.schemes.MRope()


def test_a_registered_processor_is_found_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = type("TinyConfig", (transformers.PreTrainedConfig,), {"model_type": "tiny-with-positions"})
    processor().save_pretrained(tmp_path)
    transformers.AutoProcessor.register(config, MMPosProcessor)
    mapping = importlib.import_module("transformers.models.auto.processing_auto").PROCESSOR_MAPPING
    try:
        found = transformers.AutoProcessor.from_pretrained(tmp_path)
    finally:
        del mapping._extra_content[config]
    assert type(found) is MMPosProcessor
    assert found.images == IMAGES


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme_is_written_and_read(name: str) -> None:
    for scheme in (SCHEMES[name](), MRopeQwen25(tokens_per_second=Fraction(3, 2)), RopeTie(axes=np.int64(3))):  # type: ignore[arg-type]
        assert scheme_of(json.loads(json.dumps(scheme_to_json(scheme)))) == scheme


def test_fractional_ids_survive_a_cast() -> None:
    made = processor(scheme="rope-tie-fractional", start=100_000)
    batch = made([TALL], "A [PATCH]", return_tensors="pt")
    ids = batch["mm_position_ids"].clone()
    assert ids.dtype == torch.float64
    assert (ids.to(torch.bfloat16) != ids).any()
    input_ids = batch.pop("input_ids")  # of which a caller may have made inputs_embeds
    cast = batch.to("meta", torch.bfloat16)
    assert cast["mm_position_ids"].device == cast["attention_mask"].device == torch.device("meta")
    cast = made([TALL], "A [PATCH]", return_tensors="pt").to("cpu", torch.bfloat16)
    assert torch.equal(cast["mm_position_ids"], ids)
    assert torch.equal(cast["input_ids"], input_ids)
    assert cast["positions"].fractional
    values = processor(scheme="rope-tie-v2", temporal_patch_size=2)(TALL, "[PATCH]", return_tensors="pt")
    assert values.to(torch.bfloat16)["pixel_values"].dtype == torch.bfloat16


@pytest.mark.parametrize("markers", [Markers(), Markers(row="[ROW]"), Markers(None, None, row="[ROW]", last_row=EOS)])
def test_positions_follow_from_the_tokens_again(markers: Markers) -> None:
    made = processor(start=5, markers=markers)
    batch = made([WIDE, TALL, WIDE], TEXTS, padding=True, padding_side="left", return_tensors="pt")
    again = made.positions(batch["input_ids"], batch["image_grid_thw"], batch["attention_mask"])
    np.testing.assert_array_equal(again.table, batch["positions"].table)
    np.testing.assert_array_equal(again.documents, batch["positions"].documents)


def test_a_processor_says_what_it_is() -> None:
    made = processor()
    assert (made.image_token, made.image_token_id, made.image_token_ids) == ("[PATCH]", PATCH, [PATCH])
    batch = made([WIDE], "[PATCH]", return_tensors="pt")
    assert set(made.model_input_names) <= set(batch)
    assert "pixel_values" in processor(temporal_patch_size=2).model_input_names
    assert repr(made).startswith("MMPosProcessor(")
    decode: Any = made.batch_decode
    assert decode(made(text=["A cat"])["input_ids"]) == ["<s>A cat"]
    assert chat_tokenizer().convert_tokens_to_ids(list(OURS)) == [BEGIN, END, PATCH, ROW]
    own = processor(chat_tokenizer(chat_template="{{ messages[0].content }}"), chat_template=None)
    assert own.apply_chat_template([{"role": "user", "content": "A cat"}]) == "A cat"


# Refusals.


@dataclass(frozen=True)
class Own(Flatten):
    name: ClassVar[str] = "own"


URL = "data:image/jpeg"
PAIR = ["A", "sixteen:"]
FLOOR, NO_RATE = ({"name": "rope-tie", "rounding": "floor"}, {"name": "mrope-qwen2.5", "tokens_per_second": "x"})
CALLS: list[tuple[str, object, object, dict[str, Any]]] = [
    ("images: got 1 image, want 0, the placeholders of text", [WIDE], ["A", "cat"], {}),
    ("images: got 0 images, want 1, the placeholders of text", None, "A [PATCH]", {}),
    ("images[0]: got 1 image, want 2, the placeholders of text[0]", [[WIDE]] * 2, ["[PATCH][PATCH]", "A"], {}),
    ("images: got 1 lists, want 2, one for each text", [[WIDE]], ["[PATCH]", "A"], {}),
    ("images[1]: got bytes, want all images in lists, or none", [[WIDE], WIDE], ["[PATCH]", "[PATCH]"], {}),
    ("images[1][0]: image: got ", [[], [b"no"]], ["A", "[PATCH]"], {}),
    ("images[0]: got the text 'no.jpg', want the path of a file that exists, bytes, a", ["no.jpg"], "[PATCH]", {}),
    ("images[0]: got the text 'x://a.jpg', a URL, which is never fetched, want", ["x://a.jpg"], "[PATCH]", {}),
    (f"images[0]: got the data URL '{URL};base64', want a comma", [f"{URL};base64"], "[PATCH]", {}),
    ("images: got images with and without pixels", [WIDE, ImageSize(9, 9)], "[PATCH] [PATCH]", {}),
    ("text: got None, want text, a chat or images", None, None, {}),
    ("text: got [], want a text", None, [], {}),
    ("text[1]: got int, want a text", None, ["A", 3], {}),
    ("text[1]: got no tokens, want at least one", None, ["A", ""], {"add_special_tokens": False}),
    ("pading: got an argument of this name, want return_tensors, padding", None, PAIR, {"pading": True}),
    ("padding: got it twice", None, PAIR, {"padding": True, "text_kwargs": {"padding": False}}),
    ("text_kwargs: got list, want options by their names", None, PAIR, {"text_kwargs": ["padding"]}),
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
    ("padding: got rows of 2 to 8 tokens, want padding=True for return", None, PAIR, {"return_tensors": "pt"}),
    ("max_length: got 0, want >= 1", None, PAIR, {"truncation": True, "max_length": 0}),
    ("add_special_tokens: got 1, want True or False", None, PAIR, {"add_special_tokens": 1}),
    ("add_generation_prompt: got True with text, want a chat", None, PAIR, {"add_generation_prompt": True}),
    ("return_offsets_mapping: got True, want False: san", None, chat(said("A")), {"return_offsets_mapping": True}),
    ("videos: got list, want None", None, "A", {"videos": [np.zeros((2, 3, 8, 8))]}),
    ("audio: got list, want None", None, "A", {"audio": [np.zeros(8)]}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "images", "text", "told"), CALLS, ids=range(len(CALLS)))
def test_calls_that_do_not_fit_are_refused(message: str, images: object, text: object, told: dict[str, Any]) -> None:
    assert_refused(message, lambda: processor()(images, text, **told), MmposError)


SETTINGS: dict[str, dict[str, Any]] = {
    "scheme: got the field 'rounding', want axes": {"scheme": FLOOR},
    "scheme.tokens_per_second: got 'x'": {"scheme": NO_RATE},
    "scheme: got None, want a Scheme or one of": {"scheme": {}},
    "images: got the field 'patch', want backend, patch_size": {"images": {"patch": 14}},
    "images: got int, want ImageProcessor or its fields": {"images": 14},
    "markers.patch: got '[NO]', want a token that is one id": {"markers": {"patch": "[NO]"}},
    "add_markers: got 'no', want True or False": {"add_markers": "no"},
    "temporal_patch_size: got 0, want >= 1": {"temporal_patch_size": 0},
    "scheme: got Own, want one of mmpos.SCHEMES to write it to a file": {"scheme": Own()},
}


@pytest.mark.parametrize("message", SETTINGS)
def test_settings_that_do_not_fit_are_refused(message: str) -> None:
    assert_refused(message, lambda: processor(**SETTINGS[message]).to_dict(), MmposError)


CONTENT = [{"role": "user", "content": {"type": "image", "image": WIDE}}]
BLOCK = "conversation[1][0].content[0]"
CHATS: dict[str, Any] = {
    "conversation: got str, want a list of messages, or a list of those": "A cat",
    "conversation: got none, want a list of messages": [],
    "conversation[1]: got none, want a list of messages": [chat(said("A")), []],
    "conversation[1]: got str, want a list of messages": [chat(said("A")), "A"],
    "conversation[1]: got str, want a message with role and content": [*chat(said("A")), "A"],
    "conversation[0].content: got dict, want text, a list of blocks, or None": CONTENT,
    **{
        f"{BLOCK}{message}": [chat(said("A")), chat(content)]
        for message, content in (
            (".type: got 'video', want text or an image", {"type": "video", "path": "a.mp4"}),
            (".type: got 'audio'", {"type": "audio", "path": "a.mp3"}),
            (".type: got 'video_url'", {"type": "video_url", "video_url": {}}),
            (".type: got 'input_audio'", {"type": "input_audio", "input_audio": {}}),
            (": got the text 'https://a/b.jpg'", {"type": "image", "url": "https://a/b.jpg"}),
            (": got url and path, want one of", {"type": "image", "path": "a", "url": "b"}),
            (".image_url: got none, want the URL of the image", {"type": "image_url", "image_url": {}}),
            (": got dict, want a block with a type", {"text": "A"}),
            (".path: got int, want text or a path", {"type": "image", "path": 5}),
            (".image: got one in a block of type 'text', want type 'image'", {**said("A"), "image": b""}),
            (".image_url: got one in a block of type 'input_image'", {"type": "input_image", "image_url": "data:,"}),
        )
    },
}


@pytest.mark.parametrize("message", CHATS)
def test_what_is_no_chat_and_blocks_without_a_place_are_refused(message: str) -> None:
    assert_refused(message, lambda: processor().apply_chat_template(CHATS[message], tokenize=True), MmposError)
