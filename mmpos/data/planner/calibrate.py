"""Measure the time that a model needs per token and patch: time documents of several sizes, and fit a Cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.data.examples import Example
from mmpos.data.planner.cost import Cost, FloatArray, Headers, fit_terms, sum_terms
from mmpos.data.stores import store_path
from mmpos.errors import InvalidInputError
from mmpos.support.checks import IntArray, integer, integers

if TYPE_CHECKING:
    from torch import nn

    from mmpos.data.model_inputs import Model
    from mmpos.images import ImageProcessor

__all__ = ["Calibration", "ModelStep", "calibrate"]

_TOKENS = (256, 512, 1024, 2048, 4096)
_PATCHES = (256, 576, 1024, 2304, 4096)
_TEXT = 32  # tokens in addition to those of an image, including markers


@dataclass(frozen=True, eq=False)
class Calibration:
    """Measured times of documents and the fitted costs, in seconds.

    Args:
        cost: coefficients in seconds.
        overhead: seconds that every step takes regardless of its content.
        residual: largest relative error of the fit.
        tokens: (sizes,) tokens of each document.
        patches: (sizes,) patches of the document's image; 0 without an image.
        seconds: (sizes,) median time of the document.
        spread: (sizes,) interquartile range of the document's times, divided by their median.
    """

    cost: Cost
    overhead: float
    residual: float
    tokens: IntArray
    patches: IntArray
    seconds: FloatArray
    spread: FloatArray

    def write(self, path: str | PathLike[str], **about: str) -> None:
        """Write a JSON file that ``Cost.read`` reads.

        Args:
            path: path or URL of the file.
            about: additional entries of the file, such as the model and the device.
        """
        content = {
            **about,
            "unit": "seconds",
            "cost": asdict(self.cost),
            "overhead": self.overhead,
            "residual": self.residual,
            **{name: getattr(self, name).tolist() for name in ("tokens", "patches", "seconds", "spread")},
        }
        store_path("path", path).write_bytes(json.dumps(content, indent=1).encode())


def calibrate(
    step: Callable[[int, int], object],
    *,
    tokens: Sequence[int] = _TOKENS,
    patches: Sequence[int] = _PATCHES,
    patches_per_token: int = 4,
    repeats: int = 7,
    progress: Callable[[int, int], object] | None = None,
) -> Calibration:
    """Time documents of several sizes in turn, and fit a Cost with nonnegative coefficients to the medians.

    The first round warms up caches and compiles kernels, and is not counted.

    Args:
        step: called with the numbers of tokens and patches; trains on one document of this size, without an image if
            patches is 0, and returns when the device has finished. Tokens include those of the image. ``ModelStep``
            is such a callable.
        tokens: text sizes in tokens; at least three.
        patches: image sizes in patches before merging; empty for a text-only model, otherwise at least three.
        patches_per_token: number of patches merged into one token, the square of spatial_merge_size.
        repeats: number of times each size is timed.
        progress: called with the number of finished steps and the total number of steps.

    Raises:
        InvalidInputError: there are too few sizes, or times do not grow with tokens.
    """
    merged = integer("patches_per_token", patches_per_token, minimum=1)
    texts = sorted(set(integers("tokens", tokens, minimum=1)))
    images = sorted(set(integers("patches", patches, minimum=1)))
    for name, sizes, fewest in (("tokens", texts, 3), ("patches", images, 3 if images else 0)):
        if len(sizes) < fewest:
            raise InvalidInputError(f"{name}: got {sizes}, want at least {fewest} different sizes")
    documents = [(size, 0) for size in texts] + [(_TEXT + -(-size // merged), size) for size in images]
    rounds = integer("repeats", repeats, minimum=1) + 1
    times = np.empty((rounds, len(documents)))
    for number, row in enumerate(times):
        for i, document in enumerate(documents):
            began = perf_counter()
            step(*document)
            row[i] = perf_counter() - began
            if progress is not None:
                progress(number * len(documents) + i + 1, times.size)
    low, median, high = np.quantile(times[1:], (0.25, 0.5, 0.75), axis=0)
    if not (median > 0).all():
        raise InvalidInputError("step: got a step that takes no time, want a step that waits for its device")
    lengths, image_sizes = (np.array(column, np.int64) for column in zip(*documents, strict=True))
    terms = np.array([_terms(*document) for document in documents])
    fit = fit_terms(terms, median)
    if not fit[0]:
        raise InvalidInputError("step: got times that do not grow with tokens, want larger sizes or more repeats")
    residual = float(np.abs(terms @ fit / median - 1).max())
    *coefficients, overhead = fit.tolist()
    return Calibration(Cost(*coefficients), overhead, residual, lengths, image_sizes, median, (high - low) / median)


def _terms(tokens: int, patches: int) -> list[float]:
    """Return the terms of the cost of a document, followed by 1 for the overhead of a step."""
    headers = Headers([tokens], [0], [patches] if patches else [], [int(patches > 0)])
    return [*sum_terms(headers).tolist(), 1.0]


@dataclass(frozen=True, eq=False)
class ModelStep:
    """Training step of a Transformers model on one document with random pixels, for ``calibrate``.

    Images are as close to square as their number of patches allows.

    Args:
        model: a model that computes a loss, on its device.
        settings: settings of the model, from `mmpos.from_hf_config`.
    """

    model: nn.Module
    settings: Model
    _batches: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, tokens: int, patches: int) -> None:
        """Compute the loss and the gradient of a document, then synchronize the device."""
        import torch

        device = next(self.model.parameters()).device
        if (tokens, patches) not in self._batches:
            arguments = self._batch(tokens, patches)
            self._batches[tokens, patches] = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
            }
        self.model(**self._batches[tokens, patches]).loss.backward()
        self.model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _batch(self, tokens: int, patches: int) -> dict[str, Any]:
        from mmpos.data.model_inputs import ModelCollator
        from mmpos.sequence import SequenceBuilder

        settings: Any = self.settings
        if not patches:
            sequence = SequenceBuilder(scheme=settings.scheme).build(["x" * tokens])
            return ModelCollator(settings)([Example("text", sequence, sequence.input_ids)])
        merged = settings.spatial_merge_size
        cells, rest = divmod(patches, merged**2)
        if rest:
            raise InvalidInputError(
                f"patches: got {patches}, want a multiple of {merged**2}, the number of patches per token"
            )
        height = max(side for side in range(1, int(cells**0.5) + 1) if cells % side == 0)
        side = merged * settings.patch_size
        images: ImageProcessor = settings.image_processor(
            mean=[0.5] * 3, std=[0.5] * 3, min_pixels=1, max_pixels=cells * side**2, max_tokens=None
        )
        pixels = np.random.default_rng(0).integers(0, 256, (height * side, cells // height * side, 3), np.uint8)
        builder = SequenceBuilder(images=images, scheme=settings.scheme, markers=settings.markers)
        framed = builder.build([pixels])
        sequence = builder.build(["x" * max(tokens - len(framed.input_ids), 1), pixels])
        return ModelCollator(settings, images)([Example("image", sequence, sequence.input_ids)])
