"""Bodies of a transformer's parts: plain torch, and what computes the same faster."""
