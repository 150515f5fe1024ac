"""The cache's parameter name in the installed Transformers, which 5.24 renamed."""

from inspect import signature

from transformers import LlamaForCausalLM

CACHE = next(name for name in ("cache", "past_key_values") if name in signature(LlamaForCausalLM.forward).parameters)
