"""Sums of tensors: whether two tensors are the same, which tensors add up to another, and how."""
