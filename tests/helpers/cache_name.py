"""How the installed Transformers calls the cache of a model: another name since 5.24."""

from inspect import signature

from transformers import LlamaForCausalLM

CACHE = next(name for name in ("cache", "past_key_values") if name in signature(LlamaForCausalLM.forward).parameters)
