"""Open Inference Protocol v2, for clients of Triton and KServe: positions, sequences and rotate as models."""
