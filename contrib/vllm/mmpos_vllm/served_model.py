"""ServedModel: the positions with which vLLM serves a checkpoint, read from its config; and refused engine configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmpos import Grid, SegmentTable, Text, place
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import Rotary
from mmpos.schemes import Scheme, get_scheme
from mmpos_vllm.checks import boolean, integer, one_of
from mmpos_vllm.sections import Sections, request_positions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["IDS_PER_TOKEN", "ServedModel", "check_engine", "mmpos_options"]

IDS_PER_TOKEN = 3
"""Maximum number of ids per token in schemes with two axes: an image consumes at most (h+1)(w+1) − 1 <= 3hw ids."""

NO_DRAFT_MODEL = ("ngram", "suffix")
"""Speculative decoding methods without a draft model; vLLM derives the cache slots of draft models from ids."""

KEYS = ("scheme", "allocation", "precision", "permuted")


@dataclass(frozen=True)
class ServedModel:
    """Scheme, sections and merge size of a model with two axes; ``from_config`` reads them from its config.

    Args:
        scheme: scheme of the model.
        sections: layout of vLLM's rotation.
        spatial_merge_size: side, in patches, of the square merged into one token.
        permute: whether to permute the weights while they are loaded.
    """

    scheme: Scheme
    sections: Sections
    spatial_merge_size: int
    permute: bool = False

    @classmethod
    def from_config(cls, config: object, max_model_len: int) -> ServedModel:
        """Read the ``mmpos`` part of a checkpoint's config and the rotation of its language model.

        Args:
            config: the whole config object of a model, or the contents of its config.json as a mapping. ``mmpos`` holds
                ``scheme`` (a name), ``allocation`` ("interleaved", the default of ``Rotary``, or "split"),
                ``precision`` ("exact" or "hf") and ``permuted`` (whether the checkpoint comes from ``permute_qk``;
                False by default).
            max_model_len: maximum number of tokens in a request; the cos/sin cache has rows for all ids that these
                tokens may consume.

        Raises:
            InvalidInputError: ``mmpos`` is missing or has an unknown field, or mrope_section does not match it.
            UnsupportedError: vLLM cannot serve the scheme, which must have two axes, integer ids and a next position.
        """
        options = mmpos_options(config)
        for key in options:
            one_of("config.mmpos", key, KEYS)
        permuted = boolean("config.mmpos.permuted", options.get("permuted", False))
        names = ("interleaved", "split")
        allocation = one_of("config.mmpos.allocation", options.get("allocation", "interleaved"), names)
        precision = options.get("precision", "exact")
        rotary = Rotary.from_hf_config(config, axes=2, allocation=allocation, precision=precision)
        rows = IDS_PER_TOKEN * integer("max_model_len", max_model_len, 1)
        sections = Sections(rotary, max_position=rows, permuted=allocation == "interleaved")
        if permuted and not sections.permuted:
            raise InvalidInputError(
                "config.mmpos.permuted: got True for allocation 'split', want False: 'split' needs no permutation"
            )
        _check_sections(config, sections)
        scheme = get_scheme(options["scheme"])
        if scheme.axes != 2:
            raise UnsupportedError(f"scheme: got {scheme.name!r} with {scheme.axes} axes, want two axes")
        probe = SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(1)]])
        request_positions(place(probe, scheme), sections)  # raises an error if no request could be served
        merge = _read(_read(config, "vision_config"), "spatial_merge_size")
        merge = integer("config.vision_config.spatial_merge_size", merge, 1)
        return cls(scheme, sections, merge, permute=sections.permuted and not permuted)


def mmpos_options(config: object) -> Mapping[str, Any]:
    """Return the ``mmpos`` mapping in a config."""
    options = _read(config, "mmpos")
    if not isinstance(options, Mapping) or "scheme" not in options:
        raise InvalidInputError(f"config.mmpos: got {options!r}, want a mapping with scheme")
    return options


def _read(config: object, name: str) -> Any:
    """Return a field of an object or mapping, or None if it is missing."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _check_sections(config: object, sections: Sections) -> None:
    """Check the config's mrope_section, from which vLLM sizes its buffers and enables M-RoPE."""
    text = _read(config, "text_config") or config
    rope = _read(text, "rope_parameters") or _read(text, "rope_scaling")
    got, want = _read(rope, "mrope_section"), list(sections.mrope_section)
    if got is None or list(got) != want:
        raise InvalidInputError(f"rope_parameters.mrope_section: got {got}, want {want} for config.mmpos")
    if _read(rope, "mrope_interleaved"):
        raise InvalidInputError("rope_parameters.mrope_interleaved: got True, want False; sections are contiguous")


def check_engine(vllm_config: VllmConfig, *, permute: bool) -> None:
    """Raise UnsupportedError for configs that vLLM would silently serve with wrong ids, weights or limits."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in NO_DRAFT_MODEL:
        raise UnsupportedError(
            f"speculative_config.method: got {speculative.method!r}, want {' or '.join(NO_DRAFT_MODEL)}; vLLM derives "
            "the cache slots of a draft model from ids, but ids are not token indices here"
        )
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal.enable_mm_embeds:
        raise UnsupportedError("enable_mm_embeds: got True, want False; video embeddings would bypass the limits")
    if multimodal.is_multimodal_pruning_enabled():
        raise UnsupportedError("multimodal pruning: got enabled, want disabled, because pruning computes its own ids")
    if permute and vllm_config.lora_config is not None:
        raise UnsupportedError("lora_config: got one, want none, or a permuted checkpoint and permuted adapters")
    if permute and vllm_config.quant_config is not None:
        got = type(vllm_config.quant_config).__name__
        raise UnsupportedError(f"quant_config: got {got}, want none, or weights permuted before quantisation")
