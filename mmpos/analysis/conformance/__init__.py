"""Conformance cases for the schemes and models, as data, and a runner that checks any program against them.

Other projects feed the cases to their own code in CI; docs/conformance.md describes the format and the protocol.
"""

from mmpos.analysis.conformance.cases import Case, Tolerances, load_cases
from mmpos.analysis.conformance.runner import Mismatch, Outcome, run

__all__ = ["Case", "Mismatch", "Outcome", "Tolerances", "load_cases", "run"]
