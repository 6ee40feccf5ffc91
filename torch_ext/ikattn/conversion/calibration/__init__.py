"""Implicit kernels that start near the softmax attention they replace."""
