"""Settings of diffusers transformers: every class is supported or refused and rotates as its class; packed latents."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import random
import re
import warnings
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers_peers import PEERS, ROTATIONS, Document, Peer, transformer_of
from refusals import assert_refused
from tolerance import EXACT, FREQUENCY, cos_sin, unit

import mmpos
from mmpos import Grid, InvalidInputError, LimitExceededError, MmposError, Text, UnsupportedError
from mmpos.integrations.diffusers import TransformerSettings, from_diffusers, pack_latents, unpack_latents
from mmpos.integrations.diffusers.classes import REFUSED, TRANSFORMERS
from mmpos.rotary import Rotary
from mmpos.rotary import cos_sin as cos_sin_of
from mmpos.schemes import CogVideoX, get_scheme

pytestmark = pytest.mark.usefixtures("one_thread")

INTERPOLATED = 8
"""The number of float32 roundings in the ids of a class, relative to the largest id on the axis."""


def documents(peer: Peer, name: str, count: int) -> list[Document]:
    draw = random.Random(0)
    result: list[Document] = []
    for _ in range(count):
        images = 2 if peer.images < 0 else draw.randint(1, peer.images)
        # ChronoEdit places the second of exactly two frames elsewhere.
        frames = [(draw.randint(1, 4) if result else 2) if peer.frames else 1 for _ in range(images)]
        sizes = [(f, draw.randint(1, 30), draw.randint(1, 30)) for f in frames]
        if name == "MiniMaxH3Transformer3DModel":
            side = draw.randint(1, 6)
            sizes = [(draw.randint(1, 12), 4 * side, 9 * side)]
        text = peer.even * draw.randint(1, 30 // peer.even + 1) if peer.text else 0
        result.append(Document(text, tuple(sizes)))
    return result


def allowed(rotary: Rotary, positions: mmpos.PositionTable, peer: Peer) -> Any:
    """Return the (tokens, …, pairs) error bound of the class's cos and sin, for the dtype of its angles."""
    ids = positions.dense(dtype="float64")
    # The error of a difference, such as 2x − 1, or of an interpolation is relative to its operands.
    reach = np.abs(rotary.pair_ids(ids)) + rotary.pair_ids(
        np.repeat(np.abs(ids).max(1, keepdims=True), ids.shape[1], 1)
    )
    angles = (reach + 2) * rotary.inv_freq_array[..., None]
    roundings = FREQUENCY + INTERPOLATED
    bound = EXACT + 2 * unit(torch.float32) + cos_sin(np.moveaxis(angles, -1, 0), roundings, getattr(torch, peer.dtype))
    return np.minimum(bound, 2)


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(PEERS))
def test_rotations_equal_those_of_the_class(name: str, count: int) -> None:
    peer = PEERS[name]
    transformer = transformer_of(name)
    settings = from_diffusers(transformer, peer.pipeline)
    assert settings == from_diffusers(of_class(name, **peer.config), peer.pipeline)
    assert settings.rotary.pairing == peer.pairing
    rotaries = [one for one in (settings.rotary, settings.second_rotary) if one is not None]
    for document in documents(peer, name, count):
        parts = document.parts(settings, text=peer.text)
        positions = settings.place([parts[::-1] if name == "ErnieImageTransformer2DModel" else parts])
        cos, sin = (torch.cat(both, -1) for both in zip(*(cos_sin_of(one, positions) for one in rotaries), strict=True))
        want = ROTATIONS[peer.rotation](transformer, document)
        # Heads with different rotations are separate: each head of Allegro is a third of a head of the class.
        cos, sin = (x.reshape(len(want[0]), -1, want[0].shape[1]) for x in (cos, sin))
        bound = torch.from_numpy(np.concatenate([allowed(one, positions, peer) for one in rotaries], -1))
        bound = bound.reshape(len(want[0]), -1, want[0].shape[1])
        for got, right in ((cos, want[0]), (sin, want[1])):
            assert ((got.double() - right.double()[:, None]).abs() <= bound).all()


@pytest.mark.parametrize("name", sorted(PEERS))
def test_missing_fields_have_the_defaults_of_the_class(name: str) -> None:
    import diffusers

    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    if name == "HiDreamImageTransformer2DModel":  # its default has two axes, but its ids and the checkpoint have three
        del defaults["axes_dims_rope"]
    changes = {"_class_name": name, "use_rotary_positional_embeddings": True, "rope_type": "interleaved"}
    least, full = (from_diffusers(config, PEERS[name].pipeline) for config in (changes, {**defaults, **changes}))
    assert least == full


def test_every_diffusers_transformer_is_supported_or_refused() -> None:
    classes = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from diffusers import ModelMixin
        from diffusers.models import transformers

        for module in pkgutil.iter_modules(transformers.__path__):
            names = vars(importlib.import_module(f"{transformers.__name__}.{module.name}"))
            classes |= {
                name
                for name, kind in names.items()
                if isinstance(kind, type) and issubclass(kind, ModelMixin) and kind.__module__ == names["__name__"]
            }
    assert classes == {*TRANSFORMERS, *REFUSED}
    assert not {*TRANSFORMERS} & {*REFUSED}
    assert set(PEERS) == set(TRANSFORMERS)


def test_settings_are_read_from_a_folder_a_file_a_mapping_or_a_transformer(tmp_path: Path) -> None:
    config = {"_class_name": "FluxTransformer2DModel", "axes_dims_rope": [16, 56, 56], "attention_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    want = TransformerSettings(
        "FluxTransformer2DModel",
        get_scheme("flux"),
        Rotary(128, axes_dim=[16, 56, 56], allocation="axial", pairing="adjacent"),
        (1, 2, 2),
    )
    assert mmpos.from_diffusers is from_diffusers
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", config, {"_class_name": config["_class_name"]}):
        assert from_diffusers(source) == want
    assert from_diffusers(transformer_of("FluxTransformer2DModel")).rotary.head_dim == 32
    assert from_diffusers(of_class("EasyAnimateTransformer3DModel", patch_size=1)).scheme == CogVideoX(60, 90)


@pytest.mark.parametrize(
    ("transformer", "pipeline", "second_frame"),
    [
        ("LTXVideo", "LTXPipeline", Fraction(8, 250) - 1),
        ("LTXVideo", "LTXImageToVideoPipeline", Fraction(8, 250) - 1),
        ("LTXVideo", "LTXConditionPipeline", Fraction(1, 250) - 1),
        ("LTXVideo", "LTXI2VLongMultiPromptPipeline", Fraction(1, 250) - 1),
        ("Cosmos", "CosmosTextToWorldPipeline", Fraction(24, 25)),
        ("Cosmos", "Cosmos2_5_PredictBasePipeline", 1),
    ],
)
def test_pipelines_of_one_transformer_have_their_own_ids(
    transformer: str, pipeline: str, second_frame: int | Fraction
) -> None:
    config = {"_class_name": f"{transformer}Transformer3DModel"}
    settings = from_diffusers(config, pipeline)
    assert settings == from_diffusers(config, type(pipeline, (), {})())
    numerators, over = settings.place([[Grid(1, 1, frames=2, seconds_per_frame=Fraction(1, 25))]]).rationals()
    assert Fraction(int(numerators[0, 1]), int(over[1])) == second_frame
    fill = {"_class_name": "FluxTransformer2DModel", "in_channels": 384}
    assert from_diffusers(fill, "FluxFillPipeline").place([[Grid(1, 1)]]).dense()[0, 0] == 0
    assert from_diffusers(fill, "VisualClozeGenerationPipeline").place([[Grid(1, 1)]]).dense()[0, 0] == 1


def test_a_pipeline_is_required_if_and_only_if_the_ids_depend_on_it() -> None:
    import diffusers

    root = Path(diffusers.__file__).parent
    modules = [path.read_text("utf-8") for path in (root / "pipelines").rglob("pipeline_*.py")]
    for name, kind in (
        ("LTXVideoTransformer3DModel", "LTX"),
        ("CosmosTransformer3DModel", "Cosmos"),
        ("Kandinsky5Transformer3DModel", "Kandinsky5"),
    ):
        taking = (text for text in modules if f"transformer: {name}" in text)
        of_diffusers = {one for text in taking for one in re.findall(r"^class (\w+Pipeline)\(", text, re.M)}
        with pytest.raises(InvalidInputError, match=r"^pipeline: got None, want one of ") as error:
            from_diffusers({"_class_name": name})
        listed = {one for one in re.findall(r"\w+Pipeline", str(error.value)) if "Modular" not in one}
        assert {one for one in of_diffusers if one.startswith(kind)} == listed
    for config, pipeline, error_class, message in (
        ("WanTransformer3DModel", "WanPipeline", InvalidInputError, "got 'WanPipeline', want None, since the con"),
        ("FluxTransformer2DModel", "FluxPipeline", InvalidInputError, "got 'FluxPipeline', want None, since the"),
        ("LTXVideoTransformer3DModel", "LTX2Pipeline", InvalidInputError, "got 'LTX2Pipeline', want one of LTXC"),
        ("Kandinsky5Transformer3DModel", "Kandinsky5T2VPipeline", UnsupportedError, "got 'Kandinsky5T2VPipeline'"),
    ):
        with pytest.raises(error_class, match=f"^pipeline: {message}"):
            from_diffusers({"_class_name": config}, pipeline)


def of_class(name: str, **fields: object) -> dict[str, object]:
    return {"_class_name": name, **fields}


COG, PATH = "CogVideoXTransformer3DModel", "black-forest-labs/FLUX.1-dev"
REFUSED_CONFIGS: dict[str, object] = {
    "config._class_name: got None, want the class name of a transformer": {"model_type": "qwen3_vl"},
    f"config: got the path {PATH!r}, which does not exist, want that of a config.json": PATH,
    "config: got int, want the path of a config.json or of its folder, a mapping or a diffusers transformer": 3,
    "config.axes_dims_rope: got [16, 56], want 3 integers": of_class("FluxTransformer2DModel", axes_dims_rope=[16, 56]),
    "config.rope_theta: got 0, want a finite number >= 1": of_class("Flux2Transformer2DModel", rope_theta=0),
    "config.interpolation_scale_t: got 0, want a finite number > 0":
        of_class("AllegroTransformer3DModel", interpolation_scale_t=0),
    "config.patch_size: got [2], want rows and columns, or frames before them":
        of_class("WanTransformer3DModel", patch_size=[2]),
    "config._class_name: got 'MochiTransformer3DModel', which is not supported: ": of_class("MochiTransformer3DModel"),
    "config._class_name: got 'UNet2DModel', want one of AllegroTransformer3DModel,": of_class("UNet2DModel"),
    "config.siglip_feat_dim: got one, want None:": of_class("ZImageTransformer2DModel", siglip_feat_dim=8),
    "config.use_rotary_positional_embeddings: got False, want True": of_class(COG),
    "config.refer_stride: got 2, want 1": of_class("WanAnimate2Transformer3DModel", refer_stride=2),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED_CONFIGS)
def test_an_invalid_or_unsupported_config_is_refused(message: str) -> None:
    assert_refused(message, lambda: from_diffusers(REFUSED_CONFIGS[message]), MmposError)


def test_sizes_must_be_multiples_of_a_patch_and_ids_must_fit_the_models_tables() -> None:
    flux, qwen, wan, qwen_21 = (
        from_diffusers({"_class_name": f"{name}Model"})
        for name in ("FluxTransformer2D", "QwenImageTransformer2D", "WanTransformer3D", "QwenImage21Transformer2D")
    )
    cog = from_diffusers(of_class(COG, use_rotary_positional_embeddings=True, patch_size_t=2))
    lumina = from_diffusers(of_class("Lumina2Transformer2DModel"))
    assert flux.grid(128, 96) == Grid(64, 48)
    packed = from_diffusers(of_class("BriaFibo2Transformer2DModel"))  # its pipeline packs 2 × 2 latents first
    assert packed.grid(128, 96) == Grid(32, 24)
    assert wan.grid(60, 104, frames=21) == Grid(30, 52, frames=21)
    for fps in (25, 25.0, Fraction(25)):
        assert wan.grid(2, 2, frames=2, fps=fps) == Grid(1, 1, frames=2, seconds_per_frame=Fraction(1, 25))
    for call, kind, message in (
        (lambda: flux.grid(127, 96), InvalidInputError, "height: got 127, want a multiple of 2, the patch of FluxTr"),
        (lambda: wan.grid(2, 2, fps=0), InvalidInputError, "fps: got 0, want an integer or Fraction > 0"),
        (lambda: wan.grid(2, 2, fps=29.97), InvalidInputError, "fps: got 29.97, want an integer or Fraction > 0"),
        (lambda: wan.grid(3, 2, frames=5), InvalidInputError, "height: got 3, want a multiple of 2, the patch of WanT"),
        (lambda: flux.grid(128, 96, frames=0), InvalidInputError, "frames: got 0, want >= 1"),
        (lambda: flux.place([[Text(5), Grid(4, 4, frames=2)]]), UnsupportedError, "documents[0][1]: got a grid wit"),
        (lambda: wan.place([[Text(5), Grid(4, 4)]]), UnsupportedError, "documents[0][0]: got text, want grids only"),
    ):
        assert_refused(message, call, kind)
    for settings, documents, message in (
        (qwen, [[Text(5), Grid(8, 8)], [Text(4093), Grid(8, 8)]], "[1]: got ids from 4 to 4096 on axis 0, want -4096 "),
        # The size of a reference shifts the text.
        (qwen, [[Text(5), Grid(8, 8), Grid(8194, 8)]], "[0]: got ids from 4097 to 4101 on axis 0, want -4096 to 4095"),
        (cog, [[Grid(31, 2, frames=2)]], "[0]: got ids from 0 to 30 on axis 1, want 0 to 29, the tables of CogVideoX"),
        (lumina, [[Text(5), Grid(513, 2)]], "[0]: got ids from 0 to 512 on axis 1, want 0 to 511, the tables of Lumi"),
        (qwen, [[Text(5)] + [Grid(1, 1)] * 4097], "[0]: got ids from 4096 to 4096 on axis 0, want -4096 to 4095, the "),
        (qwen_21, [[Text(8190), Grid(2, 2), Grid(2, 2)]], "[0]: got ids from 8192 to 8192 on axis 0, want -1024 to 81"),
        (wan, [[Grid(2, 1025)]], "[0]: got ids from 0 to 1024 on axis 2, want 0 to 1023, the tables of WanTransforme"),
    ):
        assert_refused(f"documents{message}", partial(settings.place, documents), LimitExceededError)


def test_latents_of_mixed_sizes_are_packed_and_unpacked() -> None:
    latents = [torch.arange(2 * 4 * 6.0).reshape(2, 4, 6), 100 + torch.arange(2 * 2 * 2.0).reshape(2, 2, 2)]
    packed = pack_latents(latents, 2)
    assert packed.shape == (1, 2, 2, 14)
    assert packed[0, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 100, 101],
        [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23, 102, 103],
    ]
    rows = pack_latents(latents, 2, batch=True)
    assert rows.shape == (2, 2, 2, 12)
    assert not rows[1, :, :, 2:].any()
    videos = [torch.randn(3, 4, 2, 6), torch.randn(3, 2, 4, 3)]
    for inputs, size in ((latents, 2), (videos, (2, 2, 3))):
        for batch in (False, True):
            back = unpack_latents(pack_latents(inputs, size, batch=batch), [x.shape[1:] for x in inputs], size)
            assert all(torch.equal(one, other) for one, other in zip(back, inputs, strict=True))
    for call, message in (
        (lambda: pack_latents([], 2), "latents: got none, want at least one"),
        (lambda: pack_latents([latents[0], videos[0]], 2), "latents[1]: got shape (3, 4, 2, 6), want (channels"),
        (lambda: pack_latents(latents, 4), "latents[0]: got size (4, 6), want multiples of the patch (4, 4)"),
        (
            lambda: unpack_latents(packed, [(4, 6)], 2),
            "sizes: got 1 size with 12 columns, want the sizes of the strips",
        ),
        (lambda: unpack_latents(packed, [(4, 6, 2)], 2), "sizes[0]: got (4, 6, 2), want 2 numbers"),
        (lambda: unpack_latents(rows, [(4, 4), (2, 2)], 2), "sizes: got 2 sizes with 8 and 2 columns, want the sizes"),
        (lambda: unpack_latents(rows, [(4, 6), (8, 6)], 2), "sizes: got 2 sizes with 12 and 24 columns, want the si"),
        (lambda: unpack_latents(packed, [(4, 3)] * 2, 1), "packed: got shape (1, 2, 2, 14), want (rows, channels, "),
        (lambda: unpack_latents(packed[0], [(4, 6)], 2), "packed: got shape (2, 2, 14), want (rows, channels, patch"),
        (lambda: unpack_latents(packed, [(-4, 7), (2, 2)], 2), "sizes[0]: got size (-4, 7), want multiples of"),
        (lambda: pack_latents(latents, 0), "patch_size: got 0, want >= 1"),
        (lambda: pack_latents(videos, (2, 2)), "patch_size: got (2, 2), want one side, or frames, height and width"),
    ):
        assert_refused(message, call)
