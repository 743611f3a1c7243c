"""Formats of quantized weights: numbers in blocks that have scales of their own."""
