"""Positions and rotations in Transformers, vLLM, SGLang, Megatron and torchtitan; settings from configs."""
