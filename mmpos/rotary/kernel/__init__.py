"""Rotate directly from a table and compute dense ids in Triton kernels; only this package imports triton."""

from mmpos.rotary.kernel.backward import launch_backward
from mmpos.rotary.kernel.phases import launch_dense
from mmpos.rotary.kernel.rerotate import launch_rerotate
from mmpos.rotary.kernel.rotate import ROTATED, STORED, launch_rotate, launch_store
from mmpos.rotary.kernel.tiling import bind

__all__ = [
    "ROTATED",
    "STORED",
    "bind",
    "launch_backward",
    "launch_dense",
    "launch_rerotate",
    "launch_rotate",
    "launch_store",
]
