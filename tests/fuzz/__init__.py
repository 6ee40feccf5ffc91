"""Calls that are drawn from a number, and what must hold of each.

``python -m fuzz --calls 2000`` with ``tests`` on the path; docs/internals/fuzzing.md.
"""
