"""What is wrong with the position ids of a pipeline, and since which token."""

from mmpos.diagnosis.comparing import diagnose
from mmpos.diagnosis.result import Diagnosis

__all__ = ["Diagnosis", "diagnose"]
