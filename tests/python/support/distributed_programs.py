"""The programs of two processes in the tests of distributed training.

It is a module of its own because the processes import it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ikattn
from processes import stacked, whole

PROCESSES, STEPS = 2, 3
N, L, E, H, M = 4, 5, 16, 4, 5
WHOLE = StateDictOptions(full_state_dict=True)

Parameters = dict[str, Tensor]

GENERATED = ("ikan", "mikan")

# These are sharded on their own, besides the model as a whole.
PARTS: dict[str, Callable[[nn.Module], bool]] = {
    "layers": lambda module: isinstance(module, nn.TransformerEncoderLayer),
    "attention": lambda module: isinstance(module, ikattn.MultiheadAttention),
}


def make_model(seed: int = 0, **options: Any) -> nn.Module:
    options = {"num_frequencies": M, "seed": seed, **options}
    return ikattn.convert(stacked(E, H, seed=seed), **options).double()


def evaluate_generated(
    source: str, shard: Callable[[nn.Module], nn.Module] = lambda model: model
) -> Parameters:
    """Returns the output of a model whose frequencies are generated, after a step of training."""
    model = shard(make_model(spectral=source, num_frequencies=M + 1))
    x = torch.randn(N, L, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(2)
    model(x).square().mean().backward()
    gradients = [whole(w.grad) for w in model.parameters() if w.grad is not None]
    return {
        "output": model.eval()(x).detach(),
        "gradients": torch.stack([g.norm() for g in gradients]),
    }


def train(model: nn.Module, rows: slice) -> dict[str, Parameters]:
    """Trains on these rows of the batch: the gradients of the first step, and what is left."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, N, L, E, generator=generator, dtype=torch.float64)[:, rows]
    padding = torch.arange(L) >= torch.tensor([5, 3, 4, 1])[rows, None]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients: Parameters = {}
    for _ in range(STEPS):
        optimiser.zero_grad()
        (model(x, src_key_padding_mask=padding) - y).pow(2).mean().backward()
        if not gradients:
            gradients = {name: whole(w.grad) for name, w in model.named_parameters()}
        optimiser.step()
    return {
        "gradients": gradients,
        "parameters": {name: whole(w.detach()) for name, w in model.named_parameters()},
    }


def run(folder: Path) -> dict[str, Any]:
    """All of it in one pair of processes, for most of the time goes into starting them."""
    share = N // PROCESSES
    rows = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    results: dict[str, Any] = {"ddp": train(DistributedDataParallel(make_model()), rows)}
    for part in PARTS:
        results[f"fsdp, {part}"] = _train_sharded(part, rows, folder)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    results["fsdp, bfloat16"] = train(_sharded(make_model(), "layers", policy), rows)
    for source in GENERATED:
        results[f"fsdp, bfloat16, {source}"] = evaluate_generated(
            source, lambda model: _sharded(model, "layers", policy)
        )
    return results


def _sharded(model: nn.Module, part: str, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (PROCESSES,))}
    options |= {} if policy is None else {"mp_policy": policy}
    for module in model.modules():
        if PARTS[part](module):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def _train_sharded(part: str, rows: slice, folder: Path) -> dict[str, Parameters]:
    """Trains; then goes the two ways of a checkpoint, one from each rank and one as a whole."""
    model = _sharded(make_model(), part)
    results = train(model, rows)
    checkpoint.save(model.state_dict(), checkpoint_id=folder / part)
    results["state"] = get_model_state_dict(model, options=WHOLE)

    other = _sharded(make_model(seed=1), part)
    set_model_state_dict(other, dict(results["state"]), options=WHOLE)  # which changes its entries
    results["set again"] = {name: whole(w.detach()) for name, w in other.named_parameters()}
    local = model.layers[0].self_attn.spectral.w1.to_local()
    results["share of w1"] = {"": local.detach().clone()}
    return results
