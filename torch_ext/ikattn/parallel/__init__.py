"""Attention over several devices: heads shared out over ranks.

``tensor_parallel_plan`` is for ``torch.distributed.tensor.parallel.parallelize_module``; nothing
here is imported with ``ikattn`` itself. docs/guide/parallel.md has this, FSDP2, DDP and pipelines.
"""

from ikattn.parallel.tensor import HeadParallel, tensor_parallel_plan

__all__ = ["HeadParallel", "tensor_parallel_plan"]
