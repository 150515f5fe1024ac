"""Frames of a video file: decoded by PyAV, turned upright, with their real times."""

from __future__ import annotations

import io
import os
from contextlib import ExitStack
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted, finite, integer, naming
from mmpos.support.extras import needed_for

__all__ = ["read_frames", "require_av"]

_FORMATS = "avi,flv,gif,matroska,mov,mpeg,mpegts,ogg"
"""Containers that are read. Playlists, which may name other files, are not among them."""

Frame = npt.NDArray[np.uint8]


def require_av() -> Any:
    """Import PyAV, or raise an ImportError that contains the pip command."""
    with needed_for("video files", extra="video"):
        import av
    return av


def read_frames(
    file: object, fps: float | None, num_frames: int | None, max_frames: int | None
) -> tuple[list[Frame], list[Fraction]]:
    """Decode frames, (height, width, 3) RGB, and their times after the first; see ``Video.from_file``."""
    if (fps is None) == (num_frames is None):
        raise InvalidInputError(f"Video: want either fps or num_frames, got {'neither' if fps is None else 'both'}")
    if not isinstance(file, str | os.PathLike | bytes):
        raise InvalidInputError(f"Video.file: got {type(file).__name__}, want a path or bytes")
    for name, value in (("num_frames", num_frames), ("max_frames", max_frames)):
        if value is not None:
            integer(name, value, minimum=1)
    if fps is not None:
        finite("fps", fps, above=0)
    av, frames = require_av(), list[Frame]()
    with naming("Video.file" if isinstance(file, bytes) else f"Video.file {os.fspath(file)!r}"), ExitStack() as stack:
        # Opened here, since ffmpeg would take a path for the URL of any of its protocols.
        try:
            data = io.BytesIO(file) if isinstance(file, bytes) else stack.enter_context(open(file, "rb"))
        except (OSError, ValueError) as error:  # the latter from a null byte
            raise InvalidInputError(f"got {getattr(error, 'strerror', None) or error}, want a file to read") from error
        try:
            container = av.open(data, container_options={"format_whitelist": _FORMATS}, io_open=_refuse)
            stack.enter_context(container)
            cover = av.stream.Disposition.attached_pic  # the picture of a song is a stream of one frame
            stream = next((video for video in container.streams.video if not video.disposition & cover), None)
            if stream is None:
                kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "none"
                raise InvalidInputError(f"got no stream of video (streams: {kinds}), want one")
            times = _times(container, stream)
            chosen = _indices(len(times), stream.average_rate, fps, num_frames, max_frames)
            wanted = set(chosen)
            container.seek(0)
            for i, frame in enumerate(container.decode(stream)):
                if i in wanted:
                    frames.append(_upright(frame))
                if i == chosen[-1]:
                    break
        except av.error.FFmpegError as error:
            raise _damaged(str(error.strerror)) from error
        if len(frames) < len(chosen):
            raise _damaged(f"{len(frames)} of the {counted(len(chosen), 'chosen frame')}")
    return frames, [times[i] - times[0] for i in chosen]


def _times(container: Any, stream: Any) -> list[Fraction]:
    """Return the time of each frame that is shown, in order, without decoding any.

    Raises:
        InvalidInputError: there are none, or the file ends before the frames that its header announces.
    """
    packets, end, times = 0, Fraction(0), list[Fraction | None]()
    for packet in container.demux():
        unit = packet.time_base or Fraction(1)
        end = max(end, unit * ((packet.pts or 0) + (packet.duration or 0)))
        if packet.stream is stream and (packet.size or packet.dts is not None):  # an empty packet repeats a frame
            if packet.is_corrupt:
                raise _damaged(f"a damaged packet after {counted(packets, 'frame')}")
            packets += 1
            if packet.size and not packet.is_discard:
                times.append(None if packet.pts is None else unit * packet.pts)
    announced = Fraction(container.duration or 0, 10**6)
    read = end - Fraction(container.start_time or 0, 10**6)
    if packets < stream.frames or (times and announced - read > 2 * announced / packets):
        want = f"{stream.frames} frames" if stream.frames else f"{float(announced):.3f} seconds"
        raise _damaged(f"{counted(packets, 'frame')} up to {float(read):.3f} seconds", f"{want} as in its header")
    if not times:
        raise _damaged("no frames", "at least one")
    known = [time for time in times if time is not None]  # formats without times have a constant rate
    return sorted(known) if len(known) == len(times) else [i / _rate(stream.average_rate) for i in range(len(times))]


def _indices(
    total: int, rate: Fraction | None, fps: float | None, num_frames: int | None, most: int | None
) -> list[int]:
    """Choose frames as the samplers of Transformers do.

    Source: default_sample_indices_fn in video_utils.py of Transformers 5.24.
    """
    if fps is not None:
        count = max(1, int(total / float(_rate(rate)) * fps))
    else:
        assert num_frames is not None  # read_frames refuses neither
        count = num_frames
    if most is not None:
        count = min(count, most)
    if count > total:
        want = f"at least {count}; use a lower fps or num_frames"
        raise InvalidInputError(f"got {counted(total, 'frame')}, want {want}")
    return [i * total // count for i in range(count)]


def _rate(rate: Fraction | None) -> Fraction:
    if not rate:
        raise InvalidInputError("got no frame rate, want num_frames instead of fps")
    return rate


def _upright(frame: Any) -> Frame:
    """Convert a frame to RGB and apply the matrix with which players turn and mirror it."""
    pixels, matrix = frame.to_ndarray(format="rgb24"), frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        right_x, right_y, _, down_x, down_y = np.frombuffer(bytes(matrix)[:20], np.int32).tolist()
        turned = abs(right_y) > abs(right_x)
        if (right_x or down_y) if turned else (right_y or down_x):
            raise InvalidInputError(f"got frames turned by {frame.rotation}°, want a multiple of 90°")
        if turned:
            pixels, right_x, down_y = pixels.swapaxes(0, 1), down_x, right_y
        pixels = pixels[:: -1 if down_y < 0 else 1, :: -1 if right_x < 0 else 1]
    return np.ascontiguousarray(pixels)


def _damaged(got: str, want: str = "a whole video file") -> InvalidInputError:
    return InvalidInputError(f"got {got}, want {want}")


def _refuse(url: str, flags: int, options: object) -> NoReturn:
    raise OSError(f"a video file may not refer to {url!r}")
