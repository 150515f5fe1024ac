"""Prove and measure the kernels on a machine with a GPU: for `make gpu`, which needs numpy, torch and triton alone."""
