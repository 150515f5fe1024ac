"""What examples cost: their sizes, which are known without pixels, and a model of the time that these take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from os import PathLike

import numpy as np
import numpy.typing as npt

from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.data.stores import store_path
from mmpos.errors import InvalidInputError
from mmpos.rotary.hf_config import Fields
from mmpos.support.checks import IntArray, finite, first_bad, host_array, instance, int_array, integer, integers, naming

__all__ = ["Cost", "Headers"]

FloatArray = npt.NDArray[np.float64]

_MOST_TOKENS = 2**53
"""Sums of sizes are exact in float64 up to here."""


@dataclass(frozen=True, eq=False)
class Headers:
    """Sizes of examples, from text lengths and the headers of images alone.

    Args:
        tokens: (examples,) tokens of each, image tokens and markers included; at least 1.
        labels: (examples,) tokens of each that are trained on; the first of a document is not, since none predicts it.
        patches: (images,) patches of each image, or frame of a video, before they are merged to tokens.
        images: (examples,) images of each, in the order of ``patches``; None if there are no images.
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
        first_bad("tokens", tokens, minimum=1)
        total = tokens.sum(dtype=np.float64)
        if total > _MOST_TOKENS:
            raise InvalidInputError(f"tokens: got {total:g} in all, want at most {_MOST_TOKENS:g}")
        labels = int_array("labels", labels, (tokens.size,))
        first_bad("labels", labels, minimum=0)
        if (labels > tokens).any():
            i = int((labels > tokens).argmax())
            raise InvalidInputError(
                f"labels[{i}]: got {labels[i]}, want at most {tokens[i]}, the tokens of the example"
            )
        patches = int_array("patches", np.asarray(patches, np.int64) if np.size(patches) == 0 else patches, (None,))
        first_bad("patches", patches, minimum=1)
        images = np.zeros_like(tokens) if images is None else int_array("images", images, (tokens.size,))
        first_bad("images", images, minimum=0)
        in_all = int(images.sum(dtype=np.float64))
        if in_all != patches.size:
            raise InvalidInputError(f"images: got {in_all} in all, want {patches.size}, one for each of patches")
        for name, value in (("tokens", tokens), ("labels", labels), ("patches", patches), ("images", images)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, examples: Sequence[Example], *, patches_per_token: int = 4) -> Headers:
        """Measure examples; every frame of a video counts as an image.

        Args:
            examples: the examples.
            patches_per_token: patches that are merged to one token, the square of spatial_merge_size.
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
        """Return the headers of a run of examples."""
        given: object = chosen
        if not isinstance(given, slice) or given.step not in (None, 1):
            raise InvalidInputError(f"headers[…]: got {given!r}, want a slice without a step")
        ends = np.append(0, self.images.cumsum())
        start, stop, _ = chosen.indices(len(self))
        part = self.patches[ends[start] : ends[max(start, stop)]]
        return Headers(self.tokens[start:stop], self.labels[start:stop], part, self.images[start:stop])


@dataclass(frozen=True)
class Cost:
    """Model of the time of an example: t tokens and images of p patches take the sum of four terms, in any one unit.

    language_linear·t + language_quadratic·t² + Σ (vision_linear·p + vision_quadratic·p²)

    The defaults are the shape of a language model of 7 billion parameters with a vision tower of 0.6 billion, in FLOP.

    Args:
        language_linear: per token: weights.
        language_quadratic: per squared token: attention inside of a document.
        vision_linear: per patch.
        vision_quadratic: per squared patch of one image, or frame.
    """

    language_linear: float = 1.3e10
    language_quadratic: float = 2e5
    vision_linear: float = 1.26e9
    vision_quadratic: float = 1.64e5

    def __post_init__(self) -> None:
        for each in fields(self):
            value = finite(f"Cost.{each.name}", getattr(self, each.name), minimum=0)
            object.__setattr__(self, each.name, value)
        if not self.language_linear:
            raise InvalidInputError("Cost.language_linear: got 0.0, want > 0: every token costs something")

    @classmethod
    def from_hf_config(cls, config: object) -> Cost:
        """Count the FLOP of a forward pass by a Transformers config; that of training is three times as much.

        Causal attention counts half of its square. A vision tower with windows counts its full attention alone.

        Args:
            config: a config object, the mapping of its config.json, or the path of that file or its folder.

        Raises:
            InvalidInputError: a size that is needed is missing.
        """
        whole = Fields.of(config)
        thinker = whole.part("thinker_config") or whole
        language = thinker.part("text_config") or thinker
        linear, quadratic = _transformer_flops(language, "num_hidden_layers")
        vocabulary = language.integer("vocab_size") or 0
        hidden = language.integer("hidden_size", needed=True, minimum=1)
        vision = thinker.part("vision_config")
        of_vision = (0.0, 0.0) if vision is None else _transformer_flops(vision, "depth", "num_hidden_layers")
        return cls(linear + 2.0 * vocabulary * hidden, quadratic / 2, *of_vision)

    @classmethod
    def fit(cls, batches: Sequence[Headers], seconds: npt.ArrayLike) -> Cost:
        """Fit the coefficients to measured times by least squares; none becomes negative.

        Args:
            batches: the examples of each measurement.
            seconds: (measurements,) what each took.

        Raises:
            InvalidInputError: fewer than four measurements, or times from which tokens seem to cost nothing.
        """
        for i, batch in enumerate(batches):
            instance(f"batches[{i}]", batch, Headers, "Headers.of")
        times = host_array("seconds", seconds)
        if times.dtype.kind not in "iuf":
            raise InvalidInputError(f"seconds: got dtype {times.dtype}, want numbers")
        times = times.astype(np.float64)
        usable = (times > 0) & (times < np.inf)
        if times.shape != (len(batches),) or len(batches) < 4 or not usable.all():
            got = f"{times.shape} for {len(batches)} batches"
            raise InvalidInputError(f"seconds: got {got}, want one time above 0 for each of at least four batches")
        terms = np.array([sum_terms(batch) for batch in batches])
        coefficients = fit_terms(terms, times)
        if not coefficients[0]:
            raise InvalidInputError(
                "seconds: got times that do not grow with tokens, want batches of more different sizes"
            )
        return cls(*coefficients.tolist())

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Cost:
        """Read the coefficients from a file of ``Calibration.write``: the numbers of its object ``cost``.

        Raises:
            InvalidInputError: the file is no JSON of such numbers.
            OSError: it cannot be opened.
        """
        try:
            content = json.loads(store_path("path", path).read_bytes())
        except ValueError as error:
            raise InvalidInputError(f"{path}: got no JSON ({error}), want a file of mmpos data calibrate") from None
        cost = content.get("cost") if isinstance(content, dict) else None
        names = {each.name for each in fields(cls)}
        if not isinstance(cost, dict) or cost.keys() != names:
            got = sorted(cost) if isinstance(cost, dict) else "no object"
            raise InvalidInputError(f"{path}: cost: got {got}, want {', '.join(sorted(names))}")
        with naming(str(path)):
            return cls(**cost)

    def of(self, headers: Headers) -> FloatArray:
        """Return the (examples,) cost of each example."""
        coefficients = np.array([getattr(self, each.name) for each in fields(self)])
        costs: FloatArray = coefficients @ _terms(headers)
        return costs


def _terms(headers: Headers) -> FloatArray:
    """Return (4, examples): tokens, squared tokens, patches and squared patches of each example."""
    owner = np.arange(len(headers)).repeat(headers.images)
    patches, tokens = headers.patches.astype(np.float64), headers.tokens.astype(np.float64)
    of_images = [np.bincount(owner, power, len(headers)) for power in (patches, patches**2)]
    return np.stack([tokens, tokens**2, *of_images])


def sum_terms(headers: Headers) -> FloatArray:
    """Return (4,): tokens, squared tokens, patches and squared patches of all examples."""
    total: FloatArray = _terms(headers).sum(axis=1)
    return total


def fit_terms(terms: FloatArray, times: FloatArray) -> FloatArray:
    """Solve least squares of relative errors with coefficients >= 0, by trying all subsets of the terms."""
    best, least = np.zeros(terms.shape[1]), np.inf
    scale = np.abs(terms).max(axis=0)
    there = np.flatnonzero(scale)
    weighted = terms[:, there] / scale[there] / times[:, None]
    for chosen in product([False, True], repeat=there.size):
        used = np.array(chosen)
        found = np.linalg.lstsq(weighted[:, used], np.ones(times.size), rcond=None)[0]
        error = float(np.square(weighted[:, used] @ found - 1).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(terms.shape[1]), error
            best[there[used]] = found / scale[there[used]]
    return best


def _transformer_flops(fields: Fields, *layers: str) -> tuple[float, float]:
    """Count the FLOP of a stack of layers, per token and per pair of tokens."""
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
    """Count the weights of a feed-forward part that a token passes."""
    gated = 2 if fields.get("hidden_act") in ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu") else 3
    experts = fields.integer("num_experts_per_tok")
    if experts:
        inner = fields.integer("moe_intermediate_size", "intermediate_size", needed=True)
        return float(gated * width * (experts * inner + (fields.integer("shared_expert_intermediate_size") or 0)))
    of_layer = fields.integer("intermediate_size")
    if of_layer:
        return float(gated * width * of_layer)
    ratio = fields.get("mlp_ratio")
    return 2.0 * width * width * finite(f"{fields.name}.mlp_ratio", 4 if ratio is None else ratio, minimum=0)
