"""TransformerSettings: the scheme and the rotation of a diffusers transformer, read from its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.integrations.diffusers.classes import REFUSED, TRANSFORMERS
from mmpos.integrations.diffusers.config import TransformerConfig
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_SEGMENT, id_bounds
from mmpos.rotary.config import Rotary
from mmpos.schemes import Scheme
from mmpos.schemes.mrope import checked_rate
from mmpos.segments.kinds import Grid
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted, integer
from mmpos.support.files import read_json

__all__ = ["TransformerSettings", "from_diffusers"]


@dataclass(frozen=True)
class TransformerSettings:
    """Position settings of a transformer; ``from_diffusers`` reads them from its config.

    Args:
        class_name: class of the transformer.
        scheme: scheme for text and images; the first grid of a document is the image to generate, the others are
            references.
        rotary: rotation of q and k. Its head_dim is the size of a head, or of a third of a head if each axis rotates a
            separate third (Allegro).
        patch_size: frames, rows and columns of latents per token, regardless of whether the transformer or the pipeline
            cuts the patches.
        second_rotary: rotation of the second channel of every pair if its angles differ from the first channel's
            (ERNIE-Image), else None. If it is set, rotary describes only the first channels.
        text_rotary: rotation of text in separate blocks by one id per token, counted from 0 (Kandinsky), or None.
        limits: (axes,) lowest and highest id in the transformer's own tables; None if they are unlimited.
        vae_scale: frames, rows and columns of pixels per latent; None if the config does not define them.
    """

    class_name: str
    scheme: Scheme
    rotary: Rotary
    patch_size: tuple[int, int, int] = (1, 1, 1)
    second_rotary: Rotary | None = None
    text_rotary: Rotary | None = None
    limits: tuple[tuple[int, int], ...] | None = None
    vae_scale: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.rotary.axes != self.scheme.axes:
            got, want = counted(self.rotary.axes, "axis"), self.scheme.axes
            raise InvalidInputError(f"rotary: got {got}, want {want} for scheme {self.scheme.name!r}")

    def grid(
        self,
        height: int,
        width: int,
        *,
        frames: int = 1,
        fps: float | Fraction | None = None,
        first_frame: int | None = None,
    ) -> Grid:
        """Return the token grid of an image or a video whose size is given in latents.

        Args:
            height: rows of latents.
            width: columns of latents.
            frames: frames of latents.
            fps: frames per second of the video, an integer or a Fraction; ``place`` raises an error for frames without
                it if the scheme counts seconds.
            first_frame: see ``Grid``.

        Raises:
            InvalidInputError: a size is not a multiple of the patch, or fps is not exact.
        """
        sizes = []
        extents = (("frames", frames), ("height", height), ("width", width))
        for (name, size), side in zip(extents, self.patch_size, strict=True):
            size = integer(name, size, minimum=1)
            if size % side:
                raise InvalidInputError(
                    f"{name}: got {size}, want a multiple of {side}, the patch of {self.class_name}"
                )
            sizes.append(size // side)
        whole = isinstance(fps, float) and fps.is_integer()
        seconds = None if fps is None else 1 / Fraction(checked_rate("fps", int(fps) if whole else fps))
        return Grid(sizes[1], sizes[2], frames=sizes[0], seconds_per_frame=seconds, first_frame=first_frame)

    def place(self, documents: SegmentTable | Sequence[Sequence[Any]]) -> PositionTable:
        """Compute positions for documents, each a text with its images; check the ids against the transformer's tables.

        Args:
            documents: a SegmentTable, or an argument of ``SegmentTable.from_documents``.

        Raises:
            UnsupportedError: the scheme does not support a segment, for example frames in an image transformer, or text
                if text has no ids.
            LimitExceededError: an id is outside the transformer's own tables.
        """
        segments = documents if isinstance(documents, SegmentTable) else SegmentTable.from_documents(documents)
        positions = place(segments, self.scheme)
        if self.limits is not None and positions.num_segments:
            self._check_limits(positions, self.limits)
        return positions

    def _check_limits(self, positions: PositionTable, limits: tuple[tuple[int, int], ...]) -> None:
        bounds = id_bounds(positions.table, positions.segment_lengths)
        for axis, (lowest, highest) in enumerate(limits):
            low, high = bounds.lowest[axis], bounds.highest[axis]
            if low.min() >= lowest and high.max() <= highest:
                continue
            s = int(((low < lowest) | (high > highest)).argmax())
            d = int(positions.documents[FIRST_SEGMENT].searchsorted(s, side="right")) - 1
            got = f"ids from {low[s]:g} to {high[s]:g} on axis {axis}"
            want = f"{lowest} to {highest}, the tables of {self.class_name}"
            raise LimitExceededError(f"documents[{d}]: got {got}, want {want}")


def from_diffusers(config: object, pipeline: object = None) -> TransformerSettings:
    """Read the scheme and the rotation of a diffusers transformer from its config.

    Args:
        config: the contents of its config.json as a mapping, the path of that file or its folder, or the transformer
            itself (or any object with a ``config`` and the same class name).
        pipeline: class name of the pipeline, or the pipeline itself; required if pipelines of the transformer compute
            different ids, else None.

    Raises:
        UnsupportedError: the class is unknown, or no scheme computes its positions; the message gives the reason.
        InvalidInputError: a field is missing or contradicts another, a file cannot be read, or the pipeline is missing,
            unknown or not needed.
    """
    values = _values(config)
    name = values.get("_class_name")
    if not isinstance(name, str):
        raise InvalidInputError(f"config._class_name: got {name!r}, want the class name of a transformer")
    if name in REFUSED:
        raise UnsupportedError(f"config._class_name: got {name!r}, which is not supported: {REFUSED[name]}")
    if name not in TRANSFORMERS:
        raise UnsupportedError(f"config._class_name: got {name!r}, want one of {', '.join(sorted(TRANSFORMERS))}")
    settings = TRANSFORMERS[name](TransformerConfig(values))
    settings["scheme"] = _scheme(name, settings["scheme"], pipeline)
    return TransformerSettings(name, **settings)


def _scheme(name: str, schemes: Scheme | Mapping[str, Scheme | str], pipeline: object) -> Scheme:
    """Return the scheme of a transformer's pipeline."""
    got = pipeline if pipeline is None or isinstance(pipeline, str) else type(pipeline).__name__
    if isinstance(schemes, Scheme):
        if got is not None:
            raise InvalidInputError(f"pipeline: got {got!r}, want None, since the config alone gives the ids of {name}")
        return schemes
    scheme = schemes.get(str(got))
    if scheme is None:
        want = f"one of {', '.join(sorted(schemes))}, since pipelines of {name} use different ids"
        raise InvalidInputError(f"pipeline: got {got!r}, want {want}")
    if isinstance(scheme, str):
        raise UnsupportedError(f"pipeline: got {got!r}, which is not supported: {scheme}")
    return scheme


def _values(config: object) -> Mapping[str, Any]:
    if isinstance(config, str | PurePath):
        path = Path(config)
        if not path.exists():
            want = (
                "that of a config.json or of its folder; nothing is downloaded, so for a model on the Hub, download its"
            )
            raise InvalidInputError(
                f"config: got the path {str(config)!r}, which does not exist, want {want} config.json"
            )
        return read_json(path / "config.json" if path.is_dir() else path)
    if isinstance(config, Mapping):
        return config
    inside = getattr(config, "config", None)
    if not isinstance(inside, Mapping):
        got = type(config).__name__
        want = "the path of a config.json or of its folder, a mapping or a diffusers transformer"
        raise InvalidInputError(f"config: got {got}, want {want}")
    return {"_class_name": type(config).__name__, **inside}
