"""Says what a model is, and where its weights lie: families, checkpoints, tensors."""
