"""Attention over several devices: tokens, or heads, shared out over ranks.

``tensor_parallel_plan`` is for ``torch.distributed.tensor.parallel.parallelize_module``; nothing
here is imported with ``ikattn`` itself. docs/guide/parallel.md has this, FSDP2, DDP and pipelines.
"""

from ikattn.parallel.context import context_parallel, context_parallel_attention
from ikattn.parallel.tensor import HeadParallel, tensor_parallel_plan

__all__ = ["HeadParallel", "context_parallel", "context_parallel_attention", "tensor_parallel_plan"]
