"""Find what is wrong with the position ids of a pipeline, and since which token."""

from mmpos.analysis.diagnosis.diagnosis import Diagnosis, diagnose
from mmpos.analysis.diagnosis.two_sides import Positions, same_positions

__all__ = ["Diagnosis", "Positions", "diagnose", "same_positions"]
