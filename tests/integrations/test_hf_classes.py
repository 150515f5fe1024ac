"""Compare the configs of every class in the installed Transformers with the class and its rotation module."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hf_classes import OTHER_ROTATIONS, TABLE, WITHOUT_MODULE, rotations, table, to_json
from model_configs import CONFIGS, config_of
from tolerance import FREQUENCY, gamma
from torch import Tensor

import mmpos
from mmpos.errors import MmposError
from mmpos.integrations.models import MODEL_TYPES
from mmpos.rotary import Rotary, apply_rotary
from mmpos.rotary.hf_models import ENCODERS, MODELS, UNLISTED, class_defaults

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hf_classes")]  # imports every Transformers model

ROTATING = sorted(
    model for model, row in class_defaults().items() if "rope_theta" in row and model not in OTHER_ROTATIONS
)
WHOLE = sorted(
    model
    for model, row in class_defaults().items()
    if {"text_config", "thinker_config"} & {*row.get("parts", {}), *row.get("auto_parts", {})}
    and model != "gemma4_assistant"  # its class refuses its own defaults
)
NAMELESS = {"Qwen3OmniMoeCode2WavConfig", "SaProtConfig"}
"""Config classes without a model type."""

EPSILON = 2.0**-23
IDS = torch.tensor([[0, 1, 2, 3, 5, 8, 13], [4, 0, 9, 1, 7, 2, 30], [1, 6, 2, 11, 0, 21, 5]])
"""(3, tokens) ids; no model has more than three axes."""

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
"""Fields of released checkpoints for classes whose defaults are not a valid rotation."""

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
"""Fields that only some classes read, with values that are not defaults."""

PART_FIELDS: list[dict[str, Any]] = [
    {"hidden_size": 1536, "num_attention_heads": 12},
    {"head_dim": 96},
    {"max_position_embeddings": 4096},
    {"partial_rotary_factor": 0.25},
    {"rope_local_base_freq": 5000.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_theta": 77777.0},
]
"""Fields of a config.json for a model or a part, without any other field."""

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


@pytest.fixture
def one_in(pytestconfig: pytest.Config) -> int:
    """Return the value n of the option ``--one-in``: one in n variants of a config is tested."""
    return int(pytestconfig.getoption("--one-in"))


def sampled(variants: Iterable[Any], one_in: int, seed: str) -> list[Any]:
    """Sample one in ``one_in`` variants; the sample depends only on the seed."""
    population = list(variants)
    return Random(seed).sample(population, -(-len(population) // one_in))


def config_class(model: str) -> Any:
    return next((config for config in rotations() if config.model_type == model), None) or CONFIGS[model]


def module_of(config: object) -> Any:
    return rotations()[type(config)](config)


def layer_types(module: object) -> list[Any]:
    """Return the layer types that a module distinguishes, or [None] if it has a single rotation."""
    types = getattr(module, "rope_type", None)
    return sorted(types) if isinstance(types, dict) and types else [None]


def buffer(module: Any, name: str, layer_type: str | None) -> Any:
    if hasattr(module, "freqs_ci"):  # Llama 4: the ids of its first patch are 1
        return module.freqs_ci[0].flatten().angle().chunk(2)[0] if name == "inv_freq" else 1.0
    return getattr(module, name if layer_type is None else f"{layer_type}_{name}")


def result_or_error(reader: Any, config: object, layer_type: str | None) -> Any:
    """Return the result of a reader, or its error message if it raises."""
    try:
        return reader(config, layer_type=layer_type)
    except MmposError as error:
        return str(error)


def ours(config: object, layer_type: str | None = None) -> Rotary | str:
    """Return the rotation that mmpos reads from a config, or the error message."""
    reading: Rotary | str = result_or_error(Rotary.from_hf_config, config, layer_type)
    return reading


def as_json(config: dict[str, object]) -> dict[str, Any]:
    mapping: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return mapping


def test_the_table_of_class_defaults_is_up_to_date() -> None:
    assert TABLE.read_text(encoding="utf-8") == to_json(table())


def test_every_config_class_with_a_rotation_is_supported_or_refused_by_name() -> None:
    models = {config.model_type or config.__name__ for config in rotations()}
    assert {*ROTATING, *OTHER_ROTATIONS, *NAMELESS} == models | {*WITHOUT_MODULE}


# Rotations of class defaults, compared with the code of the model.


def tables_of(module: Any, layer_type: str | None) -> tuple[Any, int]:
    """Return cos and sin of IDS, and the number of axes."""
    kind = {} if layer_type is None else {"layer_type": layer_type}
    if hasattr(module, "compute_axial_rope_parameters"):
        ids = IDS[[1, 0]] if module.config.model_type == "sam3_vit_model" else IDS[:2]  # it takes columns first
        return module(torch.zeros(1), ids.T), 2
    for axes in (3, 2):
        try:
            tables = module(torch.zeros(1), IDS[:axes, None], **kind)
        except RuntimeError:  # the module has a different number of axes
            continue
        if (tables[0] if isinstance(tables, tuple) else tables).ndim == 3:  # the module has reduced the axes
            return tables, axes
    return module(torch.zeros(1), IDS[:1], **kind), 1


def rotating_function(module: object, config: object) -> Any:
    code = sys.modules[type(module).__module__]
    if hasattr(module, "compute_axial_rope_parameters"):
        for name in ("apply_rotary_pos_emb_vision", "apply_rotary_pos_emb_2d"):
            if hasattr(code, name):
                return getattr(code, name)
    interleaves = getattr(config, "rope_interleave", True) and "Audio" not in type(module).__name__
    if hasattr(code, "apply_rotary_pos_emb_interleave") and interleaves:
        return code.apply_rotary_pos_emb_interleave
    return code.apply_rotary_pos_emb if hasattr(code, "apply_rotary_pos_emb") else code.apply_rotary_emb


def rotated(function: Any, q: Tensor, k: Tensor, tables: Any) -> tuple[Tensor, Tensor]:
    """Rotate (1, heads, tokens, channels) q and k with a Transformers function."""
    names = list(inspect.signature(function).parameters)
    if names[0] == "x":
        return function(q, *tables), function(k, *tables)
    if function.__name__ == "apply_rotary_pos_emb_vision":
        pair = function(q[0].transpose(0, 1), k[0].transpose(0, 1), *tables)
        return tuple(each.transpose(0, 1)[None] for each in pair)
    if isinstance(tables, Tensor):  # complex
        if function.__module__.endswith("llama4"):
            pair = function(q.transpose(1, 2), k.transpose(1, 2), tables)
            return tuple(each.transpose(1, 2) for each in pair)
        return function(q, k, tables)
    return function(q, k, *tables)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Return the scores of all pairs of tokens; they do not depend on the order of channels."""
    return q.double() @ k.double().mT


def bound_of(q: Tensor, k: Tensor, attention_factor: float = 1.0) -> float:
    """Bound the difference between the scores of two float32 implementations.

    Computing an angle, the product of an id and a frequency, takes about eight operations; cos, sin and the products
    add about as many roundings. This bounds the error of each rotated channel, and a score is a sum over channels of q
    and k.
    """
    channel = 2 * 8 * (1 + int(IDS.max())) * EPSILON * attention_factor**2
    return channel * (2 * q.norm(dim=-1).amax() * k.norm(dim=-1).amax()).item()


@pytest.mark.parametrize("model", [model for model in ROTATING if model not in (*WITHOUT_MODULE, *ENCODERS)])
def test_scores_equal_those_of_the_model(model: str) -> None:
    config = config_class(model)(**RELEASED.get(model, {}))
    module = module_of(config)
    for layer_type in layer_types(module):
        rotary = Rotary.from_hf_config(config, layer_type=layer_type, precision="hf")
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, 2, IDS.shape[1], rotary.head_dim, generator=generator) for _ in range(2))
        tables, axes = tables_of(module, layer_type)
        dim = 2 * len(buffer(module, "inv_freq", layer_type))
        dim *= axes if hasattr(module, "compute_axial_rope_parameters") else 1
        theirs = [
            torch.cat((part, full[..., dim:]), dim=-1)
            for part, full in zip(
                rotated(rotating_function(module, config), q[..., :dim], k[..., :dim], tables), (q, k), strict=True
            )
        ]
        assert axes in (1, rotary.axes)
        ids = IDS[: rotary.axes] if axes > 1 else IDS[:1].expand(rotary.axes, -1)
        mine = apply_rotary(q, k, ids[:, None], rotary, layout="bhsd")
        bound = bound_of(q, k, rotary.attention_factor)
        torch.testing.assert_close(scores(*mine), scores(*theirs), rtol=0, atol=bound)  # type: ignore[arg-type]


def test_scores_equal_those_of_models_without_a_rotation_module() -> None:
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


# Configs from files.


def without_fields(full: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the complete config without one field of the config itself, of a part or of its RoPE parameters."""
    for name, value in full.items():
        if name != "model_type":
            yield {key: full[key] for key in full if key != name}
        for less in without_fields(value) if isinstance(value, dict) else ():
            yield full | {name: less}


def with_other_values(full: dict[str, object], least: dict[str, object], declared: Any) -> Iterator[dict[str, Any]]:
    """Yield the config with one number changed or null, and the config with fields that its class may not read."""
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
    """Yield the config with each rope type under current and old field names, and with half of a head rotated."""
    rope, theta = full.get("rope_parameters") or {}, {"rope_theta": 65432.0}
    lists = {"short_factor": [1 + i / 100 for i in range(pairs)], "long_factor": [2 + i / 100 for i in range(pairs)]}
    for kind, needed in SCALED.items():
        for part in ({}, {"partial_rotary_factor": 0.5}):
            factors = {name: values[: pairs // 2] if part else values for name, values in lists.items()}
            parameters: dict[str, Any] = {**needed, **part, **(factors if kind == "longrope" else {})}
            old, new = {"type": kind, **parameters}, {"rope_type": kind, **parameters}
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
    """Return whether a rotation has a module's frequencies, in any order, and its sections and attention factor."""
    sections = getattr(module, "mrope_section", None)
    if isinstance(sections, list) and rotary.mrope_section is not None:
        compared = slice(1 if rotary.allocation == "mrope-interleaved" else 0, None)  # frames get the remaining pairs
        if sections[compared] != list(rotary.mrope_section[compared]):
            return False
    want = buffer(module, "inv_freq", layer_type).float().sort().values
    got = torch.from_numpy(rotary.inv_freq_as_hf(lambda base, power: torch.pow(base, torch.from_numpy(power)).numpy()))
    by_axis = rotary.allocation == "axial" or rotary.axes_dim is not None
    got = (got[torch.from_numpy(rotary.pair_axis == 0)] if by_axis else got).sort().values
    factor = float(buffer(module, "attention_scaling", layer_type))
    same = got.shape == want.shape and torch.allclose(got, want, rtol=2 * gamma(FREQUENCY), atol=0)
    return same and abs(rotary.attention_factor - factor) <= 8 * EPSILON * factor


def difference(mapping: dict[str, Any], layer_type: str | None) -> str | None:
    """Compare a module's rotation with those read from a config object and its mapping; describe any difference."""
    model = mapping["model_type"]
    try:
        config = config_class(model)(**{name: copy.deepcopy(mapping[name]) for name in mapping if name != "model_type"})
        module = None if model in WITHOUT_MODULE else module_of(config)
        if module is not None and (
            layer_type not in layer_types(module) or not buffer(module, "inv_freq", layer_type).numel()
        ):
            return None
    except Exception:  # Transformers cannot read it
        return None
    latent = class_defaults()[model].get("qk_rope_head_dim") and getattr(config, "qk_rope_head_dim", None)
    if module is not None and latent and 2 * len(buffer(module, "inv_freq", layer_type)) != latent:
        return None  # the module does not fit the rotated part of a head
    readings = [
        rotary for rotary in (ours(config, layer_type), ours(mapping, layer_type)) if isinstance(rotary, Rotary)
    ]
    if len({*readings}) > 1:
        return f"object and mapping: {readings}"
    if module is not None and not all(same_frequencies(rotary, module, layer_type) for rotary in readings):
        return str(readings)
    return None


@pytest.mark.parametrize("model", ROTATING)
def test_a_config_gives_the_rotation_of_its_class_or_is_refused(model: str, one_in: int) -> None:
    released = RELEASED.get(model, {})
    config = config_class(model)(**copy.deepcopy(released))
    full, least = as_json(config.to_dict()), {"model_type": model, **released}
    for layer_type in [None] if model in WITHOUT_MODULE else layer_types(module_of(config)):
        rotary = ours(config, layer_type)
        assert isinstance(rotary, Rotary)
        for mapping in (full, as_json(config.to_diff_dict()), least):
            assert ours(mapping, layer_type) == rotary
        variants = [
            *without_fields(full),
            *with_other_values(full, least, type(config).__dataclass_fields__),
            *with_other_scaling(full, least, rotary.num_pairs),
        ]
        sample = sampled(variants, one_in, f"{model} {layer_type}")
        wrong = [(mapping, message) for mapping in sample if (message := difference(mapping, layer_type))]
        assert wrong == []


@pytest.mark.parametrize("model", sorted(OTHER_ROTATIONS))
def test_unsupported_rotations_are_refused_by_name(model: str) -> None:
    config = config_class(model)()
    want = f"model_type: got {model!r}, want another: {OTHER_ROTATIONS[model]}"
    assert ours(config) == ours(as_json(config.to_dict())) == ours({"model_type": model}) == want


# Configs of complete models.


def language_model(config: object) -> Any:
    for name in ("thinker_config", "text_config"):
        config = getattr(config, name, config)
    return config


@pytest.mark.parametrize("model", WHOLE)
def test_a_complete_config_gives_the_rotation_of_its_language_model(model: str) -> None:
    config = CONFIGS[model]()
    text = language_model(config)
    for name, value in RELEASED.get(text.model_type, {}).items():
        setattr(text, name, value)
    mapping = as_json(config.to_dict())
    part = "thinker_config" if "thinker_config" in mapping else "text_config"
    if text.model_type not in ROTATING:  # all readers give the same error message
        assert ours(config) == ours(text) == ours(mapping)
        return
    for layer_type in layer_types(module_of(text)):
        rotary = ours(text, layer_type)
        assert isinstance(rotary, Rotary)
        for source in (config, mapping, as_json(config.to_diff_dict())):
            assert ours(source, layer_type) == rotary
        want = f"config.{part}: got none, want the config of the language model, or {{}} for the defaults of its class"
        without_part = {"model_type": model, "other": 1}
        assert ours(without_part, layer_type) == (rotary if MODELS.get(model, UNLISTED).text_at_top else want)


def bare(full: dict[str, Any], typed: bool) -> dict[str, Any]:
    """Reduce a config to its parts, reduced in the same way, and, if ``typed``, the model types of these parts."""
    parts = {name: bare(full[name], typed) for name in full if name.endswith("_config") and full[name]}
    return {"model_type": full["model_type"], **parts} if typed and "model_type" in full else parts


def parts_of(mapping: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield mapping
    for name in sorted(mapping.keys() - {"model_type"}):
        yield from parts_of(mapping[name])


def with_one_field(full: dict[str, Any], typed: bool) -> Iterator[dict[str, Any]]:
    """Yield a config of parts without fields, and each of PART_FIELDS in one of them."""
    for part, values in itertools.product(range(len([*parts_of(bare(full, typed))])), PART_FIELDS):
        mapping = {**bare(full, typed), "model_type": full["model_type"]}
        [*parts_of(mapping)][part].update(copy.deepcopy(values))
        yield mapping


READ = [
    model for model in dict.fromkeys([*ROTATING, *WHOLE, *MODEL_TYPES]) if model in {*CONFIGS} & {*class_defaults()}
]


@pytest.mark.parametrize("model", READ)
def test_a_mapping_gives_the_same_result_as_its_object_or_is_refused(model: str, one_in: int) -> None:
    full = as_json(config_of(model).to_dict())
    readers: list[Any] = [Rotary.from_hf_config, mmpos.from_hf_config][: 2 if model in MODEL_TYPES else 1]
    bares = [{**bare(full, typed), "model_type": model} for typed in (True, False)]
    variants = [*with_one_field(full, True), *with_one_field(full, False), *without_fields(full)]
    for mapping in [*bares, *sampled(variants, one_in, model)]:
        try:
            config = CONFIGS[model](**{name: copy.deepcopy(mapping[name]) for name in mapping if name != "model_type"})
        except Exception:  # Transformers cannot read it
            continue
        for reader, layer_type in itertools.product(readers, [None, *LAYERS]):
            got = [result_or_error(reader, source, layer_type) for source in (config, mapping)]
            refused = [isinstance(result, str) for result in got]
            assert got[0] == got[1] or (all(refused) if mapping in bares else any(refused)), (mapping, layer_type)
