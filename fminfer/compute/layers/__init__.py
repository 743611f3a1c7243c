"""Norms, rotary positions, activations, products and mixtures of experts."""
