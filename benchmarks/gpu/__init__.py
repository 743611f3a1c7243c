"""What `scripts/try_gpu` does in the little time that a GPU is there (docs/gpu.md)."""
