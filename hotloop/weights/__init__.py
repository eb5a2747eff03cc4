"""Weights of other programs: load, families, export, safetensors; adapters: lora, nf4, adapter."""
