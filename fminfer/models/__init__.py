"""One forward for all model families: specs, checkpoints, weights, one stage."""
