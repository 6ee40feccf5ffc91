"""Shards: the lines of each process, where several share a job.

A shard is one of n; line i belongs to shard ``(part of i) modulo n``, whoever does it, so that
another number of shards can go on in the same directory. ``torchrun`` makes each rank a shard,
``--shards k/n`` each job of an array; both together divide each job's lines among its ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """One of the processes that share a job.

    Attributes:
        number: From 1.
        count: How many shards the job has.
        rank: Of torchrun; 0 without.
        ranks: How many processes torchrun has started, 1 without.
        local_rank: Of torchrun, among the processes of this machine.
        restarts: How often torchrun has started its processes again.
    """

    number: int = 1
    count: int = 1
    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    restarts: int = 0

    @staticmethod
    def of(option: str | None, environment: Mapping[str, str] = os.environ) -> Shard:
        """The shard of ``--shards k/n``, and of the rank that torchrun gives this process.

        Raises:
            ValueError: The option is not of this form, or k is not one of 1 to n.
        """
        k, n = 1, 1
        if option is not None:
            first, slash, second = option.partition("/")
            if not (slash and first.isdecimal() and second.isdecimal()):
                raise ValueError(f"must be k/n, for example 1/8, got {option!r}")
            k, n = int(first), int(second)
            if not 1 <= k <= n:
                raise ValueError(f"must be k/n with k from 1 to n, got {option!r}")
        if not environment.keys() >= {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"}:
            return Shard(k, n)  # RANK alone is set by much else
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment["LOCAL_RANK"])
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
        return Shard((k - 1) * ranks + rank + 1, n * ranks, rank, ranks, local_rank, restarts)

    def __str__(self) -> str:
        return f"shard {self.number}/{self.count}"

    @property
    def speaks(self) -> bool:
        """Whether this process tells of the progress: one of those that torchrun started."""
        return self.rank == 0

    @property
    def waits(self) -> bool:
        """Whether this process stays until all lines are done, to tell of the progress."""
        return self.rank == 0 and 1 < self.ranks == self.count

    def has(self, part: int) -> bool:
        """Whether this part of the lines, from 0, is ours."""
        return part % self.count == self.number - 1

    def device(self, name: str) -> str:
        """The device of this process: "cuda" is a GPU of its own for each rank of a machine.

        Raises:
            ValueError: There are fewer GPUs than ranks.
        """
        device = torch.device(name)
        if self.ranks == 1 or device.type != "cuda" or device.index is not None:
            return name
        if self.local_rank >= (count := torch.cuda.device_count()):
            raise ValueError(
                f"must have a GPU for each process of a machine, got {count} for "
                f"local rank {self.local_rank}: start fewer, or share one, cuda:0"
            )
        return f"cuda:{self.local_rank}"

    def wait_for_others(self) -> None:
        """Returns when every rank of torchrun has called it."""
        import torch.distributed as dist

        dist.init_process_group("gloo")
        try:
            dist.barrier()
        finally:
            dist.destroy_process_group()
