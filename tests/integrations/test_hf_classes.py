"""Configs of every class of the installed Transformers, read beside the class and the module that rotates by it."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hf_classes import TABLE, WITHOUT_MODULE, rotations, table, to_json
from model_configs import CONFIGS, LAYER_TYPES, config_of, settings_of
from tolerance import FREQUENCY, gamma
from torch import Tensor

import mmpos
from mmpos.errors import MmposError
from mmpos.integrations.models import MODEL_TYPES
from mmpos.rotary import Rotary, apply_rotary
from mmpos.rotary.hf_config import class_defaults
from mmpos.rotary.hf_models import OTHER_ROTATIONS, TEXT_AT_TOP

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hf_classes")]  # every model of Transformers is imported

ROTATING = sorted(
    model for model, row in class_defaults().items() if "rope_theta" in row and model not in OTHER_ROTATIONS
)
WHOLE = sorted(
    model
    for model, row in class_defaults().items()
    if {"text_config", "thinker_config"} & {*row.get("parts", {}), *row.get("auto_parts", {})}
    and model != "gemma4_assistant"  # whose class refuses its own defaults
)
NAMELESS = {"Qwen3OmniMoeCode2WavConfig", "SaProtConfig"}
"""Config classes without a model type."""

EPSILON = 2.0**-23
IDS = torch.tensor([[0, 1, 2, 3, 5, 8, 13], [4, 0, 9, 1, 7, 2, 30], [1, 6, 2, 11, 0, 21, 5]])
"""(3, tokens) ids on as many axes as any model has."""

COLUMNS_FIRST = ("muse_glimmer_vision", "muse_spark_vision", "sam3_vit_model")
"""Encoders whose modules are given columns before rows."""

WITHOUT_IDS = ("gemma4_vision", "llama4_vision_model")
"""Encoders whose modules are given no ids, or turn halves of heads: tests of encoders turn by them."""

LAYERS = ("full_attention", "sliding_attention")
RELEASED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": [*LAYERS] * 20,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e6} for kind in LAYERS},
    },
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "glm4v_text": {"head_dim": 128, "partial_rotary_factor": 0.5},
    "glm_image_text": {"head_dim": 128, "partial_rotary_factor": 0.5},
    "qwen3_omni_moe_talker_text": {"head_dim": 128},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "qwen4_exp_text": {"partial_rotary_factor": 0.25},
}
"""Fields of checkpoints where the defaults of the class make no rotation."""

STRAY: dict[str, Any] = {
    "embed_dim": 512,
    "global_head_dim": 128,
    "global_rope_theta": 888.0,
    "head_dim": 96,
    "heads": 8,
    "layer_rope_theta": [5000.0] * 100,
    "local_rope_theta": 999.0,
    "n_embed": 1024,
    "num_heads": 8,
    "original_max_position_embeddings": 1024,
    "partial_rotary_factor": 0.75,
    "partial_rotary_factors": [0.5] * 100,
    "qk_rope_head_dim": 32,
    "rope_local_base_freq": 777.0,
    "rope_theta": 54321.0,
    "rotary_dim": 32,
    "rotary_emb_base": 54321.0,
    "rotary_pct": 0.5,
    "swa_rope_theta": 333.0,
    "width": 512,
}
"""Fields that some class reads and others do not, with values that are no default."""

PART_FIELDS: list[dict[str, Any]] = [
    {"hidden_size": 1536, "num_attention_heads": 12},
    {"head_dim": 96},
    {"max_position_embeddings": 4096},
    {"partial_rotary_factor": 0.25},
    {"rope_local_base_freq": 5000.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_theta": 77777.0},
]
"""Fields that a config.json may have for a model or a part, all else left out."""

SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 2048, "truncate": False},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "proportional": {},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 1024},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Transformers warns of most of what it is told here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def one_in(pytestconfig: pytest.Config) -> int:
    """Of so many variants of a config, one is read."""
    return int(pytestconfig.getoption("--one-in"))


def some(variants: Iterable[Any], one_in: int, seed: str) -> list[Any]:
    """One in so many, the same in every run; other models, which share the code that reads, have others."""
    every = list(variants)
    return Random(seed).sample(every, -(-len(every) // one_in))


def config_class(model: str) -> Any:
    return next((config for config in rotations() if config.model_type == model), None) or CONFIGS[model]


def module_of(config: object) -> Any:
    return rotations()[type(config)](config)


def layer_types(module: object) -> list[Any]:
    """Those that a module tells apart, or None for all."""
    types = getattr(module, "rope_type", None)
    return sorted(types) if isinstance(types, dict) and types else [None]


def buffer(module: Any, name: str, layer_type: str | None) -> Any:
    if hasattr(module, "freqs_ci"):  # of Llama 4, whose first patch has 1 as its ids
        return module.freqs_ci[0].flatten().angle().chunk(2)[0] if name == "inv_freq" else 1.0
    return getattr(module, name if layer_type is None else f"{layer_type}_{name}")


def words_or(reader: Any, config: object, layer_type: str | None) -> Any:
    """Return what is read, or the words of the refusal."""
    try:
        return reader(config, layer_type=layer_type)
    except MmposError as error:
        return str(error)


def ours(config: object, layer_type: str | None = None) -> Rotary | str:
    """The rotation that is read, or the words of the refusal."""
    reading: Rotary | str = words_or(Rotary.from_hf_config, config, layer_type)
    return reading


def as_json(config: dict[str, object]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return told


def test_the_table_is_that_of_the_classes() -> None:
    assert TABLE.read_text(encoding="utf-8") == to_json(table())


def test_every_class_that_a_model_rotates_by_is_read_or_refused_by_name() -> None:
    models = {config.model_type or config.__name__ for config in rotations()}
    assert {*ROTATING, *OTHER_ROTATIONS, *NAMELESS} - {*WITHOUT_MODULE} == models


# Rotations of class defaults, turned by the code of the model.


def tables_of(module: Any, layer_type: str | None) -> tuple[Any, int]:
    """cos and sin of IDS, and on how many axes."""
    kind = {} if layer_type is None else {"layer_type": layer_type}
    if hasattr(module, "compute_axial_rope_parameters"):
        model = module.config.model_type
        axes = 3 if model == "minimax_m3_vl_vision" else 2
        ids = IDS[[1, 0]] if model in COLUMNS_FIRST else IDS[:axes]
        return module(torch.zeros(1), ids.T), axes
    for axes in (3, 2):
        try:
            tables = module(torch.zeros(1), IDS[:axes, None], **kind)
        except RuntimeError:  # of another number of axes
            continue
        if (tables[0] if isinstance(tables, tuple) else tables).ndim == 3:  # the axes are used up
            return tables, axes
    return module(torch.zeros(1), IDS[:1], **kind), 1


def turning_function(module: object, config: object) -> Any:
    code = sys.modules[type(module).__module__]
    if hasattr(module, "compute_axial_rope_parameters"):
        for name in ("apply_rotary_pos_emb_vision", "apply_rotary_pos_emb_2d"):
            if hasattr(code, name):
                return getattr(code, name)
    interleaves = getattr(config, "rope_interleave", True) and "Audio" not in type(module).__name__
    if hasattr(code, "apply_rotary_pos_emb_interleave") and interleaves:
        return code.apply_rotary_pos_emb_interleave
    return code.apply_rotary_pos_emb if hasattr(code, "apply_rotary_pos_emb") else code.apply_rotary_emb


def turned(function: Any, q: Tensor, k: Tensor, tables: Any) -> tuple[Tensor, Tensor]:
    """q and k, (1, heads, tokens, channels), as a function of Transformers turns them."""
    names = list(inspect.signature(function).parameters)
    if names[0] == "x":
        return function(q, *tables), function(k, *tables)
    if function.__name__ == "apply_rotary_pos_emb_vision":
        turned = function(q[0].transpose(0, 1), k[0].transpose(0, 1), *tables)
        return tuple(each.transpose(0, 1)[None] for each in turned)
    if isinstance(tables, Tensor):  # complex
        if function.__module__.endswith("llama4"):
            turned = function(q.transpose(1, 2), k.transpose(1, 2), tables)
            return tuple(each.transpose(1, 2) for each in turned)
        return function(q, k, tables)
    if tables[0].ndim == 2:  # Pixtral
        return function(q, k, *tables, unsqueeze_dim=0)
    return function(q, k, *tables)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Of all pairs of tokens: whatever order the channels of both come in."""
    return q.double() @ k.double().mT


def bound_of(q: Tensor, k: Tensor, attention_factor: float = 1.0) -> float:
    """Bound between scores of two float32 implementations.

    An angle is a frequency of some eight operations times an id; cos, sin and products round as often again. That is
    an error of each turned channel, and a score is a sum over pairs of channels, of q and of k.
    """
    turning = 2 * 8 * (1 + int(IDS.max())) * EPSILON * attention_factor**2
    return turning * (2 * q.norm(dim=-1).amax() * k.norm(dim=-1).amax()).item()


@pytest.mark.parametrize("model", [model for model in ROTATING if model not in (*WITHOUT_MODULE, *WITHOUT_IDS)])
def test_scores_are_those_of_the_code_of_the_model(model: str) -> None:
    config = config_class(model)(**RELEASED.get(model, {}))
    module = module_of(config)
    for layer_type in layer_types(module):
        rotary = Rotary.from_hf_config(config, layer_type=layer_type, precision="hf")
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, 2, IDS.shape[1], rotary.head_dim, generator=generator) for _ in range(2))
        tables, axes = tables_of(module, layer_type)
        dim = 2 * len(buffer(module, "inv_freq", layer_type))
        dim *= axes if hasattr(module, "compute_axial_rope_parameters") and model != "pixtral" else 1
        theirs = [
            torch.cat((part, whole[..., dim:]), dim=-1)
            for part, whole in zip(
                turned(turning_function(module, config), q[..., :dim], k[..., :dim], tables), (q, k), strict=True
            )
        ]
        assert axes in (1, rotary.axes)
        ids = IDS[: rotary.axes] if axes > 1 else IDS[:1].expand(rotary.axes, -1)
        mine = apply_rotary(q, k, ids[:, None], rotary, layout="bhsd")
        bound = bound_of(q, k, rotary.attention_factor)
        torch.testing.assert_close(scores(*mine), scores(*theirs), rtol=0, atol=bound)  # type: ignore[arg-type]


def test_scores_are_those_of_functions_without_a_module() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, IDS.shape[1], 64, generator=generator) for _ in range(2))
    for model in WITHOUT_MODULE:
        rotary = Rotary.from_hf_config(config_class(model)(), precision="hf")
        assert rotary == Rotary(rotary.head_dim, rotary_dim=64, pairing="adjacent", precision="hf")
        code = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        if model == "roformer":
            table = code.RoFormerSinusoidalPositionalEmbedding(64, 64)
            table.weight = torch.nn.Parameter(table.create_weight())
            sinusoids = table.weight.detach()[IDS[0]][None, None]
            theirs = code.RoFormerSelfAttention.apply_rotary_position_embeddings(sinusoids, q, k)
        else:
            sin, cos = code.create_sinusoidal_positions(64, 64)[IDS[0]][None].chunk(2, dim=-1)
            theirs = [code.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2) for x in (q, k)]
        mine = apply_rotary(q, k, IDS[:1, None].expand(2, -1, -1), replace(rotary, head_dim=64), layout="bhsd")
        torch.testing.assert_close(scores(*mine), scores(*theirs), rtol=0, atol=bound_of(q, k))  # type: ignore[arg-type]


# Configs as files have them.


def with_fields_left_out(full: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The whole config without one field, of rope_parameters too."""
    for name in sorted(full.keys() - {"model_type"}):
        yield {key: value for key, value in full.items() if key != name}
    rope = full.get("rope_parameters") or {}
    for name, entry in rope.items():
        yield full | {"rope_parameters": {key: value for key, value in rope.items() if key != name}}
        for inner in entry if isinstance(entry, dict) else ():
            less = {key: value for key, value in entry.items() if key != inner}
            yield full | {"rope_parameters": rope | {name: less}}


def with_other_values(full: dict[str, object], least: dict[str, object], declared: Any) -> Iterator[dict[str, Any]]:
    """The config with one number changed or null, and with fields that may mean nothing to it."""
    words = ("base", "dim", "embd", "head", "hidden_size", "position", "rope", "rotary", "theta", "width")
    for name, value in full.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and any(word in name for word in words):
            yield full | {name: 2 * value}
            yield least | {name: 2 * value}
            if name in declared:
                yield full | {name: None}
    for name, value in [*STRAY.items(), ("rope_interleave", False), ("rope_interleave", True)]:
        yield full | {name: value}
        yield least | {name: value}


def with_other_scaling(full: dict[str, Any], least: dict[str, Any], pairs: int) -> Iterator[dict[str, Any]]:
    """The config with each rope type, in today's words and in those of older files, and with half of a head."""
    rope, theta = full.get("rope_parameters") or {}, {"rope_theta": 65432.0}
    lists = {"short_factor": [1 + i / 100 for i in range(pairs)], "long_factor": [2 + i / 100 for i in range(pairs)]}
    for kind, needed in SCALED.items():
        for part in ({}, {"partial_rotary_factor": 0.5}):
            of_half = {name: values[: pairs // 2] if part else values for name, values in lists.items()}
            told: dict[str, Any] = {**needed, **part, **(of_half if kind == "longrope" else {})}
            old, new = {"type": kind, **told}, {"rope_type": kind, **told}
            yield least | {"rope_scaling": new}
            yield least | {"rope_scaling": old, "max_position_embeddings": 4096} | theta
            yield least | {"rope_scaling": old, "original_max_position_embeddings": 1024} | theta
            yield least | {"rope_parameters": new | theta}
            for layer_type in [name for name, entry in rope.items() if isinstance(entry, dict)]:
                yield full | {"rope_parameters": rope | {layer_type: new | theta}}
    yield least | {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 2048}}
    for other_name in ("su", "yarn"):
        yield least | {"rope_scaling": {"type": other_name, **SCALED["longrope"], **lists}}


def same_frequencies(rotary: Rotary, module: object, layer_type: str | None) -> bool:
    """Whether a rotation has the frequencies of a module, in whatever order, its sections and its attention factor."""
    sections = getattr(module, "mrope_section", None)
    if isinstance(sections, list) and rotary.mrope_section is not None:
        read = slice(1 if rotary.allocation == "mrope-interleaved" else 0, None)  # where frames have what is left
        if sections[read] != list(rotary.mrope_section[read]):
            return False
    theirs = buffer(module, "inv_freq", layer_type).float().sort().values
    found = torch.from_numpy(
        rotary.inv_freq_as_hf(lambda base, power: torch.pow(base, torch.from_numpy(power)).numpy())
    )
    by_axis = rotary.allocation == "axial" or rotary.axes_dim is not None
    found = (found[torch.from_numpy(rotary.pair_axis == 0)] if by_axis else found).sort().values
    factor = float(buffer(module, "attention_scaling", layer_type))
    same = found.shape == theirs.shape and torch.allclose(found, theirs, rtol=2 * gamma(FREQUENCY), atol=0)
    return same and abs(rotary.attention_factor - factor) <= 8 * EPSILON * factor


def judge(told: dict[str, Any], layer_type: str | None) -> str | None:
    """Compare the readings of a config, as object and as mapping, with its module: the difference, or None."""
    model = told["model_type"]
    try:
        config = config_class(model)(**{name: copy.deepcopy(told[name]) for name in told if name != "model_type"})
        module = None if model in WITHOUT_MODULE else module_of(config)
        if module is not None and (
            layer_type not in layer_types(module) or not buffer(module, "inv_freq", layer_type).numel()
        ):
            return None
    except Exception:  # Transformers cannot read it
        return None
    latent = class_defaults()[model].get("qk_rope_head_dim") and getattr(config, "qk_rope_head_dim", None)
    if module is not None and latent and 2 * len(buffer(module, "inv_freq", layer_type)) != latent:
        return None  # its module does not fit the part of a head that it is for
    readings = [rotary for rotary in (ours(config, layer_type), ours(told, layer_type)) if isinstance(rotary, Rotary)]
    if len({*readings}) > 1:
        return f"object and mapping: {readings}"
    if module is not None and not all(same_frequencies(rotary, module, layer_type) for rotary in readings):
        return str(readings)
    return None


@pytest.mark.parametrize("model", ROTATING)
def test_a_config_is_read_as_its_class_reads_it_or_refused(model: str, one_in: int) -> None:
    released = RELEASED.get(model, {})
    config = config_class(model)(**copy.deepcopy(released))
    full, least = as_json(config.to_dict()), {"model_type": model, **released}
    for layer_type in [None] if model in WITHOUT_MODULE else layer_types(module_of(config)):
        rotary = ours(config, layer_type)
        assert isinstance(rotary, Rotary)
        for told in (full, as_json(config.to_diff_dict()), least):
            assert ours(told, layer_type) == rotary
        variants = [
            *with_fields_left_out(full),
            *with_other_values(full, least, type(config).__dataclass_fields__),
            *with_other_scaling(full, least, rotary.num_pairs),
        ]
        chosen = some(variants, one_in, f"{model} {layer_type}")
        wrong = [(told, why) for told in chosen if (why := judge(told, layer_type))]
        assert wrong == []


@pytest.mark.parametrize("model", sorted(OTHER_ROTATIONS))
def test_other_rotations_are_refused_by_name(model: str) -> None:
    config = config_class(model)()
    want = f"model_type: got {model!r}, want another: {OTHER_ROTATIONS[model]}"
    assert ours(config) == ours(as_json(config.to_dict())) == ours({"model_type": model}) == want


# Configs of whole models.


def language_model(config: object) -> Any:
    for name in ("thinker_config", "text_config"):
        config = getattr(config, name, config)
    return config


@pytest.mark.parametrize("model", WHOLE)
def test_a_whole_config_gives_the_rotation_of_its_language_model(model: str) -> None:
    config = CONFIGS[model]()
    text = language_model(config)
    for name, value in RELEASED.get(text.model_type, {}).items():
        setattr(text, name, value)
    whole = as_json(config.to_dict())
    part = "thinker_config" if "thinker_config" in whole else "text_config"
    if text.model_type not in ROTATING:  # and so in words
        assert ours(config) == ours(text) == ours(whole)
        return
    released = RELEASED.get(text.model_type, {})
    least = {
        part: {"text_config": released} if part == "thinker_config" else {"model_type": text.model_type} | released
    }
    for layer_type in layer_types(module_of(text)):
        rotary = ours(text, layer_type)
        assert isinstance(rotary, Rotary)
        for told in (config, whole, as_json(config.to_diff_dict())):
            assert ours(told, layer_type) == rotary
        if model != "fun_asr_nano":  # whose class wants its parts to fit each other
            bare = language_model(CONFIGS[model](**copy.deepcopy(least)))
            assert ours({"model_type": model} | least, layer_type) == ours(bare, layer_type)
        want = f"config.{part}: got none, want the config of the language model"
        assert ours({"model_type": model}, layer_type) == (rotary if model in TEXT_AT_TOP else want)


def bare(full: dict[str, Any], typed: bool) -> dict[str, Any]:
    """The config with nothing but its parts, which have nothing but theirs, and their model types."""
    parts = {name: bare(full[name], typed) for name in full if name.endswith("_config") and full[name]}
    return {"model_type": full["model_type"], **parts} if typed and "model_type" in full else parts


def parts_of(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield told
    for name in sorted(told.keys() - {"model_type"}):
        yield from parts_of(told[name])


@pytest.mark.parametrize("model", [model for model in [*ROTATING, *WHOLE] if model in CONFIGS])
def test_a_config_without_its_defaults_gives_what_its_object_gives_or_is_refused(model: str, one_in: int) -> None:
    full = as_json(CONFIGS[model]().to_dict())
    readers = (Rotary.from_hf_config, mmpos.from_hf_config) if model in MODEL_TYPES else (Rotary.from_hf_config,)
    for typed in (True, False):
        count = len([*parts_of(bare(full, typed))])
        variants = itertools.product(range(count), PART_FIELDS)
        for part, said in [(0, dict[str, Any]()), *some(variants, one_in, f"{model} {typed}")]:
            told = {**bare(full, typed), "model_type": model}
            [*parts_of(told)][part].update(copy.deepcopy(said))
            try:
                config = CONFIGS[model](**{name: copy.deepcopy(told[name]) for name in told if name != "model_type"})
            except Exception:  # Transformers cannot read it
                continue
            for reader in readers:
                for layer_type in (None, *LAYERS):
                    readings = [words_or(reader, each, layer_type) for each in (config, told)]
                    refused = [isinstance(reading, str) for reading in readings]
                    assert readings[0] == readings[1] or (any(refused) if said else all(refused)), (told, layer_type)


def with_parts_left_out(full: dict[str, object]) -> Iterator[dict[str, Any]]:
    """The whole config without one field, of itself or of a part."""
    for name, value in full.items():
        if name != "model_type":
            yield {key: full[key] for key in full if key != name}
        if name in ("text_config", "vision_config") and isinstance(value, dict):
            for inner in value:
                yield full | {name: {key: value[key] for key in value if key != inner}}


@pytest.mark.parametrize("model", [model for model in MODEL_TYPES if model in class_defaults()])
def test_settings_of_a_config_that_leaves_fields_out_are_those_of_its_object_or_refused(
    model: str, one_in: int
) -> None:
    config, layer_type = config_of(model), LAYER_TYPES.get(model)
    assert mmpos.from_hf_config(as_json(config.to_diff_dict()), layer_type=layer_type) == settings_of(model)
    for told in some(with_parts_left_out(as_json(config.to_dict())), one_in, model):
        try:
            again = type(config)(**{name: copy.deepcopy(told[name]) for name in told if name != "model_type"})
        except Exception:  # Transformers cannot read it
            continue
        try:
            settings = mmpos.from_hf_config(told, layer_type=layer_type)
        except MmposError:
            continue
        assert settings == mmpos.from_hf_config(again, layer_type=layer_type)
