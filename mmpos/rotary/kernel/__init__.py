"""The Triton kernels, the only room that names triton: rotations straight from a table, and dense ids."""

from mmpos.rotary.kernel.backward import launch_backward
from mmpos.rotary.kernel.phases import launch_dense
from mmpos.rotary.kernel.rerotate import launch_rerotate
from mmpos.rotary.kernel.rotate import launch_rotate, launch_store

__all__ = ["launch_backward", "launch_dense", "launch_rerotate", "launch_rotate", "launch_store"]
