"""Sizes of examples, which are known without pixels, and a model of their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.errors import InvalidInputError
from mmpos.rotary.hf_config import Fields
from mmpos.support.checks import IntArray, finite, first_bad, int_array, integer, integers

__all__ = ["Cost", "Headers"]

FloatArray = npt.NDArray[np.float64]

_MOST_TOKENS = 2**53
"""Largest sum of sizes that is exact in float64."""


@dataclass(frozen=True, eq=False)
class Headers:
    """Sizes of examples, known from text lengths and image headers alone.

    Args:
        tokens: (examples,) tokens of each example, including image tokens and markers; at least 1.
        labels: (examples,) trained tokens of each example, excluding the first token of a document, which no token
            predicts.
        patches: (images,) patches of each image or video frame, before they are merged into tokens.
        images: (examples,) images of each example, in the order of ``patches``; None if there are no images.
    """

    tokens: IntArray
    labels: IntArray
    patches: IntArray
    images: IntArray

    def __init__(
        self,
        tokens: npt.ArrayLike,
        labels: npt.ArrayLike,
        patches: npt.ArrayLike = (),
        images: npt.ArrayLike | None = None,
    ) -> None:
        tokens = int_array("tokens", tokens, (None,))
        labels = int_array("labels", labels, (tokens.size,))
        patches = int_array("patches", np.asarray(patches, np.int64) if np.size(patches) == 0 else patches, (None,))
        images = np.zeros_like(tokens) if images is None else int_array("images", images, (tokens.size,))
        for name, value, least in (("tokens", tokens, 1), ("labels", labels, 0), ("patches", patches, 1)):
            first_bad(name, value, minimum=least)
        first_bad("images", images, minimum=0)
        if (total := tokens.sum(dtype=np.float64)) > _MOST_TOKENS:
            raise InvalidInputError(f"tokens: got a sum of {total:g}, want at most {_MOST_TOKENS:g}")
        if (bad := np.flatnonzero(labels > tokens)).size:
            want = f"at most {tokens[bad[0]]}, the tokens of the example"
            raise InvalidInputError(f"labels[{bad[0]}]: got {labels[bad[0]]}, want {want}")
        num_images = int(images.sum(dtype=np.float64))
        if num_images != patches.size:
            raise InvalidInputError(f"images: got a sum of {num_images}, want {patches.size} as in patches")
        for name, value in (("tokens", tokens), ("labels", labels), ("patches", patches), ("images", images)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, examples: Sequence[Example], *, patches_per_token: int = 4) -> Headers:
        """Compute the sizes of examples; every video frame counts as an image.

        Args:
            examples: the examples.
            patches_per_token: number of patches merged into one token, the square of spatial_merge_size.
        """
        merged = integer("patches_per_token", patches_per_token, minimum=1)
        grids = [example.sequence.grid_thw for example in examples]
        frames = np.concatenate([np.zeros((0, 3), np.int64), *grids])
        return cls(
            [example.num_tokens for example in examples],
            [int((example.labels[1:] != IGNORE_INDEX).sum()) for example in examples],
            (frames[:, 1] * frames[:, 2] * merged).repeat(frames[:, 0]),
            [int(grid[:, 0].sum()) for grid in grids],
        )

    def __len__(self) -> int:
        return self.tokens.size

    def __getitem__(self, chosen: slice) -> Headers:
        """Return the headers of consecutive examples."""
        index: object = chosen
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise InvalidInputError(f"headers[…]: got {index!r}, want a slice without a step")
        ends = np.append(0, self.images.cumsum())
        start, stop, _ = chosen.indices(len(self))
        patches = self.patches[ends[start] : ends[max(start, stop)]]
        return Headers(self.tokens[start:stop], self.labels[start:stop], patches, self.images[start:stop])


@dataclass(frozen=True)
class Cost:
    """Cost of an example with t tokens and images of p patches each, in any unit.

    language_linear·t + language_quadratic·t² + Σ (vision_linear·p + vision_quadratic·p²)

    The defaults are the FLOP of a language model with 7 billion parameters and a vision tower with 0.6 billion.

    Args:
        language_linear: cost per token, for products with weights.
        language_quadratic: cost per squared number of tokens, for attention within a document.
        vision_linear: cost per patch.
        vision_quadratic: cost per squared number of patches of an image or frame.
    """

    language_linear: float = 1.3e10
    language_quadratic: float = 2e5
    vision_linear: float = 1.26e9
    vision_quadratic: float = 1.64e5

    def __post_init__(self) -> None:
        for term in fields(self):
            value = finite(f"Cost.{term.name}", getattr(self, term.name), minimum=0)
            object.__setattr__(self, term.name, value)
        if not self.language_linear:
            raise InvalidInputError("Cost.language_linear: got 0.0, want > 0; every token costs something")

    @classmethod
    def from_hf_config(cls, config: object) -> Cost:
        """Count the FLOP of a forward pass from a Transformers config; training takes three times as many.

        Causal attention counts as half of full attention. Windowed attention layers of a vision tower are not counted.

        Args:
            config: a config object, the mapping from its config.json, or the path of that file or its folder.

        Raises:
            InvalidInputError: a required size is missing.
        """
        root = Fields.of(config)
        thinker = root.part("thinker_config") or root
        language = thinker.part("text_config") or thinker
        linear, quadratic = _transformer_flops(language, "num_hidden_layers")
        vocabulary = language.integer("vocab_size") or 0
        hidden = language.integer("hidden_size", needed=True, minimum=1)
        vision = thinker.part("vision_config")
        vision_flops = (0.0, 0.0) if vision is None else _transformer_flops(vision, "depth", "num_hidden_layers")
        return cls(linear + 2.0 * vocabulary * hidden, quadratic / 2, *vision_flops)

    def of(self, headers: Headers) -> FloatArray:
        """Return the (examples,) cost of each example."""
        costs: FloatArray = np.array(astuple(self)) @ _terms(headers)
        return costs


def _terms(headers: Headers) -> FloatArray:
    """Return the (4, examples) tokens, squared tokens, patches and squared patches of each example."""
    owner = np.arange(len(headers)).repeat(headers.images)
    patches, tokens = headers.patches.astype(np.float64), headers.tokens.astype(np.float64)
    image_terms = [np.bincount(owner, power, len(headers)) for power in (patches, patches**2)]
    return np.stack([tokens, tokens**2, *image_terms])


def _transformer_flops(fields: Fields, *layers: str) -> tuple[float, float]:
    """Count the FLOP of a stack of layers per token and per pair of tokens."""
    depth = fields.integer(*layers, needed=True, minimum=1)
    width = fields.integer("embed_dim", "hidden_size", needed=True, minimum=1)
    heads = fields.integer("num_attention_heads", "num_heads", needed=True, minimum=1)
    head_dim = fields.integer("head_dim") or width // heads
    kv_heads = fields.integer("num_key_value_heads") or heads
    attention = width * head_dim * (2 * heads + 2 * kv_heads)
    full = fields.get("fullatt_block_indexes")
    quadratic_layers = depth if full is None else len(integers(f"{fields.name}.fullatt_block_indexes", full))
    return 2.0 * depth * (attention + _mlp(fields, width)), 4.0 * quadratic_layers * heads * head_dim


def _mlp(fields: Fields, width: int) -> float:
    """Count the feed-forward weights that are applied to a token."""
    gated = 2 if fields.get("hidden_act") in ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu") else 3
    experts = fields.integer("num_experts_per_tok")
    if experts:
        inner = fields.integer("moe_intermediate_size", "intermediate_size", needed=True)
        return float(gated * width * (experts * inner + (fields.integer("shared_expert_intermediate_size") or 0)))
    feed_forward = fields.integer("intermediate_size")
    if feed_forward:
        return float(gated * width * feed_forward)
    ratio = fields.get("mlp_ratio")
    return 2.0 * width * width * finite(f"{fields.name}.mlp_ratio", 4 if ratio is None else ratio, minimum=0)
