"""Which scheme and which encoding has which property: measured, with the smallest counterexample, and never listed."""

from mmpos.compare.encodings import ENCODING_PROPERTIES, measure_encodings
from mmpos.compare.finding import Finding, Property
from mmpos.compare.matrix import Matrix
from mmpos.compare.schemes import SCHEME_PROPERTIES, measure

__all__ = [
    "ENCODING_PROPERTIES",
    "SCHEME_PROPERTIES",
    "Finding",
    "Matrix",
    "Property",
    "measure",
    "measure_encodings",
]
