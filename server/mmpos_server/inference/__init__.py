"""Open Inference Protocol v2: the same domain behind models by name, tensors in and tensors out."""
