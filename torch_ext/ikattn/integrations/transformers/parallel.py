"""Kernels under tensor parallelism: each rank has the frequencies of its heads.

transformers looks up in a model's plan how each module is shared out, by the name of a style. Where
the plan shares out the projections of an attention module by heads, its kernel goes with them.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ikattn._heads import HeadShare
from ikattn.integrations.transformers.kernels import (
    IMPLICIT,
    KERNELS,
    GeneratedKernel,
    ImplicitKernel,
)
from ikattn.spectral.shared import check_shareable, shard_frequencies

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_STYLE = "ikattn_heads"  # in transformers' plans


def share_kernel(
    kernel: ImplicitKernel | GeneratedKernel, mesh: DeviceMesh, src_data_rank: int | None = 0
) -> None:
    """Makes a kernel that of this rank's heads, in place.

    Frequencies of the rank ``src_data_rank`` of the mesh count; None: each rank's own.
    """
    if kernel.head_share is not None:
        return  # the module has several names in the model
    source = _source_of(kernel)
    check_shareable(source)
    HeadShare.checked(f"{IMPLICIT}, keys", mesh, kernel.key_heads or source.num_heads)
    share = HeadShare.checked(IMPLICIT, mesh, source.num_heads)
    shard_frequencies(source, share, src_data_rank)
    kernel.head_share = share


def add_to_plans(model: nn.Module) -> None:
    """Names each kernel in the plans of the model and its parts that share out its heads."""
    if register_style() is None:
        return
    for owner in model.modules():
        plan = vars(owner).get("_tp_plan")
        if not isinstance(plan, dict):
            continue
        by_heads = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}
        for name, module in owner.named_modules():
            generic = _generic(name)
            if generic in by_heads and isinstance(getattr(module, "spectral", None), KERNELS):
                plan[f"{generic}.spectral"] = _STYLE


def remove_from_plans(model: nn.Module) -> None:
    """Takes what ``add_to_plans`` wrote out again."""
    for owner in model.modules():
        plan = vars(owner).get("_tp_plan")
        if isinstance(plan, dict):
            for name in [name for name, style in plan.items() if style == _STYLE]:
                del plan[name]


def share_kernels(model: nn.Module) -> None:
    """Shares out the kernels of a model whose projections transformers has shared out before."""
    plan = getattr(model, "_tp_plan", None) or {}
    for name, module in model.named_modules():
        kernel: Any = getattr(module, "spectral", None)
        if isinstance(kernel, KERNELS) and plan.get(f"{_generic(name)}.spectral") == _STYLE:
            sharded: list[Any] = [w for w in module.parameters() if hasattr(w, "device_mesh")]
            if sharded:
                share_kernel(kernel, sharded[0].device_mesh)


def check_heads(module: nn.Module, kernel: Any, query: Tensor, key: Tensor) -> None:
    """Checks heads of queries [B, H, L, d] and, where they are shared out, keys [B, G, S, d]."""
    share = getattr(kernel, "head_share", None)
    heads = getattr(_source_of(kernel), "num_heads", None) if share is None else share.own_heads
    if heads is not None and query.size(1) != heads:
        help_ = "; ikattn.convert(model, sizes=...) takes the number of heads"
        if any(hasattr(w, "device_mesh") for w in module.parameters()):
            help_ = (
                ": tensor parallelism shares out both or none. Load with ikattn.integrations."
                'transformers.from_pretrained(..., tp_plan="auto"), or add '
                "ikattn.parallel.tensor_parallel_plan(model) to a plan of torch's"
            )
        raise RuntimeError(
            f"{IMPLICIT}: {type(module).__name__} got queries of {query.size(1)} heads, and its "
            f"kernel has frequencies of {heads}{help_}"
        )
    if share is None:
        return
    key_heads = (kernel.key_heads or share.num_heads) // share.ranks
    if key.size(1) != key_heads:
        raise RuntimeError(
            f"{IMPLICIT}: {type(module).__name__} got keys of {key.size(1)} heads, expected the "
            f"{key_heads} that this rank's queries belong to: a plan that shares out the "
            "projection of queries must share out those of keys and values"
        )


def _generic(name: str) -> str:
    """Returns the name of a module as plans have it, with stars for the numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _source_of(kernel: Any) -> Any:
    return kernel.spectral if isinstance(kernel, GeneratedKernel) else kernel


@functools.cache
def register_style() -> type[Any] | None:
    """Registers the style with transformers; None where this version has no such styles."""
    try:
        styles: Any = importlib.import_module("transformers.distributed.tensor_parallel")
    except ImportError:
        return None
    if not hasattr(getattr(styles, "TensorParallelLayer", None), "install_forward"):
        return None

    class Heads(styles.TensorParallelLayer):  # type: ignore[misc]
        """Shares out a kernel whose parameters transformers fills afterwards."""

        def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
            share_kernel(module, mesh, src_data_rank=None)
            return module

    styles.ALL_PARALLEL_STYLES.register(_STYLE, Heads())
    return Heads
