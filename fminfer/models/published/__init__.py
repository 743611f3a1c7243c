"""Quantized checkpoints as others publish them: what a config says, and how tensors are read."""
