"""Diagnosis of position ids: the first difference between a pipeline and a scheme, and the mistake that explains it."""

from mmpos.analysis.diagnosis.diagnosis import Diagnosis, diagnose
from mmpos.analysis.diagnosis.two_sides import Positions, same_positions

__all__ = ["Diagnosis", "Positions", "diagnose", "same_positions"]
