"""Find what is wrong with the position ids of a pipeline, and since which token."""

from mmpos.analysis.diagnosis.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
