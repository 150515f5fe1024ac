"""Frames of a video file: decoded by PyAV, turned upright, with their real times."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted, finite, integer
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

__all__ = ["read_frames", "require_av"]

_FORMATS = "avi,flv,gif,matroska,mov,mpeg,mpegts,ogg"
"""Containers that are read. Playlists, which may name other files, are not among them."""

Frame = npt.NDArray[np.uint8]


def require_av() -> Any:
    """Import PyAV.

    Raises:
        ImportError: PyAV is not installed; the message contains the pip command.
    """
    with needed_for("video files", extra="video"):
        import av
    return av


def read_frames(
    file: str | os.PathLike[str] | bytes, fps: float | None, num_frames: int | None, max_frames: int | None
) -> tuple[list[Frame], list[Fraction]]:
    """Decode some frames of a file.

    Args:
        file: as in ``Video.from_file``, like the other arguments.
        fps: frames per second.
        num_frames: number of frames.
        max_frames: largest number of frames.

    Returns:
        (height, width, 3) RGB of each frame, and its time in seconds after the first frame of the file.

    Raises:
        InvalidInputError: as in ``Video.from_file``.
    """
    if (fps is None) == (num_frames is None):
        got = "neither" if fps is None else "both"
        raise InvalidInputError(f"Video: want either fps or num_frames, got {got}")
    with _opened(file) as (container, stream):
        stamps = _stamps(container, stream)
        chosen = _indices(len(stamps), stream.average_rate, fps, num_frames, max_frames)
        wanted, frames = set(chosen), []
        container.seek(0)
        for i, frame in enumerate(container.decode(stream)):
            if i in wanted:
                frames.append(_upright(frame))
            if i == chosen[-1]:
                break
        if len(frames) < len(chosen):
            raise _damaged(f"{len(frames)} of the {counted(len(chosen), 'chosen frame')}")
        return frames, [stamps[i] - stamps[0] for i in chosen]


@contextmanager
def _opened(file: object) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its video stream; convert the errors of PyAV."""
    av = require_av()
    if not isinstance(file, str | os.PathLike | bytes):
        raise InvalidInputError(f"Video.file: got {type(file).__name__}, want a path or bytes")
    with ExitStack() as stack:
        # Opened here, since ffmpeg would take a path for the URL of any of its protocols.
        data = io.BytesIO(file) if isinstance(file, bytes) else stack.enter_context(open(file, "rb"))
        try:
            options = {"format_whitelist": _FORMATS}
            container = stack.enter_context(av.open(data, container_options=options, io_open=_refuse))
            cover = av.stream.Disposition.attached_pic  # the picture of a song is a stream of one frame
            videos = [stream for stream in container.streams.video if not stream.disposition & cover]
            if not videos:
                kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "none"
                raise InvalidInputError(f"Video.file: got no stream of video (streams: {kinds}), want one")
            yield container, videos[0]
        except av.error.FFmpegError as error:
            raise _damaged(str(error.strerror)) from error


def _stamps(container: InputContainer, stream: VideoStream) -> list[Fraction]:
    """Return the time of each frame that is shown, in order, without decoding any.

    Raises:
        InvalidInputError: there are none, or the file ends before the frames that its header announces.
    """
    packets, end, stamps = 0, Fraction(0), list[Fraction | None]()
    for packet in container.demux():
        unit = packet.time_base or Fraction(1)
        end = max(end, unit * ((packet.pts or 0) + (packet.duration or 0)))
        if packet.stream is stream and packet.size:
            if packet.is_corrupt:
                raise _damaged(f"a damaged packet after {counted(packets, 'frame')}")
            packets += 1
            if not packet.is_discard:
                stamps.append(None if packet.pts is None else unit * packet.pts)
    read, announced = end - _seconds(container.start_time), _seconds(container.duration)
    if packets < stream.frames or (stamps and announced - read > 2 * announced / packets):
        got = f"{counted(packets, 'frame')} up to {float(read):.3f} seconds"
        want = f"{stream.frames} frames" if stream.frames else f"{float(announced):.3f} seconds"
        raise _damaged(got, f"{want} as in its header")
    if not stamps:
        raise _damaged("no frames", "at least one")
    times = [stamp for stamp in stamps if stamp is not None]
    if len(times) < len(stamps):  # formats without times have a constant rate
        return [i / _rate(stream.average_rate) for i in range(len(stamps))]
    return sorted(times)


def _indices(
    total: int, rate: Fraction | None, fps: float | None, num_frames: int | None, most: int | None
) -> list[int]:
    """Choose frames as the samplers of Transformers do.

    Source: default_sample_indices_fn in video_utils.py of Transformers 5.24.
    """
    if fps is None:
        count = integer("num_frames", num_frames, minimum=1)
    else:
        count = max(1, int(total / float(_rate(rate)) * finite("fps", fps, above=0)))
    if most is not None:
        count = min(count, integer("max_frames", most, minimum=1))
    if count > total:
        raise InvalidInputError(
            f"Video.file: got {counted(total, 'frame')}, want at least {count}; use a lower fps or num_frames"
        )
    return [i * total // count for i in range(count)]


def _rate(rate: Fraction | None) -> Fraction:
    if not rate:
        raise InvalidInputError("Video.file: got no frame rate, want num_frames instead of fps")
    return rate


def _seconds(time: int | None) -> Fraction:
    """Convert a time of a container, in microseconds."""
    return Fraction(time or 0, 1_000_000)


def _upright(frame: VideoFrame) -> Frame:
    """Convert a frame to RGB and apply the matrix with which players turn and mirror it."""
    pixels = frame.to_ndarray(format="rgb24")
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        right_x, right_y, _, down_x, down_y = np.frombuffer(bytes(matrix)[:20], np.int32).tolist()
        turned = abs(right_y) > abs(right_x)
        if (right_x or down_y) if turned else (right_y or down_x):
            raise InvalidInputError(f"Video.file: got frames turned by {frame.rotation}°, want a multiple of 90°")
        if turned:
            pixels, right_x, down_y = pixels.swapaxes(0, 1), down_x, right_y
        pixels = pixels[:: -1 if down_y < 0 else 1, :: -1 if right_x < 0 else 1]
    return np.ascontiguousarray(pixels)


def _damaged(got: str, want: str = "a whole video file") -> InvalidInputError:
    return InvalidInputError(f"Video.file: got {got}, want {want}")


def _refuse(url: str, flags: int, options: object) -> NoReturn:
    raise OSError(f"a video file may not refer to {url!r}")
