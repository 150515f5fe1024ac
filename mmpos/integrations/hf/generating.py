"""generate with positions: ids of the prompt at the first step, and the next positions of every row after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.hf.handing import ARGUMENT
from mmpos.integrations.hf.positions import tokens_of
from mmpos.integrations.hf.prompt import Prompt
from mmpos.rotary.config import Rotary

__all__ = ["generate", "prepare_inputs_for_generation"]


def generate(
    model: Any,
    rotaries: Sequence[Rotary],
    inputs: Tensor | None = None,
    *args: Any,
    mm_position_ids: Any = None,
    mm_next_positions: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """``generate`` of the model's class, with positions of the prompt.

    Args:
        model: the model.
        rotaries: what its layers turn by.
        inputs: as there.
        args: as there.
        mm_position_ids: a PositionTable with a document for every row, all of one length; or dense ids (axes, batch,
            seq), or DevicePositions, with mm_next_positions. With past_key_values they are those of the cached tokens
            and of the new ones.
        mm_next_positions: (batch,) the id of the token after each prompt; a table knows it.
        kwargs: as there.
    """
    if mm_position_ids is None and mm_next_positions is not None:
        raise InvalidInputError("mm_next_positions: got it without mm_position_ids, want these beside it")
    if mm_position_ids is not None and not isinstance(mm_position_ids, Prompt):  # an assistant is handed a Prompt
        tokens = tokens_of(kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids"))
        cached = kwargs.get("past_key_values") is not None
        _check_guidance(model, args, kwargs)
        mm_position_ids = Prompt.of(mm_position_ids, mm_next_positions, rotaries, tokens, cached)
    if mm_position_ids is not None:
        kwargs[ARGUMENT] = mm_position_ids
    return type(model).generate(model, inputs, *args, **kwargs)


def _check_guidance(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a second branch, which Transformers runs through the model without our arguments."""
    config = kwargs.get("generation_config") or next(iter(args), None) or model.generation_config
    scale = kwargs.get("guidance_scale", getattr(config, "guidance_scale", None))
    if scale not in (None, 1):
        raise UnsupportedError(f"guidance_scale: got {scale}, want 1: the branch that guides takes no mm_position_ids")


def prepare_inputs_for_generation(
    model: Any, input_ids: Tensor, *, inputs_embeds: Tensor | None = None, mm_position_ids: Any = None, **kwargs: Any
) -> Any:
    """``prepare_inputs_for_generation`` of the model's class, with the ids of the tokens that it chooses.

    Transformers reads the names of its arguments to know which ones ``generate`` may be given.
    """
    prepared = type(model).prepare_inputs_for_generation(model, input_ids, inputs_embeds=inputs_embeds, **kwargs)
    if mm_position_ids is None:
        return prepared
    tokens = tokens_of(prepared.get("inputs_embeds"), prepared.get("input_ids"))
    cache = kwargs.get("past_key_values")
    start = 0 if cache is None else cache.get_seq_length()
    prepared[ARGUMENT] = mm_position_ids.columns(start, tokens.shape[1], tokens.shape[0]).to(tokens.device)
    return prepared
