"""Tools for studying schemes and other pipelines: diagnosis, fingerprints, plots."""

from mmpos.analysis import diagnosis, fingerprint, plot

__all__ = ["diagnosis", "fingerprint", "plot"]
