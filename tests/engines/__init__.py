"""Tests of `weighbridge.integrations`: vLLM, SGLang, transformers, Megatron."""
