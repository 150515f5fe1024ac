"""Conformance of any program with the schemes and models: cases as data, and a runner that compares its answers.

Other projects feed the cases to their own code in CI; docs/conformance.md describes the format and the protocol.
"""

from mmpos.analysis.conformance.cases import Case, Tolerances, load_cases
from mmpos.analysis.conformance.runner import Mismatch, Outcome, run

__all__ = ["Case", "Mismatch", "Outcome", "Tolerances", "load_cases", "run"]
