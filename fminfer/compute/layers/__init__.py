"""Norms, rotary positions, activations and mixtures of experts."""
