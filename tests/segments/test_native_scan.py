"""Token ids become the segments that they were written for, by the C scan as by the Python code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from twins import Recorder, both, replaced_by

from mmpos import Grid, Placeholders, SegmentTable, Text
from mmpos.segments import Audio, Clip, CropMarkers, Thumbnail, Tile
from mmpos.segments.kinds import Segment

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
    """Documents with random parts, their grids before merging, and the segments that they should become."""

    def __init__(self, random: Random, kinds: Placeholders, merge: int, apart: bool) -> None:
        self.random, self.kinds, self.merge, self.apart = random, kinds, merge, apart
        self.timed, self.known = random.random() < 0.3, True
        self.grids: dict[int | None, list[list[int]]] = {kinds.image: [], kinds.video: []}
        self.audio: list[int] = []
        self.seconds: list[Fraction | None] = []
        self.documents: list[list[int]] = []
        self.segments: list[list[Segment]] = []
        self.padding: tuple[Any, Any] | None = None
        for _ in range(random.randint(1, 3)):
            self.documents.append([])
            self.segments.append([])
            for _ in range(random.randint(0, 4)):
                self.words(3)
                self.part()
            self.words(3)
            if not self.documents[-1]:
                self.text([0])

    def words(self, most: int) -> None:
        self.text([self.random.randint(0, 2) for _ in range(self.random.randint(0, most))])

    def text(self, ids: list[int]) -> None:
        """Append text, which continues the text before it."""
        if not ids:
            return
        parts, length = self.segments[-1], len(ids)
        if parts and isinstance(parts[-1], Text):
            length += parts[-1].length
            parts.pop()
        self.add(Text(length), ids)

    def add(self, segment: Segment, ids: list[int]) -> None:
        self.documents[-1] += ids
        self.segments[-1].append(segment)

    def part(self) -> None:
        random, kinds = self.random, self.kinds
        token = random.choice([kinds.image, kinds.video, kinds.audio])
        if token is None:
            self.words(4)
            return
        if kinds.audio is not None and self.segments[-1] and not isinstance(self.segments[-1][-1], Text):
            self.known = False  # audio forms one run with audio or a video right before it
        if token == kinds.audio:
            self.audio.append(random.randint(1, 5))
            self.add(Audio(self.audio[-1]), [token] * self.audio[-1])
        elif kinds.crops is not None:
            self.picture(token, kinds.crops)
        else:
            self.grid(token)

    def grid(self, token: int) -> None:
        random, kinds = self.random, self.kinds
        frames, height, width = (random.randint(1, 3) for _ in range(3))
        video, seconds = token == kinds.video, None
        self.grids[token].append([frames, self.merge * height, self.merge * width])
        if video:
            seconds = random.choice([None, Fraction(1, 2), Fraction(2)]) if self.timed else None
            self.seconds.append(seconds)
        apart = video and self.apart
        grid = Grid(height, width, frames=frames, row_separator=kinds.rows is not None, seconds_per_frame=seconds)
        if kinds.framed:
            self.known &= frames == 1 or not apart
            around = random.choice([[], [token]])
            self.text([0, *around])
            self.add(grid, [token] * (frames * height * (width + 1)))
            self.text([*around, 0])
            return
        if kinds.audio is not None and video and random.random() < 0.5:
            self.known &= kinds.rows is None and not apart
            self.audio.append(random.randint(1, 5))
            ids = [token] * (frames * height * width) + [kinds.audio] * self.audio[-1]
            random.shuffle(ids)
            clip = Clip(height, width, frames=frames, audio=self.audio[-1], seconds_per_frame=seconds)
            self.add(clip, [1, 2, *ids, 1, 2])
            return
        row = [token] * width + ([kinds.rows[0]] if kinds.rows else [])
        for _ in range(frames if apart else 1):
            ids = row * (height if apart else frames * height)
            ids[-1] = kinds.rows[1] if kinds.rows else token
            self.add(replace(grid, frames=1) if apart else grid, ids)
            self.words(2 if apart else 0)

    def picture(self, token: int, crops: CropMarkers) -> None:
        for i in range(self.random.randint(1, 4)):
            height, width, after = *(self.random.randint(1, 3) for _ in range(2)), self.random.randint(0, 1)
            self.grids[token].append([1, self.merge * height, self.merge * width])
            self.seconds += [None] * (token == self.kinds.video)
            begin, end = (crops.tile_start, crops.tile_end) if i else (crops.thumbnail_start, crops.thumbnail_end)
            segment = (Tile if i else Thumbnail)(height, width, tokens_after=after)
            self.add(segment, [begin, *[token] * (height * width), end, *[crops.newline] * after])

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
        if self.timed and self.kinds.video is not None:
            arguments["seconds_per_frame"] = self.seconds
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
        gaps = np.array([width - len(document) for document in self.documents])
        before = np.array([self.random.choice([0, gap, gap // 2]) for gap in gaps.tolist()])
        self.padding = before, gaps - before
        for row, (document, left) in enumerate(zip(self.documents, before, strict=True)):
            ids[row, left : left + len(document)], mask[row, left : left + len(document)] = document, 1
        mask = mask.astype(self.random.choice([dtype, dtype, np.bool_, np.uint8, np.int8, np.uint64, ">i4"]))
        arguments["input_ids"], arguments["attention_mask"] = ids, mask

    def table(self) -> SegmentTable:
        """Build the table of all documents, with their padding."""
        table = SegmentTable.from_documents(self.segments)
        return table if self.padding is None else table._with_padding(*self.padding)


def damage(random: Random, arguments: dict[str, Any]) -> None:
    """Change one number in one array."""
    name = random.choice([name for name, value in arguments.items() if isinstance(value, np.ndarray) and value.size])
    array = arguments[name] = arguments[name].copy()
    array.flat[random.randrange(array.size)] = random.choice([0, 1, 2, 3, 4, 6, 7, *range(8, 13)])


@pytest.mark.parametrize("name", KINDS)
def test_documents_become_their_segments_in_c_as_in_python(name: str) -> None:
    random, scans, valid, known = Random(name), 0, 0, 0
    forms: list[Callable[[Any], Any]] = [np.asarray, np.atleast_2d, np.ndarray.tolist, torch.from_numpy]
    for _ in range(300):
        batch = Batch(random, KINDS[name], random.choice([1, 2]), random.random() < 0.3)
        arguments, damages = batch.arguments(), random.choice([0, 0, 1, 2])
        for _ in range(damages):
            damage(random, arguments)
        arguments["input_ids"] = random.choice(forms)(arguments["input_ids"])
        result = both(partial(SegmentTable.from_input_ids, **arguments))
        if isinstance(result, SegmentTable):
            valid += 1
            with replaced_by(Recorder()) as recorder:
                SegmentTable.from_input_ids(**arguments)
            scans += "scan" in recorder.named(answered=True)
        if batch.known and not damages:
            assert result == batch.table(), arguments
            known += 1
    assert name == "audio and rows" or scans >= valid * 0.6, (scans, valid)
    assert known >= 20
