"""Positions and rotations in Transformers, vLLM, SGLang, Megatron and torchtitan, and settings from a model's config."""
