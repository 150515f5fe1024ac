"""What is wrong with the position ids of a pipeline, and since which token."""

from mmpos.analysis.diagnosis.comparing import diagnose
from mmpos.analysis.diagnosis.result import Diagnosis

__all__ = ["Diagnosis", "diagnose"]
