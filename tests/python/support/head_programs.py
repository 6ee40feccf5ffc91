"""The programs of four processes in the tests of tensor parallelism.

Attention of the same seed is computed by one process (``evaluate`` of ``make_module``) and by the
ranks of a mesh, of all four and of two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import ikattn
from drawing import normals
from ikattn.parallel import HeadParallel, tensor_parallel_plan
from ikattn.spectral import Direct, Mikan
from processes import messages_of, stacked, whole

N, L, S, E, H, M = 2, 5, 6, 16, 4, 6
RANKS = (2, 4)
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
Results = dict[str, Tensor]


def _keys_alone(module: nn.MultiheadAttention) -> nn.Module:
    return Mikan(module.num_heads, module.head_dim, M, pool="key", seed=3).double()


MODULES: dict[str, dict[str, Any]] = {
    "direct": {},
    "stationary, no bias, p=None": {"stationary": True, "bias": False, "p": None},
    "learned orders, other sizes": {"p": "learned", "kdim": 12, "vdim": 10},
    "appended keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": False},
    "rbf": {"kernel": "rbf", "p": "learned"},
    "dot": {"kernel": "dot"},
    "ikan": {"spectral": "ikan"},
    "mikan": {"spectral": "mikan"},
    "mikan of keys": {"spectral": _keys_alone},
}


def make_module(name: str, **options: Any) -> ikattn.MultiheadAttention:
    torch.manual_seed(0)
    options = {"batch_first": True, "num_frequencies": M, "seed": 1, **MODULES[name], **options}
    return ikattn.MultiheadAttention(E, H, dtype=torch.float64, **options)


def evaluate(module: ikattn.MultiheadAttention, per_head: bool = False) -> Results:
    """Output, weights, and gradients of inputs, masks and parameters, in training mode."""
    draw, sizes = normals(1), (E, module.kdim, module.vdim)
    inputs = [draw(N, length, size) for length, size in zip((L, S, S), sizes, strict=True)]
    padding = (torch.arange(S) >= torch.tensor([[S], [S - 2]])).double() * -50
    masks = padding, draw(N * H, L, S)
    for x in (*inputs, *masks):
        x.requires_grad_()
    given = inputs if module.batch_first else [x.transpose(0, 1) for x in inputs]
    torch.manual_seed(2)
    output, weights = module(*given, masks[0], True, masks[1], not per_head)
    loss = output.square().mean() + (weights * torch.linspace(0, 1, weights.size(-1))).sum()
    if getattr(module.spectral, "regularizes", False):
        loss = loss + ikattn.regularization_loss(module) / 10
    loss.backward()
    found = {"output": output, "weights": weights, "loss": loss}
    found |= {f"gradient of input {i}": x.grad for i, x in enumerate((*inputs, *masks))}
    found |= {name: whole(w.grad) for name, w in module.named_parameters()}
    return {name: x.detach() for name, x in _packed(found).items()}


def make_encoder(**options: Any) -> nn.Module:
    return ikattn.convert(stacked(E, H), num_frequencies=M, seed=1, **options).double()


def train(model: nn.Module, rows: slice = slice(None)) -> Results:
    """Gradients of the first of two steps, and parameters after both."""
    x = torch.randn(4, L, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradients = {}
    for _ in range(2):
        optimiser.zero_grad()
        model(x[rows]).square().mean().backward()
        if not gradients:
            named = model.named_parameters()
            gradients = {f"gradient of {name}": whole(w.grad) for name, w in named}
        optimiser.step()
    return _packed(gradients | whole_state(model))


def run(folder: Path) -> dict[str, Any]:
    """All of it in one start of processes, which takes most of the time."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = {4: init_device_mesh("cpu", (4,)), 2: pairs["tp"]}
    found: dict[str, Any] = {}
    for name in MODULES:
        for ranks, mesh in meshes.items():
            module = parallelize_module(make_module(name), mesh, HeadParallel())
            found[f"{name}, {ranks}"] = evaluate(module, per_head=ranks == 4)
    found["encoder"] = train(_shared_encoder(meshes[4]))
    found["with fsdp"] = _train_on_pairs(pairs)
    found["seeds"] = _take_first_ranks_values(meshes[4])
    found["dropout"] = {kernel: _drop(kernel, meshes[4]) for kernel in ("direct", "dot")}
    found["reset"] = _reset_from_meta(meshes[4])
    found["reset with fsdp"] = _reset_pairs_from_meta(pairs)
    found["sent"] = {name: _note_sent(name, meshes[4]) for name in ("direct", "ikan", "mikan")}
    found["compiled"] = _compile(meshes[4])
    found["checkpoint"] = _checkpoint(meshes, folder / "checkpoint")
    found["errors"] = _errors(meshes[4], pairs)
    return found


def _shared_encoder(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = make_encoder(**options)
    plan = tensor_parallel_plan(model)
    plan |= {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def _train_on_pairs(pairs: DeviceMesh) -> Results:
    """Two ranks share out the heads of one half of the batch, two those of the other half."""
    model = make_encoder()
    parallelize_module(model, pairs["tp"], tensor_parallel_plan(model))
    for layer in model.layers:
        fully_shard(layer, mesh=pairs["dp"])
    fully_shard(model, mesh=pairs["dp"])
    share = pairs["dp"].get_local_rank() * 2
    return train(model, slice(share, share + 2))


def _take_first_ranks_values(mesh: DeviceMesh) -> dict[str, Any]:
    """Ranks draw different parameters and different noise: those of the first count."""
    found: dict[str, Any] = {}
    for source in ("direct", "mikan"):
        torch.manual_seed(10 + dist.get_rank())
        module = ikattn.MultiheadAttention(
            E, H, batch_first=True, num_frequencies=M, spectral=source
        )
        before = {name: w.detach().clone() for name, w in module.named_parameters()}
        parallelize_module(module, mesh, HeadParallel())
        x = torch.randn(N, L, E, generator=torch.Generator().manual_seed(1))
        output = module(x, x, x, need_weights=False)[0].detach()
        found[source] = {"before": before, "after": whole_state(module), "output": output}
    return found


def _drop(name: str, mesh: DeviceMesh) -> dict[str, Tensor]:
    module = parallelize_module(make_module(name, dropout=0.5), mesh, HeadParallel())
    return dropped(module)


def dropped(module: nn.Module) -> dict[str, Tensor]:
    """Weights of heads that would be equal but for dropout, and where generators are after it."""
    x = torch.randn(4, 32, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(2)
    output, weights = module(x, x, x, average_attn_weights=False)
    return {"weights": weights.detach(), "output": output.detach(), "next": torch.rand(3)}


def _reset_from_meta(mesh: DeviceMesh) -> dict[str, Results]:
    found = {}
    for name in ("direct", "ikan", "mikan", "appended keys", "learned orders, other sizes"):
        with torch.device("meta"):
            module = make_module(name)
        parallelize_module(module, mesh, HeadParallel())
        module.to_empty(device="cpu")
        torch.manual_seed(5 + dist.get_rank())  # others than the first do not count
        module.reset_parameters()
        found[name] = whole_state(module)
    return found


def _reset_pairs_from_meta(pairs: DeviceMesh) -> Results:
    with torch.device("meta"):
        module = make_module("direct")
    parallelize_module(module, pairs["tp"], HeadParallel())
    fully_shard(module, mesh=pairs["dp"]).to_empty(device="cpu")
    torch.manual_seed(5 + dist.get_rank())
    module.reset_parameters()
    return whole_state(module)


class Sent(TorchDispatchMode):
    """Notes the name and the numbers of each collective that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f.name().partition("::")[2].rstrip("_")
        if "c10d" in f.namespace and name.startswith(("all_", "reduce_", "broadcast")):
            first = args[0][0] if isinstance(args[0], list) else args[0]
            self.calls.append((name, first.numel()))
        return f(*args, **(kwargs or {}))


def _note_sent(name: str, mesh: DeviceMesh) -> dict[str, list[tuple[str, int]]]:
    """Collectives of a call that makes no weights, and of its backward pass."""
    module = parallelize_module(make_module(name), mesh, HeadParallel())
    x = torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    with Sent() as forward:
        output, _ = module(x, x, x, need_weights=False)
    with Sent() as backward:
        output.sum().backward()
    return {"forward": forward.calls, "backward": sorted(backward.calls)}


def _compile(mesh: DeviceMesh) -> Results:
    """Output and one gradient of a compiled call and of an ordinary one."""
    found = {}
    x = torch.randn(N, L, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name in ("compiled", "ordinary"):
        module = parallelize_module(make_module("direct"), mesh, HeadParallel())
        call = torch.compile(module, backend="aot_eager") if name == "compiled" else module
        output, _ = call(x, x, x, need_weights=False)
        output.square().sum().backward()
        gradient = whole(module.spectral.w1.grad)
        found |= {f"{name} output": output.detach(), f"{name} gradient": gradient}
    return found


def _checkpoint(meshes: dict[int, DeviceMesh], folder: Path) -> Results:
    """Saved by four ranks, loaded by two of other values."""
    model = _shared_encoder(meshes[4])
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    other = make_encoder(p=None)
    with torch.no_grad():
        for w in other.parameters():
            w.zero_()
    parallelize_module(other, meshes[2], tensor_parallel_plan(other))
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    return whole_state(other)


def _errors(mesh: DeviceMesh, pairs: DeviceMesh) -> dict[str, str]:
    """The message of each call that must be refused, without a hang."""

    class Own(Direct):
        def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
            return self.frequencies()

    own, faithful = Own(H, E // H, M), Mikan(H, E // H, M, faithful="code")
    shared = parallelize_module(make_module("direct"), mesh, HeadParallel())
    x = torch.randn(N, L, E, dtype=torch.float64)
    sharded = torch.distributed.tensor.distribute_tensor(x, mesh)

    def share(module: nn.Module, on: DeviceMesh = mesh) -> Callable[[], Any]:
        return lambda: parallelize_module(module, on, HeadParallel())

    calls = {
        "heads": share(ikattn.MultiheadAttention(18, 6)),
        "mesh": share(make_module("direct"), pairs),
        "stock": share(nn.MultiheadAttention(E, H)),
        "own source": share(ikattn.MultiheadAttention(E, H, spectral=own)),
        "faithful": share(ikattn.MultiheadAttention(E, H, spectral=faithful)),
        "sharded": share(fully_shard(make_module("direct"), mesh=mesh)),
        "set_kernel": lambda: shared.set_kernel("implicit"),
        "remove_kernel": lambda: shared.remove_kernel(),
        "DTensor": lambda: shared(sharded, sharded, sharded),
        "sizes": lambda: shared(x[..., 1:], x, x),
        "mask": lambda: shared(x, x, x, attn_mask=torch.zeros(H, L, L)),
    }
    return messages_of(calls)


def whole_state(model: nn.Module) -> Results:
    """All parameters of all ranks, as a plain model has them."""
    return _packed({name: whole(w.detach()) for name, w in model.named_parameters()})


def _packed(values: Results) -> Results:
    """Three parts of an in-projection as one, where their sizes are equal."""
    packed = dict(values)
    for name in values:
        parts = [name.replace(SEPARATE[0], other) for other in SEPARATE]
        if name.endswith(SEPARATE[0]) and len({values[part].shape for part in parts}) == 1:
            together = torch.cat([packed.pop(part) for part in parts])
            packed[name.replace(SEPARATE[0], "in_proj_weight")] = together
    return packed
