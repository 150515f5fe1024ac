"""Probes that recover the positions by which an engine actually rotates its keys from the keys themselves."""

from mmpos.analysis.probe.check import check
from mmpos.analysis.probe.checkpoint import write_checkpoint
from mmpos.analysis.probe.confidence import UNKNOWN, Reading, read
from mmpos.analysis.probe.identify import Identification, identify
from mmpos.analysis.probe.verdict import Meant, Verdict, judge

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
