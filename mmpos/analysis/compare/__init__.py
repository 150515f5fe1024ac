"""Measure properties of schemes and encodings, with the smallest counterexample to each property that does not hold."""

from mmpos.analysis.compare.encodings import ENCODING_PROPERTIES, measure_encodings
from mmpos.analysis.compare.matrix import Matrix, Property, PropertyValue
from mmpos.analysis.compare.schemes import SCHEME_PROPERTIES, measure

__all__ = [
    "ENCODING_PROPERTIES",
    "SCHEME_PROPERTIES",
    "Matrix",
    "Property",
    "PropertyValue",
    "measure",
    "measure_encodings",
]
