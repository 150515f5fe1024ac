"""Tools for studying schemes and other pipelines: diagnosis, fingerprints, conformance, plots."""

from mmpos.analysis import conformance, diagnosis, fingerprint, plot

__all__ = ["conformance", "diagnosis", "fingerprint", "plot"]
