"""Read from the keys of an engine what positions it really rotates by."""

from mmpos.analysis.probe.adapters import KeyRecorder, LayerKeys, transformers
from mmpos.analysis.probe.check import check
from mmpos.analysis.probe.checkpoint import write_checkpoint
from mmpos.analysis.probe.confidence import UNKNOWN, Reading, read
from mmpos.analysis.probe.identify import Identification, identify

__all__ = [
    "UNKNOWN",
    "Identification",
    "KeyRecorder",
    "LayerKeys",
    "Reading",
    "check",
    "identify",
    "read",
    "transformers",
    "write_checkpoint",
]
