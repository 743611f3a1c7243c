"""Builds one pipeline: weights, kernels, KV cache, stage and loop."""
