"""Attention over several devices: tokens shared out over ranks.

Nothing here is imported with ``ikattn`` itself. docs/guide/parallel.md has all of it.
"""

from ikattn.parallel.context import ContextParallel, context_parallel, context_parallel_attention

__all__ = ["ContextParallel", "context_parallel", "context_parallel_attention"]
