"""The parts of sampling: generate, kv_cache, quantize; and of judging a model: score, code_eval, diagnose."""
