"""Text, images and videos as one sequence of tokens, with its segments and patches."""

from mmpos.sequence.builder import InterleavedSequence, Markers, SequenceBuilder
from mmpos.sequence.tokenizers import ByteTokenizer
from mmpos.sequence.video import Video

__all__ = ["ByteTokenizer", "InterleavedSequence", "Markers", "SequenceBuilder", "Video"]
