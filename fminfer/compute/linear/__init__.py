"""Products with weights: plain, or packed once for the CPU."""
