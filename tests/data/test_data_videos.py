"""Video files: frames are chosen as by Transformers, upright, at their real times; other files are refused."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import av
import numpy as np
import pytest
from model_configs import complete
from test_data_formats import user

from mmpos import ImageProcessor, InvalidInputError, SequenceBuilder, Video
from mmpos.data import Chat, ChatTemplate, Images, Location, Preprocess, RecordError, Videos
from mmpos.sequence import video_file

video_utils = pytest.importorskip("transformers.video_utils")

HEIGHT, WIDTH = 48, 64


def picture(i: int) -> Any:
    """Draw frame i: a white corner at the top left, on a grey that differs from that of other frames."""
    pixels = np.full((HEIGHT, WIDTH, 3), 30 + 8 * i % 160, np.uint8)
    pixels[:16, :16] = 255
    return pixels


def clip(
    frames: int = 12, *, container: str = "mp4", codec: str = "libx264", rate: Any = 8, milliseconds: Any = None,
    audio: bool = False, cover: bool = False, options: Any = None, encoder: Any = None,
) -> bytes:  # fmt: skip
    """Encode a clip, at a constant rate or with these times in milliseconds, or a song with a picture as its cover."""
    with NamedTemporaryFile() as written, av.open(written.name, "w", format=container, options=options or {}) as file:
        one_thread = {"threads": "1"} | (encoder or {})  # so that the bytes do not depend on the number of cores
        stream: Any = file.add_stream(codec, rate=rate, options=one_thread) if frames or not audio else None
        if stream:
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuvj420p" if cover else "yuv420p"
            if milliseconds:
                stream.codec_context.time_base = Fraction(1, 1000)
            if cover:
                stream.disposition = av.stream.Disposition.attached_pic
        sound: Any = file.add_stream("aac", rate=8000) if audio else None
        if sound:
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
            samples.rate = 8000
            file.mux(list(sound.encode(samples)) + list(sound.encode()))
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(i), "rgb24")
            if milliseconds:
                frame.time_base, frame.pts = Fraction(1, 1000), milliseconds[i]
            file.mux(stream.encode(frame))
        file.start_encoding()
        file.mux(stream.encode() if stream else [])
        file.close()
        return written.read()


def grey(frame: Any) -> int:
    """Return the level of the grey in the middle of a frame, about 30 + 8·i in frame i."""
    return int(frame[20:, 20:].mean())


def indices(video: Video) -> list[int]:
    return [round((grey(frame) - 30) / 8) for frame in video.frames]


# Choosing


@pytest.mark.parametrize("rate", [8, Fraction(30000, 1001), 25])
@pytest.mark.parametrize(
    "arguments",
    [{"fps": 2}, {"fps": 1.5}, {"num_frames": 5}, {"num_frames": 24}, pytest.param({"fps": 0.01}, marks=complete)],
)
def test_the_frames_are_those_of_transformers(arguments: Any, rate: Any, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip(24, rate=rate, encoder={"bf": "2"}))
    choose = partial(video_utils.default_sample_indices_fn, **arguments)
    pixels, metadata = video_utils.read_video_pyav(str(path), choose)
    for file in (path, str(path), path.read_bytes()):
        video = Video.from_file(file, **arguments)
        np.testing.assert_array_equal(np.array(video.frames), pixels)
        assert video.times == tuple(Fraction(int(i)) / rate for i in metadata.frames_indices)


def test_max_frames_spreads_the_frames_that_fps_would_choose() -> None:
    data = clip(24, rate=8)
    assert indices(Video.from_file(data, fps=8, max_frames=4)) == [0, 6, 12, 18]
    assert indices(Video.from_file(data, fps=1, max_frames=4)) == [0, 8, 16]
    assert indices(Video.from_file(data, num_frames=9, max_frames=2)) == [0, 12]


@pytest.mark.parametrize(
    ("container", "codec", "audio"),
    [("matroska", "libx264", False), ("webm", "libvpx-vp9", False), ("mpegts", "libx264", False),
     ("avi", "mpeg4", False), ("mp4", "libx264", True)],
)  # fmt: skip
def test_files_with_sound_late_starts_or_no_counts_are_read(container: str, codec: str, audio: bool) -> None:
    video = Video.from_file(clip(16, rate=8, container=container, codec=codec, audio=audio), fps=2)
    assert indices(video) == [0, 4, 8, 12]
    assert video.seconds_per_frame == Fraction(1, 2)
    assert list(map(float, video.times)) == [0, 0.5, 1, 1.5]
    assert video.timestamps[1] == "<0.5 seconds>"


def test_times_of_a_variable_rate_are_real() -> None:
    times = [0, 40, 80, 1000, 1040, 3000]
    video = Video.from_file(clip(6, milliseconds=times), num_frames=6)
    assert video.times == tuple(Fraction(time, 1000) for time in times)
    assert video.seconds_per_frame == Fraction(3, 5)
    half = Video.from_file(clip(6, milliseconds=times), num_frames=3)
    assert half.times == (Fraction(0), Fraction(2, 25), Fraction(26, 25))
    assert half.timestamps == ("<0.0 seconds>", "<0.1 seconds>", "<1.0 seconds>")


# Orientation


def with_matrix(data: bytes, *entries: int) -> bytes:
    """Write a display matrix (a, b, c, d) into the track header of an MP4 file."""
    a, b, c, d = (entry << 16 for entry in entries)
    start = data.index(b"tkhd") + 4 + 40  # type, then version, times, ids, duration, layer and volume
    matrix = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return data[:start] + matrix + data[start + 36 :]


@pytest.mark.parametrize(
    ("matrix", "turn"),  # x' = a·x + c·y, y' = b·x + d·y as (a, b, c, d)
    [
        ((1, 0, 0, 1), lambda frame: frame),
        ((0, 1, -1, 0), lambda frame: np.rot90(frame, -1)),  # clockwise
        ((-1, 0, 0, -1), lambda frame: np.rot90(frame, 2)),
        ((0, -1, 1, 0), np.rot90),
        ((-1, 0, 0, 1), np.fliplr),
        ((1, 0, 0, -1), np.flipud),
        ((0, 1, 1, 0), lambda frame: frame.swapaxes(0, 1)),
    ],
)
def test_frames_are_turned_and_mirrored_as_players_do(matrix: tuple[int, ...], turn: Any) -> None:
    stored, frame = (Video.from_file(data, fps=1).frames[0] for data in (clip(3), with_matrix(clip(3), *matrix)))
    pixels: Any = stored
    assert pixels[:12, :12].min() > 240 > pixels[20:, 20:].max()
    np.testing.assert_array_equal(frame, turn(stored))


# Refusals


def cut(share: float, **options: Any) -> bytes:
    """Return the first part of a clip of forty frames."""
    data = clip(40, **options)
    return data[: int(len(data) * share)]


MATROSKA: dict[str, Any] = {"container": "matroska"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: b"not a video", "got Invalid data found when processing input, want a whole video file"),
        (partial(cut, 0.5), "got Invalid data found when processing input, want a whole"),  # its index is at the end
        (partial(cut, 0.9, options={"movflags": "faststart"}), r"got a damaged packet after \d\d frames, want a whole"),
        (partial(cut, 0.9, **MATROSKA), r"got 3\d frames up to 4\.\d+ seconds, want 5.000 seconds as in its header"),
        (partial(cut, 0.9, audio=True, **MATROSKA), r"got \d+ frames up to .* seconds, want 5.000 seconds as in its"),
        (partial(clip, 0, audio=True), r"got no stream of video \(streams: audio\), want one"),
        (partial(clip, 1, audio=True, codec="mjpeg", rate=1, cover=True),
         r"got no stream of video \(streams: audio, video\), want one"),
        (partial(clip, 0), r"got no stream of video \(streams: none\), want one"),
        (partial(cut, 0.4, **MATROSKA), "got no frames, want at least one"),
        (partial(clip, 0, **MATROSKA), "got End of file, want a whole video file"),
        (lambda: b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nclip.ts\n#EXT-X-ENDLIST\n", "got Invalid data found"),
        (lambda: 3, "got int, want a path or bytes"),
        (lambda: with_matrix(clip(3), 1, 1, -1, 1), "got frames turned by -45°, want a multiple of 90°"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_whole_video_is_refused(data: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^Video.file: {message}"):
        Video.from_file(data(), num_frames=1)


def decode(**arguments: Any) -> Video:
    return Video.from_file(clip(12, rate=8), **arguments)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (decode, {}, "Video: want either fps or num_frames, got neither"),
        (decode, {"fps": 1, "num_frames": 2}, "Video: want either fps or num_frames, got both"),
        (decode, {"num_frames": 13}, "Video.file: got 12 frames, want at least 13; use a lower fps or num_frames"),
        (decode, {"fps": 9}, "Video.file: got 12 frames, want at least 13; use a lower fps or num_frames"),
        (Videos, {"files": "videos"}, "files: got str, want Images"),
        (Videos, {"max_frames": 2}, "fps: got neither fps nor num_frames, want one of them"),
        (Videos, {"fps": 1, "num_frames": 2}, "fps: got fps and num_frames, want one of them"),
        *((call, arguments, message) for call in (decode, Videos) for arguments, message in (
            ({"fps": -1}, "fps: got -1, want a finite number > 0"),
            ({"num_frames": 0}, "num_frames: got 0, want >= 1"),
            ({"fps": 1, "max_frames": 2.5}, "max_frames: got 2.5, want an integer"))),
    ],
)  # fmt: skip
def test_arguments_are_checked(call: Any, arguments: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        call(**arguments)


def test_a_missing_file_and_a_missing_library_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (tmp_path / "none.mp4", "https://example.com/a.mp4", "a\0b.mp4", tmp_path):  # URLs are not fetched
        want = re.escape(f"Video.file {str(file)!r}: got ")
        with pytest.raises(InvalidInputError, match=f"^{want}.+, want a file to read$"):
            Video.from_file(file, fps=1)
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ImportError, match=r'video files: av is not installed; .*pip install "multimodal-positions\['):
        video_file.require_av()


# Videos in records


BUILDER = SequenceBuilder(images=ImageProcessor("pillow", patch_size=4, min_pixels=64))


def test_videos_of_records_are_decoded_with_their_times(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip(16, rate=8))
    files = Images(base=tmp_path)
    read = Chat(ChatTemplate(), media=Videos(files, fps=2))
    want = Video.from_file(tmp_path / "a.mp4", fps=2)
    part = {"type": "video", "video": "a.mp4"}
    records: list[Any] = [
        user(part),
        user({"type": "video_url", "video_url": {"url": "a.mp4"}}),
        user({"type": "video", "path": "a.mp4", "url": None}),
        user({"type": "video", "video": (tmp_path / "a.mp4").read_bytes()}),
        user({"type": "video"}, videos=["a.mp4"]),
        user({**part, "fps": None}),
    ]
    for record in records:
        (video,) = [part for part in read(record, Location("a.jsonl", 0)).parts if isinstance(part, Video)]
        np.testing.assert_array_equal(np.array(video.frames), np.array(want.frames))
        assert (video.times, video.timestamps) == (want.times, want.timestamps)
    asked: Any = Videos(files, fps=2)({**part, "num_frames": 2})
    assert [float(time) for time in asked.times] == [0, 1]
    example = Preprocess(read, BUILDER)(records[0], Location("a.jsonl", 0))
    assert example.sequence.grid_thw.tolist() == [[1, 6, 8]] * 4
    assert bytes(example.sequence.input_ids[example.sequence.input_ids < 256].tolist()).count(b"seconds>") == 4


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "audio", "audio": "a.wav"}, "type: got 'audio', want a video; Videos reads no audio"),
        ({"type": "video", "video": "a.mp4", "video_end": 2},
         "video: got video, video_end, want one of video, video_url"),
        ({"type": "video", "base64": "AAAA"}, "video: got base64, want one of video, video_url, path, url"),
        ({"type": "video", "video": "../a.mp4"}, r"video: got the path '../a.mp4', want a path that stays inside"),
        ({"type": "video", "video": "gone"}, r"Video.file '/.*/none.mp4': got No such file"),
        ({"type": "video", "video": "broken.mp4"}, r"Video.file '/.*/broken.mp4': got Invalid data found"),
        ({"type": "video", "video": np.zeros((2, 4, 4, 3), np.uint8)},
         "video: got ndarray, want the path or the bytes"),
    ],
)  # fmt: skip
def test_videos_that_cannot_be_read_are_errors_of_their_records(part: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"broken")
    files = Images(base=tmp_path, resolver={"gone": tmp_path / "none.mp4"}.get)
    preprocess = Preprocess(Chat(ChatTemplate(), media=Videos(files, fps=2)), BUILDER)
    with pytest.raises(RecordError, match=rf"^a.jsonl\[3\]: messages\[0\]\.content\[0\]: {message}"):
        preprocess(user(part), Location("a.jsonl", 3))
    dropped = replace(preprocess, on_image_error="drop")(user(part), Location("a.jsonl", 3))
    assert len(dropped.dropped_images) == 1
    assert not len(dropped.sequence.grid_thw)
