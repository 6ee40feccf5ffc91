"""The programs of four processes in the tests of FSDP2, DDP and pipelines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    pipeline,
)
from torch.nn.parallel import DistributedDataParallel

import ikattn
from processes import stacked, whole

N, L, E, H, M, STEPS = 4, 5, 16, 4, 6, 2
SOURCES = ("direct", "stationary", "ikan", "mikan")
GENERATED = ("ikan", "mikan")
Results = dict[str, Tensor]


def make_encoder(source: str = "direct", layers: int = 2, **options: Any) -> nn.Module:
    options = {"num_frequencies": M, "seed": 1, "spectral": source, "p": "learned", **options}
    return ikattn.convert(stacked(E, H, layers), **options).double()


def batch() -> Tensor:
    return torch.randn(N, L, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run(folder: Path) -> dict[str, Any]:
    """All of it in one start of processes, which takes most of the time."""
    mesh = init_device_mesh("cpu", (4,))
    two = DeviceMesh("cpu", [0, 1])  # a call of all ranks, although two are in it
    found: dict[str, Any] = {source: _draw_on_meta(source, mesh) for source in SOURCES}
    found["checkpoint"] = _save_and_load(mesh, two, folder / "checkpoint")
    found |= {f"ddp, {source}": train_with_noise(source, dist.get_rank()) for source in GENERATED}
    found["errors"] = _errors(mesh)
    found["stages"], found["traced"] = _pipeline(False), _pipeline(True)
    return found


def _draw_on_meta(source: str, mesh: DeviceMesh) -> Results:
    """Frequencies, and orders p, that are drawn after the model is sharded."""
    with torch.device("meta"):
        model = make_encoder(source)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(5 + dist.get_rank())
    for layer in model.layers:
        layer.self_attn.reset_parameters()
    return {name: whole(w) for name, w in model.named_parameters() if _is_of_kernel(name)}


def _save_and_load(mesh: DeviceMesh, two: DeviceMesh, folder: Path) -> Results:
    """Four ranks save; two make the model on meta and load it."""
    model = fully_shard(make_encoder(), mesh=mesh)
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    if dist.get_rank() > 1:
        return {}
    with torch.device("meta"):
        other = make_encoder()
    fully_shard(other, mesh=two).to_empty(device="cpu")
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder, process_group=two.get_group())
    other.load_state_dict(state)
    output = other(batch()).detach()
    return {"output": output} | {name: whole(w) for name, w in other.named_parameters()}


def train_with_noise(source: str, rank: int | None) -> dict[str, Results]:
    """Steps of DDP of one rank, or with None what one process makes of the ranks' noise.

    Every rank has an example of its own, and seeds its generator by its rank.
    """
    model = make_encoder(source)
    trained = model if rank is None else DistributedDataParallel(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = {}
    for step in range(STEPS):
        optimiser.zero_grad()
        for own in range(4) if rank is None else (rank,):
            torch.manual_seed(100 * step + own)
            loss = trained(batch()[own : own + 1]).square().mean()
            loss = loss + ikattn.regularization_loss(trained) / 10
            (loss if rank is not None else loss / 4).backward()
        gradients |= {f"{step}, {n}": w.grad.clone() for n, w in model.named_parameters()}
        optimiser.step()
    torch.manual_seed(0)
    return {
        "gradients": gradients,
        "parameters": {name: w.detach() for name, w in model.named_parameters()},
        "output": {"eval": model.eval()(batch()).detach()},
    }


def _errors(mesh: DeviceMesh) -> dict[str, str]:
    """Returns the errors of models that are converted when they are wrapped."""
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True)
    inside = nn.Sequential(fully_shard(copy.deepcopy(layer), mesh=mesh))
    messages = {}
    for name, model in {"ddp": DistributedDataParallel(layer), "fsdp": inside}.items():
        try:
            ikattn.convert(model)
        except ValueError as error:
            messages[name] = str(error)
        ikattn.convert(model, kernel="rbf")  # has no parameters of its own
    return messages


def _pipeline(is_traced: bool) -> Results:
    """Gradients of this rank's stage: one layer of four, or that which torch.export has split."""
    rank, model, x = dist.get_rank(), make_encoder(layers=4), batch()
    device = torch.device("cpu")
    if is_traced:
        places = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
        stage = pipeline(model, mb_args=(x[:1],), split_spec=places).build_stage(rank, device)
        schedule: Any = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        named = dict(stage.submod.named_parameters())
    else:
        stage = PipelineStage(model.layers[rank], rank, 4, device)
        schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
        named = dict(model.layers[rank].named_parameters(prefix=f"layers.{rank}"))
    target = {"target": torch.zeros_like(x)} if rank == 3 else {}
    output = schedule.step(*([x] if rank == 0 else []), **target)
    found = {name: w.grad for name, w in named.items()}
    return found if output is None else found | {"output": output.detach()}


def _is_of_kernel(name: str) -> bool:
    return ".spectral." in name or ".magnitude." in name
