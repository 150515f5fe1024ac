"""Which scheme and which encoding has which property: measured, with the smallest counterexample, and never listed."""

from mmpos.compare.finding import Finding, Property
from mmpos.compare.matrix import Matrix
from mmpos.compare.schemes import SCHEME_PROPERTIES, measure

__all__ = ["SCHEME_PROPERTIES", "Finding", "Matrix", "Property", "measure"]
