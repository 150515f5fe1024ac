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

import numpy as np
import pytest
import torch
import transformers
from chat_tokenizer import QWENS, TEMPLATE, chat_tokenizer
from data_corpus import photo
from layouts import weightless
from qwen_processors import config_of, processor_of
from refusals import assert_refused

import mmpos
from mmpos import SCHEMES, ImageProcessor, ImageSize, InvalidInputError, Markers, MmposError, UnsupportedError
from mmpos.data import Location, ModelCollator, ProcessedInputs
from mmpos.integrations.hf import MMPosProcessor
from mmpos.integrations.hf import processor as mmpos_processor
from mmpos.schemes import Flatten, MRopeQwen25, RopeTie, RopeTieV2

BOS, EOS, PAD, USER, ASSISTANT, BEGIN, END, PATCH, ROW = range(9)
IMAGES = ImageProcessor("pillow", patch_size=4, spatial_merge_size=2, min_pixels=0, max_tokens=12)
WIDE, TALL = photo(1), photo(0)  # 24x32 and 16x40 pixels: 4x3 and 5x2 tokens, checked by the first test
TEXTS = ["What is [PATCH] this?", "A cat", "[PATCH] a cup of coffee [PATCH]"]
CHAT = {"tokenize": True, "return_dict": True}


def make_processor(tokenizer: Any = None, **options: Any) -> Any:
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


def test_rows_are_padded_to_max_length_or_returned_whole() -> None:
    plain = make_processor()([WIDE], TEXTS[:2])  # without tensors, rows are lists
    rows = [build(make_processor(), text, images) for text, images in zip(TEXTS[:2], [[WIDE], []], strict=True)]
    assert plain["input_ids"] == [row.input_ids.tolist() for row in rows]
    assert plain["attention_mask"] == [[1] * row.input_ids.size for row in rows]
    assert plain["mm_token_type_ids"] == [row.token_type_ids.tolist() for row in rows]
    assert [ids.tolist() for ids in plain["mm_position_ids"]] == [row.positions.dense().tolist() for row in rows]
    processor = make_processor(chat_tokenizer(pad_token=None, padding_side="left"))
    (row,) = processor(text=["this"])["input_ids"]
    assert processor(text=["this", "this"], return_tensors="pt")["input_ids"].tolist() == [row, row]
    message = "tokenizer.pad_token: got None, want a padding token"
    assert_refused(message, lambda: processor(text=["A cat", "this"], padding=True, return_tensors="pt"))
    wide = make_processor(chat_tokenizer(padding_side="left"))
    batch = wide(text="this", padding="max_length", max_length=9, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[PAD] * (9 - len(row)) + row]
    assert (batch["positions"].num_tokens, batch["mm_position_ids"].shape) == (9, (2, 1, 9))
    with pytest.raises(InvalidInputError, match=r"^text\[1\]: got \d tokens, want <= max_length = 1$"):
        wide(text=["A", "this cup"], padding="max_length", max_length=1, return_tensors="pt")


def test_pixel_values_are_those_of_the_image_processor() -> None:
    patches = make_processor()([WIDE, TALL], "[PATCH][PATCH]", return_tensors="pt")["patches"]
    assert patches.dtype == torch.uint8
    batch = make_processor(temporal_patch_size=2)([WIDE, TALL], "[PATCH][PATCH]", return_tensors="pt")
    assert torch.equal(batch["pixel_values"], IMAGES.pixel_values(patches))
    assert "patches" not in batch


def chat(*content: Any, answer: str | None = None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": list(content)}]
    return messages + [{"role": "assistant", "content": [block(answer, "text")]}] * (answer is not None)


def block(value: object, kind: str = "image") -> dict[str, Any]:
    return {"type": kind, kind: value}


def test_chats_equal_the_text_that_their_template_renders() -> None:
    processor = make_processor()
    coffee = [{"role": "user", "content": "coffee"}]
    chats = [chat(block(WIDE), block("What is this?", "text"), answer="A cat"), coffee]
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    batch = processor.apply_chat_template(chats, add_generation_prompt=True, processor_kwargs=dict(options), **CHAT)
    texts = ["<s><|user|>[PATCH]What is this?<|assistant|>A cat</s><|assistant|>", "<s><|user|>coffee<|assistant|>"]
    assert processor.apply_chat_template(chats, add_generation_prompt=True) == texts
    want = processor([WIDE], texts, add_special_tokens=False, **options)
    assert sorted(batch) == sorted(want)
    for key in sorted(batch.keys() - {"positions"}):
        assert torch.equal(batch[key], want[key]), key
    assert batch["input_ids"][0, :4].tolist() == [BOS, USER, BEGIN, PATCH]
    own = make_processor(chat_tokenizer(chat_template="{{ messages[0].content }}"), chat_template=None)
    assert own.apply_chat_template([{"role": "user", "content": "A cat"}]) == "A cat"


def test_images_in_chats_may_be_bytes_data_urls_and_paths_if_read_files_allows_it(tmp_path: Path) -> None:
    path = tmp_path / "a photo.jpg"
    path.write_bytes(WIDE)
    url = f"data:image/jpeg;base64,{base64.b64encode(WIDE).decode()}"
    inline = [block(WIDE), block(url), {"type": "image_url", "image_url": {"url": url}}]
    files = [block(str(path)), {"type": "image", "path": str(path)}, {"type": "image", "url": path.as_uri()}]
    processor, closed = make_processor(), make_processor(read_files=False)
    want = processor([path], "[PATCH]")["patches"]
    np.testing.assert_array_equal(closed([path], "[PATCH]")["patches"], want)
    for each in [*inline, *files]:
        np.testing.assert_array_equal(processor.apply_chat_template(chat(each), **CHAT)["patches"], want)
    for each in inline:
        np.testing.assert_array_equal(closed.apply_chat_template(chat(each), **CHAT)["patches"], want)
    for each in files:
        with pytest.raises(InvalidInputError, match=r"^images\[0\]\[0\]: got the text .*; read_files=False forbids pa"):
            closed.apply_chat_template(chat(each), **CHAT)


def test_special_tokens_spelled_out_by_users_remain_text_if_sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, words = make_processor(), "is </s> [PATCH] or [IMG]?"
    messages = chat(block(WIDE), block(words, "text"))
    with monkeypatch.context() as patch:
        patch.setattr(mmpos_processor, "_SANITIZES", False)
        with pytest.raises(UnsupportedError, match=r"^sanitize_control_tokens: got True, which Transf.* ignores"):
            processor.apply_chat_template(messages, sanitize_control_tokens=True, **CHAT)
    if not mmpos_processor._SANITIZES:
        return
    ids = processor.apply_chat_template(messages, sanitize_control_tokens=True, **CHAT)["input_ids"][0]
    assert ids.count(PATCH) == 12
    assert ids.count(BEGIN) == ids.count(END) == 1
    assert EOS not in ids
    assert processor.tokenizer.decode(ids[ids.index(END) + 1 :]) == words
    with pytest.raises(InvalidInputError, match=r"^images\[0\]: got 1 image, want 2, the placeholders of text\[0\]$"):
        processor.apply_chat_template(messages, **CHAT)


def test_a_saved_processor_loads_with_the_same_settings(tmp_path: Path) -> None:
    options = {"scheme": RopeTieV2(rounding="floor"), "markers": Markers(patch=PATCH, row="[ROW]"), "start": 3}
    processor = make_processor(**options, temporal_patch_size=1, read_files=False)
    processor.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings["scheme"] == {"name": "rope-tie-v2", "axes": 2, "rounding": "floor"}
    loaded: Any = pickle.loads(pickle.dumps(MMPosProcessor.from_pretrained(tmp_path)))
    names = ["images", "scheme", "markers", "start", "temporal_patch_size", "read_files", "chat_template"]
    assert [getattr(loaded, name) for name in names] == [getattr(processor, name) for name in names]
    got, want = (each([TALL], "this [PATCH]", return_tensors="np") for each in (loaded, processor))
    assert sorted(got) == sorted(want)
    assert all((got[key] == want[key]).all() for key in want if key != "positions")
    assert MMPosProcessor.from_pretrained(tmp_path, scheme="mrope").scheme == mmpos.schemes.MRope()


def test_transformers_loads_a_registered_processor(tmp_path: Path) -> None:
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
        settings = make_processor(scheme=scheme).to_dict()
        assert make_processor(scheme=json.loads(json.dumps(settings))["scheme"]).scheme == scheme


def test_fractional_ids_survive_a_cast_also_of_a_pickled_batch() -> None:
    processor = make_processor(scheme="rope-tie-fractional", start=100_000)
    batch = pickle.loads(pickle.dumps(processor([TALL], "A [PATCH]", return_tensors="pt")))
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
    listed = processor([TALL], "A [PATCH]").to(torch.bfloat16)["mm_position_ids"]  # without tensors, rows are lists
    assert listed[0].tolist() == ids[:, 0].tolist()
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
    assert processor.batch_decode(processor(text=["A cat"])["input_ids"]) == ["<s>A cat"]


# A published model has its own processor.


def test_processed_inputs_read_the_output_of_a_models_own_processor() -> None:
    theirs, settings = processor_of("qwen2_vl"), mmpos.from_hf_config(config_of("qwen2_vl"))
    random = np.random.default_rng(0)
    texts = [f"A cat {QWENS[0]}{QWENS[2]}{QWENS[1]} looks", f"{QWENS[0]}{QWENS[3]}{QWENS[1]} cup"]
    picture, clip = (random.integers(0, 256, (*shape, 90, 130, 3), np.uint8) for shape in ((), (4,)))
    records = [theirs(picture, texts[0], return_tensors="pt"), theirs(text=texts[1], videos=clip, return_tensors="pt")]
    examples = [ProcessedInputs(settings)(record, Location("train", i)) for i, record in enumerate(records)]
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    method = weightless("qwen2_vl", config_of("qwen2_vl")).get_rope_index
    want = [method(**{name: record.get(name) for name in names})[0] for record in records]
    pack = ModelCollator(settings)(examples)
    assert torch.equal(pack["position_ids"][1:], torch.cat(want, dim=2))
    assert torch.equal(pack["pixel_values"], records[0]["pixel_values"])
    assert torch.equal(pack["pixel_values_videos"], records[1]["pixel_values_videos"])


# Errors.


@dataclass(frozen=True)
class Unregistered(Flatten):
    name: ClassVar[str] = "unregistered"


URL = "data:image/jpeg"
PAIR = ["A", "sixteen:"]
FLOOR, NO_RATE = ({"name": "rope-tie", "rounding": "floor"}, {"name": "mrope-qwen2.5", "tokens_per_second": "x"})
PADDED = {"return_tensors": "np", "padding": True}
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
    ("text: got None, want text or a list of texts", WIDE, None, {}),
    ("text: got [], want text or a list of texts", None, [], {}),
    ("text: got ['A', 3], want text or a list of texts", None, ["A", 3], {}),
    ("text: got [{'role': 'user'}], want text or a list of texts; apply_chat_template converts c", None,
     [{"role": "user"}], {}),
    ("text[1]: got no tokens, want at least one", None, ["A", ""], {"add_special_tokens": False}),
    ("return_tensors: got 'tf', want one of None, 'pt', 'np'", None, PAIR, {"return_tensors": "tf"}),
    ("padding: got None, want one of True, False", None, PAIR, {**PADDED, "padding": None}),
    ("padding: got True without return_tensors, want False", None, PAIR, {"padding": True}),
    ("padding: got False for rows of different lengths, want True", None, PAIR, {"return_tensors": "pt"}),
    ("padding_side: got 'top', want one of", None, PAIR, {**PADDED, "padding_side": "top"}),
    ("max_length: got 9 with padding=True, want both or neither", None, PAIR, {**PADDED, "max_length": 9}),
    ("max_length: got None with padding='max_length', want both", None, PAIR, {**PADDED, "padding": "max_length"}),
    ("videos: got list, want None; only images are supported", None, "A", {"videos": [np.zeros((2, 3, 8, 8))]}),
    ("audio: got list, want None", None, "A", {"audio": [np.zeros(8)]}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "images", "text", "options"), CALLS, ids=range(len(CALLS)))
def test_invalid_arguments_in_a_call_are_refused(
    message: str, images: object, text: object, options: dict[str, Any]
) -> None:
    assert_refused(message, lambda: make_processor()(images, text, **options), MmposError)


def test_options_that_a_call_does_not_have_are_refused_by_name() -> None:
    for name in ("truncation", "return_offsets_mapping", "max_pixels"):
        with pytest.raises(TypeError, match=f"'{name}'"):
            make_processor()(text="A", **{name: True})
    with pytest.raises(TypeError, match="'return_offsets_mapping'"):
        make_processor().apply_chat_template(chat(block("A", "text")), return_assistant_tokens_mask=True, **CHAT)


SETTINGS: dict[str, dict[str, Any]] = {
    "scheme: got the field 'rounding', want axes": {"scheme": FLOOR},
    "scheme.tokens_per_second: got 'x'": {"scheme": NO_RATE},
    "scheme: got None, want a Scheme or one of": {"scheme": {}},
    "images: got the field 'patch', want backend, patch_size": {"images": {"patch": 14}},
    "images: got int, want ImageProcessor or its fields": {"images": 14},
    "markers.patch: got '[NO]', want a token with a single id": {"markers": {"patch": "[NO]"}},
    "read_files: got 'no', want True or False": {"read_files": "no"},
    "temporal_patch_size: got 0, want >= 1": {"temporal_patch_size": 0},
    "scheme: got Unregistered, want one of mmpos.SCHEMES to write it to a file": {"scheme": Unregistered()},
}


@pytest.mark.parametrize("message", SETTINGS)
def test_invalid_settings_are_refused(message: str) -> None:
    assert_refused(message, lambda: make_processor(**SETTINGS[message]).to_dict(), MmposError)
