"""Serve positions, sequences and rotate as models of the Open Inference Protocol v2, for Triton and KServe clients."""
