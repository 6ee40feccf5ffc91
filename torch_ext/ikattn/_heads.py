"""Heads that the ranks of a mesh share out among them, and what passes between the ranks.

Tensor parallelism gives every rank some heads of each attention layer. What all heads have in
common is the same tensor on every rank; its gradient is a sum over the ranks. Sizes: H heads of all
ranks, n ranks, H / n heads of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class HeadShare(NamedTuple):
    """The heads of this rank: H / n neighbours, in the order of the ranks."""

    mesh: DeviceMesh  # has one dimension
    num_heads: int  # H

    @classmethod
    def checked(cls, what: str, mesh: DeviceMesh, num_heads: int) -> HeadShare:
        """Makes a share of heads; raises ValueError where the mesh or the ranks do not fit them."""
        if mesh.ndim != 1:
            raise ValueError(
                f"{what}: heads are shared out over a mesh of one dimension, such as mesh['tp'], "
                f"got one of shape {tuple(mesh.shape)}"
            )
        if num_heads % mesh.size():
            raise ValueError(
                f"{what}: expected a number of ranks that divides the {num_heads} heads, got "
                f"{mesh.size()} ranks"
            )
        return cls(mesh, num_heads)

    @property
    def ranks(self) -> int:
        """n."""
        return self.mesh.size()

    @property
    def own_heads(self) -> int:
        """H / n."""
        return self.num_heads // self.ranks

    @property
    def first(self) -> int:
        """This rank's first head."""
        return self.mesh.get_local_rank() * self.own_heads

    def own(self, x: Tensor, axis: int) -> Tensor:
        """Returns this rank's part of an axis that has equal parts for all H heads."""
        size = x.size(axis) // self.ranks
        return x.narrow(axis, self.mesh.get_local_rank() * size, size)

    def common(self, x: Tensor) -> Tensor:
        """Marks a tensor that all ranks use for their heads: its gradients are added up."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        from torch.distributed.tensor import DTensor, Partial, Replicate

        spread = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return spread.to_local(grad_placements=[Partial()])

    def summed(self, x: Tensor) -> Tensor:
        """Sums over ranks; the gradient of what follows is the same on every rank."""
        from torch.distributed.tensor import DTensor, Partial

        return DTensor.from_local(x, self.mesh, [Partial()], run_check=False).full_tensor()

    def joined(self, x: Tensor, axis: int, *, for_own_heads: bool = False) -> Tensor:
        """Joins the parts x of all ranks, which follow each other along an axis.

        With ``for_own_heads`` what follows is another on every rank, so that gradients are added
        up.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        parts = DTensor.from_local(x, self.mesh, [Shard(axis)], run_check=False)
        return parts.full_tensor(grad_placements=[Partial() if for_own_heads else Replicate()])

    def agreed(self, drawn: Tensor) -> Tensor:
        """Returns random numbers that every rank has drawn, as the first rank drew them."""
        torch.distributed.broadcast(drawn, group=self.mesh.get_group(), group_src=0)
        return drawn

    @contextmanager
    def own_numbers(self, device: torch.device) -> Iterator[None]:
        """Draws by torch's default generators are other ones for every rank within.

        After it the generators are where one draw of a seed leaves them, as on other ranks.
        """
        seed = int(torch.randint(2**62, ()))
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(seed + self.first)
            yield


def local(x: Tensor) -> Tensor:
    """Returns the part of a DTensor that is on this rank; a plain tensor is all of it."""
    sharded: Any = x
    return sharded.to_local() if _is_dtensor(x) else x


@contextmanager
def whole(parameter: Tensor) -> Iterator[Tensor]:
    """Yields a tensor to fill with first values of a parameter of which ranks hold parts.

    A plain parameter is filled itself. For a DTensor it is a plain tensor of the whole shape; what
    the first rank writes there is scattered afterwards, so that all ranks must come here.
    """
    with torch.no_grad():
        if not _is_dtensor(parameter):
            yield parameter
            return
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        yield values
        if not values.is_meta:
            from torch.distributed.tensor import distribute_tensor

            sharded: Any = parameter
            sharded.copy_(distribute_tensor(values, sharded.device_mesh, sharded.placements))


def _is_dtensor(x: Tensor) -> bool:
    if type(x) in (Tensor, nn.Parameter):  # without an import of what most programs do not need
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)
