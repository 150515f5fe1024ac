"""Which scheme and which encoding has which property: measured, with the smallest counterexample, and never listed."""

from mmpos.analysis.compare.encodings import ENCODING_PROPERTIES, measure_encodings
from mmpos.analysis.compare.finding import Finding, Property
from mmpos.analysis.compare.matrix import Matrix
from mmpos.analysis.compare.schemes import SCHEME_PROPERTIES, measure

__all__ = [
    "ENCODING_PROPERTIES",
    "SCHEME_PROPERTIES",
    "Finding",
    "Matrix",
    "Property",
    "measure",
    "measure_encodings",
]
