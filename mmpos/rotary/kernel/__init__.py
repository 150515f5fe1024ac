"""Rotate directly from a table and compute dense ids in Triton kernels; only this package imports triton."""

from mmpos.rotary.kernel.backward import launch_backward
from mmpos.rotary.kernel.phases import launch_dense
from mmpos.rotary.kernel.rerotate import launch_rerotate
from mmpos.rotary.kernel.rotate import launch_rotate

__all__ = [
    "launch_backward",
    "launch_dense",
    "launch_rerotate",
    "launch_rotate",
]
