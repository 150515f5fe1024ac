"""Build a sequence of tokens, with segments and patches, from text, images and videos."""

from mmpos.sequence.builder import InterleavedSequence, Markers, SequenceBuilder
from mmpos.sequence.tokenizers import ByteTokenizer
from mmpos.sequence.video import Video

__all__ = ["ByteTokenizer", "InterleavedSequence", "Markers", "SequenceBuilder", "Video"]
