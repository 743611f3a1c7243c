"""Goes from a plan to one pipeline: weights, kernels, KV cache, stage and loop."""
