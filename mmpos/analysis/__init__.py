"""Studies of schemes and of other pipelines: diagnosis of ids, properties compared, pictures."""

from mmpos.analysis import compare, diagnosis, plot

__all__ = ["compare", "diagnosis", "plot"]
