"""What vLLM's SupportsMRoPE returns for a request: its three rows of ids, and their delta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmpos.integrations.sections import Sections, request_positions
from mmpos.integrations.vllm.features import request_segments
from mmpos.positions.place import place
from mmpos.schemes import Scheme

__all__ = ["mrope_input_positions"]


def mrope_input_positions(
    input_tokens: Sequence[int],
    mm_features: Sequence[Any],
    *,
    scheme: str | Scheme,
    sections: Sections,
    spatial_merge_size: int,
    max_new_tokens: int = 0,
    strict: bool | None = None,
    row_separator: bool = False,
) -> tuple[Tensor, int]:
    """The ids of a prompt as ``SupportsMRoPE.get_mrope_input_positions`` returns them.

    vLLM slices them for chunks and cached prefixes, and gives token i after the prompt the id i + delta. An exception
    in its worker ends the engine with all its requests: call this once where a request comes in, with
    ``max_new_tokens``, to refuse it there.

    Args:
        input_tokens: of the prompt; only counted.
        mm_features: of the request, as vLLM holds them; see ``request_segments``.
        scheme: a name from mmpos.SCHEMES or a scheme object.
        sections: how vLLM's kernels carry the rotation.
        spatial_merge_size: patches merged along each side into one token.
        max_new_tokens: tokens that may be generated.
        strict: whether two images without text between are an error; None asks the scheme.
        row_separator: whether every row of a grid ends in one more token of its span.

    Returns:
        (3, tokens) int64 ids, a new tensor on the CPU, and delta.

    Raises:
        InvalidInputError: a feature whose span is not that of its grid; touching images; a negative id.
        UnsupportedError: a scheme with fractions or without a next position, or with no place for what is there.
        LimitExceededError: ids, or the cursor and max_new_tokens, reach beyond the cos/sin cache.
    """
    segments = request_segments(
        len(input_tokens), mm_features, spatial_merge_size=spatial_merge_size, row_separator=row_separator
    )
    return request_positions(place(segments, scheme, strict=strict), sections, max_new_tokens=max_new_tokens)
