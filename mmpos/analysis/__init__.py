"""Tools for studying schemes and other pipelines: diagnosis, fingerprints, conformance, properties, plots."""

from mmpos.analysis import compare, conformance, diagnosis, fingerprint, plot

__all__ = ["compare", "conformance", "diagnosis", "fingerprint", "plot"]
