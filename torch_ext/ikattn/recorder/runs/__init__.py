"""Runs: one attention followed to the sum of its block, and the maps made of it."""
