"""Sampling: load, texts, generate, kv_cache, quantize. Judging a model: score, code_eval, diagnose."""
