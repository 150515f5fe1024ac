"""ServedModel: the positions with which vLLM serves a checkpoint, read from the ``mmpos`` part of its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.sections import Sections, request_positions
from mmpos.positions.place import place
from mmpos.rotary import Rotary
from mmpos.rotary.hf_config import read_field
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.kinds import Grid, Text
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import boolean, integer, one_of

__all__ = ["IDS_PER_TOKEN", "ServedModel", "mmpos_options"]

IDS_PER_TOKEN = 3
"""Maximum number of ids per token in schemes with two axes: an image consumes at most (h+1)(w+1) − 1 <= 3hw ids."""

KEYS = ("scheme", "allocation", "precision", "permuted")


@dataclass(frozen=True)
class ServedModel:
    """Scheme, sections and merge size of a model with two axes; ``from_config`` reads them from the model's config.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", get_scheme(self.scheme))
        if not isinstance(self.sections, Sections):
            raise InvalidInputError(f"sections: got {type(self.sections).__name__}, want a Sections")
        merge = integer("spatial_merge_size", self.spatial_merge_size, minimum=1)
        object.__setattr__(self, "spatial_merge_size", merge)
        if boolean("permute", self.permute) and not self.sections.permuted:
            raise InvalidInputError("permute: got True, want False for sections that are not permuted")
        if self.scheme.axes != 2:
            raise UnsupportedError(f"scheme: got {self.scheme.name!r} with {self.scheme.axes} axes, want two axes")
        probe = SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(1)]])
        request_positions(place(probe, self.scheme), self.sections)  # raises an error if no request could be served

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
        rows = IDS_PER_TOKEN * integer("max_model_len", max_model_len, minimum=1)
        sections = Sections(rotary, max_position=rows, permuted=allocation == "interleaved")
        if permuted and not sections.permuted:
            raise InvalidInputError(
                "config.mmpos.permuted: got True for allocation 'split', want False: 'split' needs no permutation"
            )
        _check_sections(config, sections)
        merge = read_field(read_field(config, "vision_config"), "spatial_merge_size")
        return cls(
            get_scheme(options["scheme"]),
            sections,
            integer("config.vision_config.spatial_merge_size", merge, minimum=1),
            permute=sections.permuted and not permuted,
        )


def mmpos_options(config: object) -> Mapping[str, Any]:
    """Return the ``mmpos`` mapping in a config."""
    options = read_field(config, "mmpos")
    if not isinstance(options, Mapping) or "scheme" not in options:
        raise InvalidInputError(f"config.mmpos: got {options!r}, want a mapping with scheme")
    return options


def _check_sections(config: object, sections: Sections) -> None:
    """Check the config's mrope_section, from which vLLM sizes its buffers and enables M-RoPE."""
    text = read_field(config, "text_config") or config
    rope = read_field(text, "rope_parameters") or read_field(text, "rope_scaling")
    got, want = read_field(rope, "mrope_section"), list(sections.mrope_section)
    if got is None or list(got) != want:
        raise InvalidInputError(f"rope_parameters.mrope_section: got {got}, want {want} for config.mmpos")
    if read_field(rope, "mrope_interleaved"):
        raise InvalidInputError("rope_parameters.mrope_interleaved: got True, want False; sections are contiguous")
