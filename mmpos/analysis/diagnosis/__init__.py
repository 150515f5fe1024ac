"""Diagnosis of position ids: where those of a pipeline first differ from a scheme, and which mistake explains it."""

from mmpos.analysis.diagnosis.diagnosis import Diagnosis, diagnose
from mmpos.analysis.diagnosis.two_sides import Positions, same_positions

__all__ = ["Diagnosis", "Positions", "diagnose", "same_positions"]
