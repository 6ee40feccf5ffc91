"""The programs of four processes in the tests of context parallelism.

One process computes the whole; ranks of groups of two and of four compute their parts, which are
put together again.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ikattn
from ikattn.parallel import context_parallel, context_parallel_attention
from ikattn.parallel._layout import Layout
from processes import messages_of, stacked

B, H, N, D, D_V, M, E = 2, 4, 128, 8, 6, 3, 16
SIZES = (2, 4)
LAYOUTS = ("zigzag", "contiguous")
# Options of a call, and how many heads keys and frequencies have.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped, biased": {"G": 2, "bias": True, "p": 3.0, "eps": 1e-3},
    "causal, grouped, biased": {"G": 2, "bias": True, "is_causal": True, "magnitude_scale": 0.2},
    "frequencies of query heads": {"G": 2, "is_causal": True, "of_queries": True, "p": None},
    "stationary, cross": {"stationary": True, "S": 64},
    "dropout": {"dropout_p": 0.3},
    "causal, dropout": {"dropout_p": 0.3, "is_causal": True},
    "causal, long": {"is_causal": True, "length": 768, "bias": True, "G": 2},
    "float32": {"is_causal": True, "dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
}


def tensors_of(
    *,
    G: int = H,
    length: int = N,
    S: int | None = None,
    bias: bool = False,
    of_queries: bool = False,
    stationary: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the whole, by name, and options of the operator."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (scale * numbers).to(dtype)

    heads, S = H if of_queries else G, length if S is None else S
    tensors = {
        "query": draw(B, H, length, D),
        "key": draw(B, G, S, D),
        "value": draw(B, G, S, D_V),
        "w1": draw(heads, D, M, scale=0.1),
        "grad_output": draw(B, H, length, D_V),
    }
    if not stationary:
        tensors["w2"] = draw(heads, D, M, scale=0.1)
    if bias:
        tensors["key_bias"] = draw(B, G, S).masked_fill(draw(B, 1, S) > 1, -torch.inf)
    if "dropout_p" in options:
        options["dropout_seed"] = torch.tensor([5, 7])
    return tensors, {**options, "enable_gqa": True}


TOKENS = {"query": 2, "key": 2, "value": 2, "key_bias": 2, "output": 2}


def differentiated(attend: Any, tensors: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
    """The output, and the gradients of all tensors, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    grad_output = leaves.pop("grad_output").detach()
    output = attend(**leaves, **options)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_output)
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def on_ranks(
    name: str, layout: Layout, group: Any, rank: int, algorithm: str | None
) -> dict[str, Tensor]:
    """Returns the result of the ranks of a group, put together."""
    tensors, options = tensors_of(**CALLS[name])
    axes = {**TOKENS, "grad_output": 2}
    parts = {
        key: layout.shard(x, axes[key], rank) if key in axes else x for key, x in tensors.items()
    }

    def attend(**arguments: Any) -> Tensor:
        return context_parallel_attention(
            **arguments, group=group, layout=layout.name, algorithm=algorithm
        )

    whole = {}
    for key, part in differentiated(attend, parts, options).items():
        part = part.contiguous()
        pieces = [torch.empty_like(part) for _ in range(layout.size)]
        dist.all_gather(pieces, part, group=group)
        joined = layout.unshard(pieces, 2) if key in TOKENS else torch.stack(pieces).sum(0)
        whole[key] = joined
    return whole


def run(folder: Path) -> dict[str, Any]:
    """All that the ranks compute while all of them live."""
    return {
        "calls": attend(),
        "models": models(),
        "disagreements": disagree(),
        "refusals": refuse(),
        "drawn": draw_seeds(),
    }


def attend() -> dict[Any, dict[str, Tensor]]:
    """Every call, by groups of two and four, in both layouts and ways."""
    results = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "context"))
    for size, layout, name in itertools.product(SIZES, LAYOUTS, CALLS):
        group = mesh["context"].get_group() if size == 2 else None
        rank = dist.get_rank() % size
        ways = ("quadratic",) if "dropout" in name else ("quadratic", "linear")
        for way in ways:
            found = on_ranks(name, Layout(layout, size), group, rank, way)
            results[size, layout, name, way] = found
    return results


# --- Models


def make_encoder() -> nn.Module:
    return ikattn.convert(stacked(E, H), num_frequencies=M, seed=1, p="learned").double()


def make_llama() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": E, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 9}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=H, num_key_value_heads=2)
    model = transformers.LlamaModel(config).double()
    return ikattn.convert(model, num_frequencies=M, seed=1)


def encoder_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(B, N, E, generator=generator, dtype=torch.float64)
    return x, torch.arange(N) >= torch.tensor([[N], [N - 20]])


def llama_inputs() -> Tensor:
    return torch.randint(9, (B, N), generator=torch.Generator().manual_seed(4))


def llama_padding() -> Tensor:
    """1 for tokens, 0 for padding, on the right of the second text."""
    return (torch.arange(N) < torch.tensor([[N], [N // 2 - 5]])).long()


def trained(model: nn.Module, output: Tensor, padding: Tensor | None = None) -> dict[str, Tensor]:
    """The gradients of all parameters, for a loss of what is no padding."""
    output = output if padding is None else output * padding.unsqueeze(-1)
    output.square().sum().backward()
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


def models() -> dict[str, Any]:
    """Whole models by four ranks: outputs put together, gradients summed."""
    results: dict[str, Any] = {}
    for is_causal, layout in itertools.product((False, True), LAYOUTS):
        model = make_encoder()
        x, padding = encoder_inputs()
        with context_parallel(model, layout=layout) as context:
            options: dict[str, Any] = {"src_key_padding_mask": context.shard(padding)}
            if is_causal:
                length = N // dist.get_world_size()
                mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
                options = {"mask": mask, "is_causal": True}
            output = model(context.shard(x), **options)
            gradients = trained(model, output)
            whole = context.unshard(output)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        results["encoder", is_causal, layout] = whole, gradients
    for layout in LAYOUTS:
        model = make_llama()
        with context_parallel(model, layout=layout) as context:
            padding = context.shard(llama_padding())
            positions = context.shard(torch.arange(N)[None])
            told = {"position_ids": positions, "use_cache": False, "attention_mask": padding}
            output = model(context.shard(llama_inputs()), **told).last_hidden_state
            gradients = trained(model, output, padding)
            whole = context.unshard(output)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        results["llama", layout] = whole, gradients
    return results


# --- What goes wrong


def refuse() -> dict[str, str]:
    """Returns the errors of each rank where the third alone refuses."""
    tensors, _ = tensors_of()
    del tensors["grad_output"]
    parts = {key: x.chunk(4, 2)[0] if key in TOKENS else x for key, x in tensors.items()}
    is_third = dist.get_rank() == 2
    mask = torch.ones(1, dtype=torch.bool) if is_third else None
    module, x = ikattn.MultiheadAttention(8, 2, batch_first=True), torch.ones(1, 4, 8)

    def of_module() -> None:
        with context_parallel(module):
            module(x, x, x, need_weights=is_third)

    calls = {
        "function": lambda: context_parallel_attention(**parts, attn_mask=mask),
        "module": of_module,
    }
    return messages_of(calls)


def disagree() -> dict[str, str]:
    """Returns the errors of each rank where the third is called with something else."""
    changes: dict[str, Any] = {
        "length": lambda x: {"query": x["query"][:, :, :16]},
        "dtype": lambda x: {"w1": x["w1"].float(), "w2": x["w2"].float()},
        "frequencies": lambda x: {"w1": x["w1"] + 1e-9},
        "eps": lambda x: {"eps": 1e-4},
        "causality": lambda x: {"is_causal": True},
        "p": lambda x: {"p": None},
        "layout": lambda x: {"layout": "contiguous"},
        "algorithm": lambda x: {"algorithm": "linear"},
        "gradient": lambda x: {"key": x["key"].clone().requires_grad_()},
        "seed": lambda x: {"dropout_seed": torch.tensor([1, 3])},
        "a seed": lambda x: {"dropout_p": 0.5, "dropout_seed": torch.tensor([1, 3])},
        "mode": lambda x: {},
    }
    said = {}
    for name, change in changes.items():
        tensors, _ = tensors_of(length=512 if name == "mode" else N)  # 512: for linear time
        del tensors["grad_output"]
        arguments: dict[str, Any] = {
            key: x.chunk(4, 2)[0] if key in TOKENS else x for key, x in tensors.items()
        }
        if "seed" in name:
            arguments["dropout_p"] = 0.5
        if name == "seed":
            arguments["dropout_seed"] = torch.tensor([1, 2])
        is_third = dist.get_rank() == 2
        if is_third:
            arguments |= change(arguments)
        try:
            with ikattn.deterministic("batch" if is_third and name == "mode" else "run"):
                context_parallel_attention(**arguments)
            said[name] = "nothing"
        except (ValueError, TypeError) as error:
            said[name] = str(error)
    return said


def draw_seeds() -> Tensor:
    """The whole output where every rank would draw a seed of its own."""
    torch.manual_seed(dist.get_rank())
    tensors, _ = tensors_of()
    layout = Layout("contiguous", 4)
    del tensors["grad_output"]
    parts = {
        key: layout.shard(x, 2, dist.get_rank()) if key in TOKENS else x
        for key, x in tensors.items()
    }
    part = context_parallel_attention(**parts, layout="contiguous", dropout_p=0.5).contiguous()
    pieces = [torch.empty_like(part) for _ in range(4)]
    dist.all_gather(pieces, part)
    return layout.unshard(pieces, 2)


def die(rank: int, folder: str, algorithm: str) -> None:
    """The third of four ranks ends between two calls; the others write what they hear."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    tensors, _ = tensors_of()
    del tensors["grad_output"]
    parts = {key: x.chunk(4, 2)[rank] if key in TOKENS else x for key, x in tensors.items()}
    context_parallel_attention(**parts, algorithm=algorithm, is_causal=True)
    if rank == 2:
        os._exit(9)
    begin = time.monotonic()
    try:
        context_parallel_attention(**parts, algorithm=algorithm, is_causal=True)
    except RuntimeError as error:
        Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - begin:.1f} {error}")
        time.sleep(1)  # the others hear of the third, not of this one
    os._exit(0)
