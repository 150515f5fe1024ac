"""Integrations with Transformers, diffusers, vLLM, SGLang and Megatron, and settings from model configs."""
