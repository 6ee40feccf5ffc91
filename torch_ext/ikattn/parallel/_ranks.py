"""How the ranks that share a sequence talk, and how one that does not answer is named."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_LOST = "ikattn/lost_rank"  # in the store of the process group: who was found to be gone first


class Exchange:
    """Tensors on their way to and from other ranks."""

    def __init__(self, ranks: Ranks, works: list[Any], received: list[Tensor], peer: int) -> None:
        self._ranks, self._works, self._received, self._peer = ranks, works, received, peer

    def wait(self) -> list[Tensor]:
        """Waits, and returns what came; what was sent may be written to again."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._ranks.lost(self._peer, error) from error
        return self._received


class Ranks:
    """The ranks of one group, by default all, numbered within it.

    A ``DeviceMesh`` must have one dimension.
    """

    def __init__(self, group: DeviceMesh | dist.ProcessGroup | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "context_parallel: expected torch.distributed to be initialised, as "
                'torch.distributed.init_process_group("gloo") does in every process of torchrun'
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"context_parallel: mesh must have one dimension, got {group.ndim}; take one "
                    'of its parts, as mesh["context"]'
                )
            group = group.get_group()
        self.group = group
        self.size = dist.get_world_size(group)
        self.number = dist.get_rank(group)
        if self.number < 0:
            raise ValueError(
                f"context_parallel: rank {dist.get_rank()} is not in the group that it was given"
            )

    def send_on(self, tensors: Sequence[Tensor], first_tag: int = 0) -> Exchange:
        """Starts to send tensors to the next rank of a ring, and to get their likes.

        Every rank sends tensors of the same shapes. They must not be written to before ``wait``.
        Exchanges under way at the same time have tags of their own, from ``first_tag`` on.
        """
        to, of = (self.number + 1) % self.size, (self.number - 1) % self.size
        sent = [x.contiguous() for x in tensors]
        received = [torch.empty_like(x) for x in sent]
        operations = self._operations(dist.isend, sent, to, first_tag)
        operations += self._operations(dist.irecv, received, of, first_tag)
        return self._start(operations, received, of)

    def send(self, tensors: Sequence[Tensor], to: int, first_tag: int = 0) -> Exchange:
        """Starts to send tensors to one rank, which calls ``receive`` with likes and tag."""
        sent = [x.contiguous() for x in tensors]
        return self._start(self._operations(dist.isend, sent, to, first_tag), [], to)

    def receive(self, likes: Sequence[Tensor], of: int, first_tag: int = 0) -> list[Tensor]:
        """Receives the tensors that a rank sends, of the shapes of ``likes``."""
        into = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in likes]
        return self._start(self._operations(dist.irecv, into, of, first_tag), into, of).wait()

    def reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        """Returns the sum, or the largest, of a tensor's elements over all ranks."""
        result = tensor.clone(memory_format=torch.contiguous_format)
        try:
            dist.all_reduce(result, operation, group=self.group)
        except RuntimeError as error:
            raise self.lost(None, error) from error
        return result

    def gather(self, row: Tensor) -> Tensor:
        """Gathers the rows of all ranks, [size, n], each by itself: one who is lost is named."""
        rows = [torch.empty_like(row) if n != self.number else row for n in range(self.size)]
        others = [n for n in range(self.size) if n != self.number]
        operations = [x for n in others for x in self._operations(dist.isend, [row], n, 0)]
        operations += [x for n in others for x in self._operations(dist.irecv, [rows[n]], n, 0)]
        works = dist.batch_isend_irecv(operations) if operations else []
        # a backend that joins the operations gives one work for all
        apart = len(works) == len(operations)
        for place, work in enumerate(works):
            peer = others[place % len(others)] if apart else None
            try:
                work.wait()
            except RuntimeError as error:
                raise self.lost(peer, error) from error
        return torch.stack(rows)

    def lost(self, peer: int | None, error: RuntimeError) -> RuntimeError:
        """Makes the error of a rank that does not answer, with the name of who was missed first."""
        name = None if peer is None else str(self._everywhere(peer))
        store: Any = dist.distributed_c10d._get_default_store()
        before = store.timeout
        try:
            store.set_timeout(timedelta(seconds=5))
            if name is not None:
                name = store.compare_set(_LOST, "", name).decode()
            elif store.check([_LOST]):
                name = store.get(_LOST).decode()
        except (RuntimeError, OSError):  # the store went with the rank that holds it
            pass
        finally:
            store.set_timeout(before)
        here = self._everywhere(self.number)
        who = "a rank of the group" if name is None else f"rank {name}"
        return RuntimeError(f"context_parallel: on rank {here}: {who} does not answer: {error}")

    def _everywhere(self, number: int) -> int:
        """Returns a rank's number among all processes."""
        return number if self.group is None else dist.get_global_rank(self.group, number)

    def _operations(
        self, kind: Any, tensors: Sequence[Tensor], peer: int, first_tag: int
    ) -> list[dist.P2POp]:
        place = self._everywhere(peer)
        tagged = enumerate(tensors, first_tag)
        return [dist.P2POp(kind, x, place, self.group, tag) for tag, x in tagged]

    def _start(self, operations: list[Any], received: list[Tensor], peer: int) -> Exchange:
        try:
            return Exchange(self, dist.batch_isend_irecv(operations), received, peer)
        except RuntimeError as error:
            raise self.lost(peer, error) from error
