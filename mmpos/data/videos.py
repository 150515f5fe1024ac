"""Videos: the ``media`` of a chat format whose records refer to video files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mmpos.data.examples import Record, RecordError
from mmpos.data.formats.fields import describe
from mmpos.data.formats.images import Images
from mmpos.errors import InvalidInputError
from mmpos.sequence.video import QWEN3_VL, Timestamp, Video
from mmpos.sequence.video_file import require_av
from mmpos.support.checks import finite, integer

__all__ = ["Videos"]

_SOURCES = ("video", "video_url", "path", "url")
_SAMPLING = ("fps", "num_frames", "max_frames")


@dataclass(frozen=True)
class Videos:
    """Picklable callable that decodes the video files of records: ``Chat(media=Videos(Images(base=…), fps=2))``.

    A part refers to its file as ``video``, ``video_url``, ``path`` or ``url``, and may have its own fps or num_frames,
    and max_frames.

    Args:
        files: sources of the files, as for images.
        fps: as in ``Video.from_file``, like num_frames, max_frames and timestamp.
        num_frames: see fps.
        max_frames: see fps.
        timestamp: see fps.

    Raises:
        InvalidInputError: an argument is invalid.
        ImportError: PyAV is not installed.
    """

    files: Images = field(default_factory=Images)
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    timestamp: Timestamp = QWEN3_VL

    def __post_init__(self) -> None:
        require_av()  # else every record would be at fault
        if not isinstance(self.files, Images):
            raise InvalidInputError(f"files: got {type(self.files).__name__}, want Images")
        if (self.fps is None) == (self.num_frames is None):
            got = "neither fps nor num_frames" if self.fps is None else "fps and num_frames"
            raise InvalidInputError(f"fps: got {got}, want one of them")
        if self.fps is not None:
            finite("fps", self.fps, above=0)
        for name in ("num_frames", "max_frames"):
            if (value := getattr(self, name)) is not None:
                integer(name, value, minimum=1)

    def __call__(self, part: Record) -> Video:
        """Decode the video of a part.

        Raises:
            RecordError: the part is not a video, has no file or a field that is not used, or its file cannot be read.
            InvalidInputError: as in ``Video.from_file``.
        """
        fields = {name: value for name, value in part.items() if value is not None}
        if (kind := fields.pop("type", "video")) not in ("video", "video_url"):
            raise RecordError(f"type: got {describe(kind)}, want a video; Videos reads no audio")
        own = {name: fields.pop(name) for name in _SAMPLING if name in fields}
        if len(fields) != 1 or not fields.keys() <= set(_SOURCES):
            raise RecordError(f"video: got {', '.join(fields) or 'nothing'}, want one of {', '.join(_SOURCES)}")
        (name, reference), *_ = fields.items()
        if name == "video_url" and isinstance(reference, dict):
            reference = reference.get("url")
        file = self.files.resolve(name, reference)
        if not isinstance(file, bytes | Path):
            raise RecordError(f"{name}: got {describe(file)}, want the path or the bytes of a video file")
        either = own if "fps" in own or "num_frames" in own else {"fps": self.fps, "num_frames": self.num_frames, **own}
        return Video.from_file(file, timestamp=self.timestamp, **{"max_frames": self.max_frames, **either})
