"""torchtitan's RoPE configs as rotations, read by the names of their fields: torchtitan need not be installed."""

from __future__ import annotations

from typing import Any

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import Llama3, Rotary, Scaling, YaRN

__all__ = ["rotary_from_config"]

PAIRINGS = {"ComplexRoPE.Config": "adjacent", "CosSinRoPE.Config": "half"}
"""Pairs of channels by the config's class, or one that it inherits from."""


def rotary_from_config(config: Any, **overrides: Any) -> Rotary:
    """The rotation of a torchtitan RoPE config, with the axes that images need.

    Theta, dim and scaling are the config's; max_seq_len is not needed. MRoPE's sections come with its allocation.
    YaRN has no attention factor here, as torchtitan folds it into the scale of the softmax.

    Args:
        config: a ``CosSinRoPE.Config``, ``ComplexRoPE.Config``, or one that inherits from them.
        overrides: arguments of Rotary that replace what the config says, such as axes and allocation.

    Raises:
        InvalidInputError: another object.
        UnsupportedError: a scaling that is not known, or that torchtitan refuses for this class.
    """
    names = [base.__qualname__ for base in type(config).__mro__]
    pairing = next((PAIRINGS[name] for name in names if name in PAIRINGS), None)
    if pairing is None:
        raise InvalidInputError(f"config: got {names[0]}, want {' or '.join(PAIRINGS)}")
    found = {"head_dim": config.dim, "theta": config.theta, "pairing": pairing, "scaling": _scaling(config, pairing)}
    if "MRoPE.Config" in names and "allocation" not in overrides:
        found |= {"axes": 3, "allocation": "mrope-interleaved", "mrope_section": config.mrope_section}
    return Rotary(**{**found, **overrides})


def _scaling(config: Any, pairing: str) -> Scaling | None:
    if config.scaling == "llama" and pairing == "adjacent":
        return Llama3(
            config.scaling_factor,
            config.low_freq_factor,
            config.high_freq_factor,
            config.original_max_position_embeddings,
        )
    if config.scaling == "yarn":
        if config.rope_factor <= 1:
            return None
        return YaRN(
            config.rope_factor,
            config.original_seq_len,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            attention_factor=1.0,
            truncate=config.truncate,
        )
    if config.scaling != "none":
        raise UnsupportedError(f"config.scaling: got {config.scaling!r} for pairs of the sort {pairing!r}")
    return None
