"""Formats of weights: how numbers are held in tensors."""
