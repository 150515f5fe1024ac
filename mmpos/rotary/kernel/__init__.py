"""Rotate directly from a table and compute dense ids in Triton kernels; only this package imports triton."""

from mmpos.rotary.kernel.phases import launch_dense
from mmpos.rotary.kernel.rotate import launch_backward, launch_rerotate, launch_rotate

__all__ = ["launch_backward", "launch_dense", "launch_rerotate", "launch_rotate"]
