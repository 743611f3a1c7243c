"""Arithmetic on tensors: plain torch, and the C++ and Triton kernels that replace it."""
