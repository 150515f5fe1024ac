"""Probes that recover the positions by which an engine actually rotates its keys from the keys themselves."""

from mmpos_probe.check import check
from mmpos_probe.checkpoint import write_checkpoint
from mmpos_probe.confidence import UNKNOWN, Reading, read
from mmpos_probe.identify import Identification, identify
from mmpos_probe.verdict import Meant, Verdict, judge

__all__ = [
    "UNKNOWN",
    "Identification",
    "Meant",
    "Reading",
    "Verdict",
    "check",
    "identify",
    "judge",
    "read",
    "write_checkpoint",
]
