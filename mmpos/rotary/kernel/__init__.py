"""The Triton kernels, the only room that names triton: rotations straight from a table, and dense ids."""

from mmpos.rotary.kernel.backward import launch_backward
from mmpos.rotary.kernel.dense import launch_dense
from mmpos.rotary.kernel.rotate import launch
from mmpos.rotary.kernel.store import launch as launch_store

__all__ = ["launch", "launch_backward", "launch_dense", "launch_store"]
