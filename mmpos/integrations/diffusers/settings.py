"""TransformerSettings: scheme and rotation of one transformer of diffusers, and their use; read from its config."""

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
from mmpos.rotary.hf_config import read_json
from mmpos.schemes import Scheme
from mmpos.schemes.mrope import checked_rate
from mmpos.segments.kinds import Grid
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted, integer

__all__ = ["TransformerSettings", "from_diffusers"]


@dataclass(frozen=True)
class TransformerSettings:
    """Settings of the positions of a transformer; ``from_diffusers`` reads them from its config.

    Args:
        class_name: of the transformer.
        scheme: where its text and images lie; the first grid of a document is generated, the others are its references.
        rotary: rotation of q and k. Its head_dim is that of a head, or a third of a head where each axis turns its own
            third (Allegro).
        patch_size: frames, rows and columns of latents in a token, whether the transformer cuts them or its pipeline.
        second_rotary: rotation of the second channel of every pair, where it has other angles than the first, which
            rotary then describes alone (ERNIE-Image); else None.
        text_rotary: rotation of the text in blocks of its own, by one id per token from 0 (Kandinsky); else None.
        limits: (axes,) lowest and highest id that the transformer's own tables have; None where they have no end.
        vae_scale: frames, rows and columns of pixels in a latent, where the config says it; else None.
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

    def grid(self, height: int, width: int, *, frames: int = 1, fps: float | Fraction | None = None) -> Grid:
        """Make the grid of tokens of an image or a video from the size of its latents.

        Args:
            height: rows of latents.
            width: columns of latents.
            frames: frames of latents.
            fps: frames a second of the video, an integer or a Fraction, for schemes that place frames in time; None
                is what these take then.

        Raises:
            InvalidInputError: a size that is no multiple of the patch, or an fps that is not exact.
        """
        sizes = []
        named = (("frames", frames), ("height", height), ("width", width))
        for (name, size), side in zip(named, self.patch_size, strict=True):
            size = integer(name, size, minimum=1)
            if size % side:
                raise InvalidInputError(
                    f"{name}: got {size}, want a multiple of {side}, the patch of {self.class_name}"
                )
            sizes.append(size // side)
        whole = isinstance(fps, float) and fps.is_integer()
        seconds = None if fps is None else 1 / Fraction(checked_rate("fps", int(fps) if whole else fps))
        return Grid(sizes[1], sizes[2], frames=sizes[0], seconds_per_frame=seconds)

    def place(self, documents: SegmentTable | Sequence[Sequence[Any]]) -> PositionTable:
        """Place documents, each a text and its images, and check that the transformer has their ids.

        Args:
            documents: a SegmentTable, or what ``SegmentTable.from_documents`` takes.

        Raises:
            UnsupportedError: as by ``place``: frames for a transformer of images, text where it has no ids.
            LimitExceededError: ids that the transformer's own tables lack.
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
            want = f"{lowest} to {highest}, which the tables of {self.class_name} have"
            raise LimitExceededError(f"documents[{d}]: got {got}, want {want}")


def from_diffusers(config: object) -> TransformerSettings:
    """Read the scheme and the rotation of a transformer of diffusers from its config.

    Args:
        config: the mapping of its config.json, the path of that file or its folder, or the transformer itself (or any
            object with a ``config`` and the name of its class).

    Raises:
        UnsupportedError: a class that is not known, or whose positions no scheme holds; the message says why.
        InvalidInputError: a field that is missing or contradicts another, or a file that cannot be read.
    """
    values = _values(config)
    name = values.get("_class_name")
    if not isinstance(name, str):
        raise InvalidInputError(f"config._class_name: got {name!r}, want the name of a class of transformers")
    if name in REFUSED:
        raise UnsupportedError(f"config._class_name: got {name!r}, want another: {REFUSED[name]}")
    if name not in TRANSFORMERS:
        raise UnsupportedError(f"config._class_name: got {name!r}, want one of {', '.join(sorted(TRANSFORMERS))}")
    return TransformerSettings(name, **TRANSFORMERS[name](TransformerConfig(values)))


def _values(config: object) -> Mapping[str, Any]:
    if isinstance(config, str | PurePath):
        path = Path(config)
        if not path.exists():
            want = "that of a config.json or of its folder; nothing is downloaded: for a model on the Hub, download its"
            raise InvalidInputError(
                f"config: got the path {str(config)!r}, which does not exist, want {want} config.json"
            )
        return read_json(path / "config.json" if path.is_dir() else path)
    if isinstance(config, Mapping):
        return config
    inside = getattr(config, "config", None)
    if not isinstance(inside, Mapping):
        got = type(config).__name__
        want = "the path of a config.json or of its folder, a mapping or a transformer of diffusers"
        raise InvalidInputError(f"config: got {got}, want {want}")
    return {"_class_name": type(config).__name__, **inside}
