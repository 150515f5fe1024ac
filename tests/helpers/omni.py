"""A builder for text, audio and clips whose token order and ids are short enough to write by hand."""

from __future__ import annotations

from mmpos import ByteTokenizer, Markers, SequenceBuilder
from mmpos.schemes import TMRope
from mmpos.segments import Clip

NAMES = ("<v", "v>", "[I]", "[V]", "[A]", "<a", "a>")
BEGIN, END, IMAGE, VIDEO, AUDIO, AUDIO_BEGIN, AUDIO_END = range(256, 263)
MARKERS = Markers("<v", "v>", "[I]", video="[V]", audio="[A]", audio_begin="<a", audio_end="a>")

BUILDER = SequenceBuilder(
    ByteTokenizer(NAMES), scheme=TMRope(tokens_per_second=2, seconds_per_chunk=1), markers=MARKERS
)

CLIP = Clip(1, 2, frames=2, audio=3, seconds_per_frame=1)
"""Frames at ids 0 and 2, so that each chunk of two ids begins with a frame: <v <a V V A A V V A a> v>."""
CLIP_IDS = [BEGIN, AUDIO_BEGIN, VIDEO, VIDEO, AUDIO, AUDIO, VIDEO, VIDEO, AUDIO, AUDIO_END, END]
CLIP_TYPES = [0, 0, 1, 1, 3, 3, 1, 1, 3, 0, 0]
