"""Runs a model: its layers, one stage, captured graphs, streamed layers, kernels chosen."""
