"""The C scan of token ids builds the same tables as the Python code, which raises the errors."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from oracle import fields

from mmpos import MmposError, Placeholders, SegmentTable
from mmpos.segments import CropMarkers
from mmpos.segments import table as tables
from mmpos.support import native

IMAGE, VIDEO, AUDIO, ROW, LAST = 8, 9, 10, 11, 12
MARKERS = CropMarkers(3, 4, 5, 6, 7)
KINDS = {
    "patches": Placeholders(IMAGE, VIDEO),
    "images": Placeholders(IMAGE),
    "none": Placeholders(),
    "negative": Placeholders(-1, -(2**31)),
    "rows": Placeholders(IMAGE, VIDEO, rows=(ROW, LAST)),
    "framed": Placeholders(IMAGE, rows=(IMAGE, IMAGE)),
    "framed by one of two": Placeholders(IMAGE, VIDEO, rows=(VIDEO, VIDEO)),
    "audio": Placeholders(IMAGE, VIDEO, AUDIO),
    "audio alone": Placeholders(None, None, AUDIO),
    "audio and rows": Placeholders(IMAGE, VIDEO, AUDIO, rows=(ROW, LAST)),
    "crops": Placeholders(IMAGE, VIDEO, crops=MARKERS),
    "crops with equal markers": Placeholders(IMAGE, crops=CropMarkers(3, 4, 5, 4, 4)),
}


class Batch:
    """Documents with random parts, and their grids before merging."""

    def __init__(self, random: Random, kinds: Placeholders, merge: int, apart: bool) -> None:
        self.random, self.kinds, self.merge, self.apart = random, kinds, merge, apart
        self.grids: dict[int | None, list[list[int]]] = {kinds.image: [], kinds.video: []}
        self.audio: list[int] = []
        self.videos = 0
        self.documents = [self.document() for _ in range(random.randint(1, 3))]

    def document(self) -> list[int]:
        ids = self.text(3)
        for _ in range(self.random.randint(0, 4)):
            ids += self.part() + self.text(3)
        return ids or [0]

    def text(self, most: int) -> list[int]:
        return [self.random.randint(0, 2) for _ in range(self.random.randint(0, most))]

    def part(self) -> list[int]:
        token = self.random.choice([self.kinds.image, self.kinds.video, self.kinds.audio])
        if token is None:
            return self.text(4)
        if token == self.kinds.audio:
            self.audio.append(self.random.randint(1, 5))
            return [token] * self.audio[-1]
        if self.kinds.crops is not None:
            return self.picture(token)
        frames, height, width = (self.random.randint(1, 3) for _ in range(3))
        self.grids[token].append([frames, self.merge * height, self.merge * width])
        if self.kinds.framed:
            around = self.random.choice([[], [token]])
            return [0, *around, *[token] * (frames * height * (width + 1)), *around, 0]
        row = [token] * width + ([self.kinds.rows[0]] if self.kinds.rows else [])
        grid = row * (frames * height)
        if self.kinds.rows:
            grid[-1] = self.kinds.rows[1]
        if self.kinds.audio is not None and token == self.kinds.video and self.random.random() < 0.5:
            self.audio.append(self.random.randint(1, 5))
            grid += [self.kinds.audio] * self.audio[-1]
            self.random.shuffle(grid)
            return [1, 2, *grid, 1, 2]
        if self.apart and token == self.kinds.video:
            return [id for _ in range(frames) for id in ([token] * (height * width) + self.text(2))]
        return grid

    def picture(self, token: int) -> list[int]:
        crops = self.kinds.crops
        assert crops is not None
        ids: list[int] = []
        for i in range(self.random.randint(1, 4)):
            height, width = self.random.randint(1, 3), self.random.randint(1, 3)
            self.grids[token].append([1, self.merge * height, self.merge * width])
            begin, end = (crops.tile_start, crops.tile_end) if i else (crops.thumbnail_start, crops.thumbnail_end)
            ids += [begin, *[token] * (height * width), end, *[crops.newline] * self.random.randint(0, 1)]
        return ids

    def arguments(self) -> dict[str, Any]:
        """Draw the arguments of from_input_ids in any of their forms."""
        random, arguments = self.random, {"placeholders": self.kinds, "spatial_merge_size": self.merge}
        arguments["frames_apart"] = self.apart
        for name, token in (("image_grid_thw", self.kinds.image), ("video_grid_thw", self.kinds.video)):
            if token is not None and (self.grids[token] or random.random() < 0.3):
                dtype = random.choice([np.int64, np.int64, np.int32])
                arguments[name] = np.array(self.grids[token], dtype).reshape(-1, 3)
        if self.kinds.audio is not None and random.random() < 0.5:
            arguments["audio_lengths"] = self.audio
        if self.kinds.video is not None and random.random() < 0.3:
            arguments["seconds_per_frame"] = [random.choice([None, 0.5, 2]) for _ in self.grids[self.kinds.video]]
        dtype = random.choice([np.int64, np.int64, np.int32])
        if random.random() < 0.5:
            arguments["input_ids"] = np.array([token for ids in self.documents for token in ids], dtype)
            arguments["cu_seqlens"] = np.cumsum([0, *map(len, self.documents)])
        else:
            self.pad(arguments, dtype)
        return arguments

    def pad(self, arguments: dict[str, Any], dtype: Any) -> None:
        width = max(map(len, self.documents)) + self.random.randint(0, 2)
        filler = self.random.choice([0, IMAGE, AUDIO])
        ids, mask = np.full((len(self.documents), width), filler, dtype), np.zeros((len(self.documents), width), dtype)
        for row, document in enumerate(self.documents):
            left = self.random.choice([0, width - len(document)])
            ids[row, left : left + len(document)], mask[row, left : left + len(document)] = document, 1
        arguments["input_ids"], arguments["attention_mask"] = (
            ids,
            mask.astype(self.random.choice([dtype, np.bool_, np.uint8])),
        )


def damage(random: Random, arguments: dict[str, Any]) -> None:
    """Change one number in one array."""
    name = random.choice([name for name, value in arguments.items() if isinstance(value, np.ndarray) and value.size])
    array = arguments[name] = arguments[name].copy()
    array.flat[random.randrange(array.size)] = random.choice([0, 1, 2, 3, 4, 6, 7, *range(8, 13)])


def outcome(arguments: dict[str, Any]) -> Any:
    try:
        return fields(SegmentTable.from_input_ids(**arguments))
    except MmposError as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", KINDS)
def test_the_scan_gives_the_same_result_as_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random, scans = Random(name), 0
    scan: Callable[..., Any] = tables.scan

    def counting(*arguments: Any, **more: Any) -> Any:
        nonlocal scans
        result = scan(*arguments, **more)
        scans += result is not None
        return result

    monkeypatch.setattr(tables, "scan", counting)
    core, valid = native.core, 0
    for _ in range(300):
        arguments = Batch(random, KINDS[name], random.choice([1, 2]), random.random() < 0.3).arguments()
        for _ in range(random.choice([0, 0, 1, 2])):
            damage(random, arguments)
        got, before = outcome(arguments), scans
        monkeypatch.setattr(native, "core", None)
        want = outcome(arguments)
        monkeypatch.setattr(native, "core", core)
        assert got == want, arguments
        assert scans == before
        valid += isinstance(want, dict)
    assert scans >= valid * 0.9 - 300 * (name == "audio and rows"), (scans, valid)


def test_the_scan_of_arbitrary_numbers_never_reads_out_of_bounds() -> None:
    """Every result is either a valid table or None."""
    random, absent, tables_built = Random("numbers"), -(2**63), 0
    wide = [0, 1, 2, 3, 4, -1, 7, 100, 2**31 - 1, 2**31, 2**62, -(2**63), 2**63 - 1]

    def numbers(*shape: int, dtype: Any = np.int64, most: int = 4) -> Any:
        array = np.array([random.randint(0, most) for _ in range(int(np.prod(shape)))], np.int64).reshape(shape)
        if array.size and random.random() < 0.2:
            array.flat[random.randrange(array.size)] = random.choice(wide)
        return array.astype(dtype)

    for _ in range(4000):
        batch, seq = random.randint(0, 3), random.randint(0, 70)
        dtype = random.choice([np.int64, np.int32, np.uint8])
        shape = random.choice([(batch, seq), (batch * seq,)])
        cu = random.choice([None, np.sort(numbers(batch + 1, most=max(seq * batch, 1)))])
        kept = random.choice([[0, 1, 2], [0, 1], [0, 5, 6, 7, 8, 9], [0, 3, 4], [0, 1, 2, 3, 4]])
        tokens = tuple(random.randint(0, 4) if i in kept else absent for i in range(10))
        options = (*(random.randint(0, 2) for _ in range(2)), random.random() < 0.5, random.random() < 0.9, False)
        answer = native.core.scan(
            numbers(*shape, dtype=dtype),
            cu,
            random.choice([None, numbers(*shape, dtype=dtype, most=1)]),
            tokens,
            tuple(map(int, options)),
            random.choice([None, numbers(random.randint(0, 9), 3, most=3)]),
            random.choice([None, numbers(random.randint(0, 9), 3, most=3)]),
            random.choice([None, None, numbers(random.randint(0, 3))]),
        )
        if answer is not None:
            tables_built += 1
            kind, extents, offsets, separator, extra, _ = answer
            arrays = np.frombuffer(kind, np.uint8), native.int64(extents).reshape(3, -1), native.int64(offsets)
            marks = None if separator is None else np.frombuffer(separator, np.bool_)
            SegmentTable(*arrays, None, marks, None if extra is None else native.int64(extra))
    assert tables_built > 20
