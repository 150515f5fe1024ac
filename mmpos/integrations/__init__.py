"""Positions and rotations in Transformers, diffusers, vLLM, SGLang and Megatron; settings from configs."""
