"""Integrations with Transformers, diffusers, vLLM, SGLang and Megatron, and settings read from model configs."""
