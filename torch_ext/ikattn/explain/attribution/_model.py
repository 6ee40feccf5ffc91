"""A model as attribution sees it: blocks, the vectors that enter them, and logits.

Sizes: B batch, S source tokens, L tokens that logits belong to, D model size, V logits.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ikattn.explain.attribution._linear import LinearModel, activations_as_one
from ikattn.explain.attribution._torch import called_with, first_output, hooked
from ikattn.nn.parameter_groups import frozen
from ikattn.recorder.calls.modes import without_compiled_code
from ikattn.recorder.plan.resolvers import find_attention
from ikattn.recorder.sums.tensors import first_tensor

_LOCK = threading.RLock()  # two threads would meet each other's hooks
_MIXERS = ("Attention", "Mixer", "TimeMix", "Mamba", "SSM")


@contextmanager
def alone(model: nn.Module, caller: str) -> Iterator[None]:
    """Has the model called by one thread alone, and as it is written.

    There is no inference mode, whose tensors have no gradients, no graph of torch.compile, none of
    torch's fused layers, which hide their parts, and no weight that autocast has kept.
    """
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    if is_transformed or torch.compiler.is_compiling():
        within = "a transform of torch.func" if is_transformed else "a function of torch.compile"
        raise RuntimeError(
            f"{caller}: it takes gradients of its own, and was called inside {within}, which does "
            "not let it: call it outside"
        )
    if model.training:
        raise ValueError(
            f"{caller}: model must be in eval mode, got {type(model).__name__} in training: call "
            "model.eval()"
        )
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_inference():
            raise ValueError(
                f"{caller}: {name} was made in torch.inference_mode, and has no gradients outside "
                "of it: load the model, or convert it by .to, outside of inference_mode"
            )
    is_cached = torch.is_autocast_cache_enabled()
    with ExitStack() as opened:
        for context in (_LOCK, torch.inference_mode(False), without_compiled_code()):
            opened.enter_context(context)
        opened.enter_context(BaseTorchFunctionMode())
        opened.callback(torch.set_autocast_cache_enabled, is_cached)
        torch.set_autocast_cache_enabled(False)
        yield


def check_graph(module: nn.Module) -> None:
    """Raises RuntimeError where a module that is to have a graph runs without one."""
    if not torch.is_grad_enabled():
        raise RuntimeError(
            f"attribution: {type(module).__name__} was called with gradients switched off, as "
            "torch.no_grad and torch.utils.checkpoint with use_reentrant=True do: call the model "
            "without it"
        )


@dataclass
class Stack:
    """Blocks that follow each other."""

    blocks: list[nn.Module]  # in the order of the module list they are in
    name: str  # the list's
    source: Tensor | None = field(default=None, repr=False)  # [B, S, D], what entered them, if any


def stacks_of(model: nn.Module, caller: str) -> list[Stack]:
    """Returns the model's blocks, list by list; a model without a list of blocks is one block."""
    names = {module: name for name, module in model.named_modules()}
    stacks: dict[nn.Module, Stack] = {}
    paths = [(site.module, *site.ancestors) for site in find_attention(model)]
    paths += _mixers(model, (), {module for path in paths for module in path})
    for path in paths:
        lists = [i for i, module in enumerate(path) if isinstance(module, nn.ModuleList)]
        if not lists:
            lists = [i for i, module in enumerate(path) if isinstance(module, nn.Sequential)][:1]
        at = lists[-1] if lists and lists[-1] > 0 else len(path)
        holder = path[at] if at < len(path) else model
        # a list in a list is called by nobody: its blocks are
        block = next(module for module in path[:at][::-1] if not isinstance(module, nn.ModuleList))
        stack = stacks.setdefault(holder, Stack([], names.get(holder, "")))
        if block not in stack.blocks:
            stack.blocks.append(block)
    if len(stacks) > 1:
        stacks.pop(model, None)  # an attention beside the lists, such as one that pools
    if not stacks:
        raise ValueError(
            f"{caller}: model must have attention, nn.MultiheadAttention or a module that calls "
            f"transformers' interface or scaled_dot_product_attention, got {type(model).__name__}"
        )
    return list(stacks.values())


def the_stack_of(model: nn.Module, inputs: Mapping[str, Any], caller: str) -> Stack:
    """Returns the only list of blocks of a model that is called with tensors of one batch."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(inputs, Mapping):
        raise ValueError(f"{caller}: inputs must be arguments by name, got {type(inputs).__name__}")
    stacks = stacks_of(model, caller)
    if len(stacks) != 1:
        names = ", ".join(stack.name for stack in stacks)
        raise ValueError(
            f"{caller}: model must be one stack of blocks, got {len(stacks)} in "
            f"{type(model).__name__}, {names}: take one, such as model.get_encoder(), with inputs "
            "of its own"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            raise ValueError(
                f"{caller}: model must take [B, S, D], and {name or 'it'} has batch_first=False, "
                "[S, B, D]: make the model with batch_first=True, which has the same parameters"
            )
    shapes = {name: list(x.shape) for name, x in inputs.items() if is_of_batch(name, x)}
    if not shapes or any(not x or x[0] != next(iter(shapes.values()))[0] for x in shapes.values()):
        raise ValueError(
            f"{caller}: inputs must be tensors whose first axis is the batch, got {shapes}"
        )
    if any(0 in x for x in shapes.values()):
        raise ValueError(f"{caller}: inputs must hold a token, got {shapes}")
    return stacks[0]


def is_of_batch(name: str, x: Any) -> bool:
    """Whether an argument is a tensor of each sequence, not one mask of pairs for all."""
    is_of_pairs = name in ("mask", "src_mask", "attn_mask") and getattr(x, "ndim", 0) == 2
    return isinstance(x, Tensor) and not is_of_pairs


def sequences_of(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the arguments of each sequence of the batch."""
    count = next(x for name, x in inputs.items() if is_of_batch(name, x)).size(0)
    with torch.inference_mode(False):
        own = {
            n: x.clone() if is_of_batch(n, x) and x.is_inference() else x for n, x in inputs.items()
        }
    return [
        {name: x[b : b + 1] if is_of_batch(name, x) else x for name, x in own.items()}
        for b in range(count)
    ]


def _mixers(
    module: nn.Module, ancestors: tuple[nn.Module, ...], known: set[nn.Module]
) -> list[tuple[nn.Module, ...]]:
    """Returns paths of modules that mix tokens in code of their own, innermost first."""
    name, path = type(module).__name__, (module, *ancestors)
    if ancestors and module in known and not any(part in known for part in module.children()):
        return []
    inner = [found for child in module.children() for found in _mixers(child, path, known)]
    is_one = ancestors and module not in known and any(part in name for part in _MIXERS)
    return [path] if is_one and not inner else inner


@contextmanager
def entered(
    stack: Stack, make: Callable[[int, Tensor], Tensor], *, every_block: bool = False
) -> Iterator[None]:
    """Has the first block that runs, or every one, called with another tensor.

    It is made of the number of the block that runs and of ``[B, S, D]``, with which it was called.
    """
    count = 0

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        x = first_tensor(args, kwargs)
        if x is None or (count > 0 and not every_block):
            return None
        check_graph(module)
        with torch._C.DisableTorchFunction():
            y = make(count, x)
        count += 1
        return called_with(args, kwargs, x, y)

    with hooked(stack.blocks, before=hook):  # the first that runs, in whatever order
        yield


@contextmanager
def last_hidden(stacks: list[Stack]) -> Iterator[list[tuple[Stack, Tensor]]]:
    """Gathers what each stack makes, ``[B, L, D]``, as leaves in the order in which they run."""
    found: list[tuple[Stack, Tensor]] = []

    def hook(stack: Stack, module: nn.Module, args: Any, output: Any) -> Any:
        x = first_output(output)
        if not isinstance(x, Tensor):
            return None
        check_graph(module)
        leaf = x.detach().requires_grad_()
        found.append((stack, leaf))
        if hasattr(output, "_fields"):
            return output._replace(**{output._fields[0]: leaf})
        return (leaf, *output[1:]) if isinstance(output, (tuple, list)) else leaf

    with ExitStack() as opened:
        for stack in stacks:
            opened.enter_context(hooked(stack.blocks[-1:], after=partial(hook, stack)))
        yield found


def attention_of(model: nn.Module, stack: Stack) -> list[str]:
    blocks = set(stack.blocks)
    sites = find_attention(model)
    return [site.name for site in sites if blocks & {site.module, *site.ancestors}]


@contextmanager
def checkpointed(stacks: list[Stack], linear: LinearModel) -> Iterator[None]:
    """Has blocks keep their inputs alone, and run once more in the backward pass."""
    blocks = [block for stack in stacks for block in stack.blocks]
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    options |= {"determinism_check": "none", "context_fn": lambda: (nullcontext(), linear)}
    own = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, **options)
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward


@contextmanager
def called_linear(model: nn.Module, linear: LinearModel) -> Iterator[None]:
    """Has calls of the model be those of a linear map, within which it is entered."""
    with frozen(model.parameters()), activations_as_one(model, linear), torch.enable_grad():
        yield


def activation_bytes(stacks: Sequence[Stack], inputs: Mapping[str, Any]) -> int:
    """Returns the bytes of the linear map's graph where every block's numbers are kept.

    A token keeps ``2 (in + out)`` numbers of every linear module in a block, which covers the norms
    and activations between them.
    """
    tokens = [x.numel() for x in inputs.values() if isinstance(x, Tensor) and x.dim() == 2]
    weights = [p for stack in stacks for block in stack.blocks for p in block.parameters()]
    item = max(2, weights[0].element_size()) if weights else 4
    kept = sum(2 * (p.shape[0] + p.shape[1]) for p in weights if p.dim() == 2)
    return max(tokens, default=256) * kept * item


def logits_of(output: Any, caller: str) -> Tensor:
    found: Any = output.get("logits") if isinstance(output, Mapping) else output
    found = getattr(output, "logits", found)
    if not isinstance(found, Tensor) or found.dim() not in (2, 3):
        is_tensor = isinstance(found, Tensor)
        kind = f"logits {list(found.shape)}" if is_tensor else type(output).__name__
        raise ValueError(
            f"{caller}: the model must give logits [B, V] or [B, L, V], got {kind}: take one with "
            "a head, or a function of its output as target"
        )
    return found


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def products_of(gradients: Sequence[Tensor | None], sources: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields gradients times numbers in float64, 0 where there is no gradient."""
    for gradient, x in zip(gradients, sources, strict=True):
        if gradient is None:
            yield x.new_zeros(x.shape, dtype=torch.float64)
        else:  # a vector that nothing reads may hold NaN
            products = gradient.detach().double() * x.detach().double()
            yield products.masked_fill(gradient == 0, 0)


def takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
