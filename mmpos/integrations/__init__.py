"""Positions and rotations in Transformers, vLLM, SGLang and Megatron; settings from configs."""
