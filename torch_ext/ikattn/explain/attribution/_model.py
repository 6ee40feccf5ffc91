"""What attribution needs of a model: its blocks, the vectors that enter them, and its logits.

Sizes: B batch, S source tokens, L tokens that logits belong to, D model size, V logits.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ikattn.explain.attribution._linear import LinearModel, activations_as_one
from ikattn.recorder.calls.hooks import Hook
from ikattn.recorder.calls.modes import without_compiled_code
from ikattn.recorder.plan.resolvers import find_attention
from ikattn.recorder.sums.tensors import first_tensor

__all__ = [
    "Stack",
    "alone",
    "attention_of",
    "called_linear",
    "checkpointed",
    "frozen_parameters",
    "is_of_batch",
    "last_hidden",
    "logits_of",
    "replaced",
    "stacks_of",
    "takes",
    "the_stack_of",
]

_LOCK = threading.RLock()  # two threads would meet each other's hooks
_MIXERS = ("Attention", "Mixer", "TimeMix", "Mamba", "SSM")


@contextmanager
def alone(model: nn.Module, caller: str) -> Iterator[None]:
    """Calls of the model in this context are those of one thread, and of the model as written.

    There is no inference mode, whose tensors have no gradients, no graph of torch.compile, none of
    torch's fused layers, which hide their parts, and no weight that autocast has kept.

    Raises:
        ValueError: The model is in training, or was made in inference mode.
        RuntimeError: A transform of torch.func, or a compiled function, calls it.
    """
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    if is_transformed or torch.compiler.is_compiling():
        within = "a transform of torch.func" if is_transformed else "a function of torch.compile"
        raise RuntimeError(
            f"{caller}: it takes gradients of its own, and was called inside {within}, which does "
            "not let it: call it outside"
        )
    if model.training:
        raise ValueError(f"{caller}: model must be in eval mode, got one in training")
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
            f"attribution: {type(module).__name__} runs in torch.no_grad, of the model's own or of "
            "torch.utils.checkpoint with use_reentrant=True, and has no gradients: call the model "
            "without it"
        )


@dataclass
class Stack:
    """Blocks that follow each other.

    Attributes:
        blocks: In the order of the module list they are in.
        name: Of that list.
        source: ``[B, S, D]``, what entered the first block; None until it has run.
    """

    blocks: list[nn.Module]
    name: str
    source: Tensor | None = field(default=None, repr=False)


def stacks_of(model: nn.Module, caller: str) -> list[Stack]:
    """The model's blocks, list by list; a model without a list of blocks is one block.

    Raises:
        ValueError: The model has no attention.
    """
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
        # of lists in a list, which nobody calls, the blocks
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
    """The only list of blocks of a model that is called with tensors of one batch.

    Raises:
        ValueError: It is not so.
    """
    if not isinstance(inputs, Mapping):
        raise ValueError(f"{caller}: inputs must be arguments by name, got {type(inputs).__name__}")
    stacks = stacks_of(model, caller)
    if len(stacks) != 1:
        names = ", ".join(stack.name for stack in stacks)
        raise ValueError(
            f"{caller}: model must be one stack of blocks, got {names}: take one, such as "
            "model.get_encoder(), with inputs of its own"
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


def _mixers(
    module: nn.Module, ancestors: tuple[nn.Module, ...], known: set[nn.Module]
) -> list[tuple[nn.Module, ...]]:
    """Paths of modules that mix tokens in code of their own, innermost first."""
    name = type(module).__name__
    if ancestors and module not in known and any(part in name for part in _MIXERS):
        return [(module, *ancestors)]
    if ancestors and module in known and not any(part in known for part in module.children()):
        return []
    return [
        path for child in module.children() for path in _mixers(child, (module, *ancestors), known)
    ]


@contextmanager
def replaced(stack: Stack, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The first block of the stack is called with another tensor, when it is called first.

    Args:
        stack: Its ``source`` becomes what ``make`` gave.
        make: Called with ``[B, S, D]``.
    """
    stack.source = None

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = first_tensor(args, kwargs)
        if stack.source is not None or x is None:
            return None
        check_graph(module)
        y = stack.source = make(x)
        changed = tuple(y if each is x else each for each in args)
        return changed, {name: y if each is x else each for name, each in kwargs.items()}

    # of blocks that are skipped or called in another order, the first that runs
    handles = [
        block.register_forward_pre_hook(Hook(hook), with_kwargs=True, prepend=True)
        for block in stack.blocks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def last_hidden(stacks: list[Stack]) -> Iterator[list[tuple[Stack, Tensor]]]:
    """What each stack makes, ``[B, L, D]``, as a leaf that requires gradients, as they run."""
    found: list[tuple[Stack, Tensor]] = []

    def hook(stack: Stack, module: nn.Module, args: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(x, Tensor):
            return None
        check_graph(module)
        leaf = x.detach().requires_grad_()
        found.append((stack, leaf))
        if hasattr(output, "_fields"):
            return output._replace(**{output._fields[0]: leaf})
        return (leaf, *output[1:]) if isinstance(output, (tuple, list)) else leaf

    handles = [
        stack.blocks[-1].register_forward_hook(Hook(partial(hook, stack))) for stack in stacks
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def attention_of(model: nn.Module, stack: Stack) -> list[str]:
    """The names of the attention in a stack's blocks."""
    blocks = set(stack.blocks)
    sites = find_attention(model)
    return [site.name for site in sites if blocks & {site.module, *site.ancestors}]


@contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """No parameter requires gradients."""
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@contextmanager
def checkpointed(stacks: list[Stack], linear: LinearModel) -> Iterator[None]:
    """Blocks keep what enters them and run once more in the backward pass."""
    blocks = [block for stack in stacks for block in stack.blocks]

    def twice(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(
                forward,
                *args,
                use_reentrant=False,
                preserve_rng_state=False,
                determinism_check="none",
                context_fn=lambda: (nullcontext(), linear),
                **kwargs,
            )

        return call

    own = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = twice(block.forward)
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            if forward is None:
                vars(block).pop("forward", None)
            else:
                block.forward = forward


@contextmanager
def called_linear(model: nn.Module, linear: LinearModel) -> Iterator[None]:
    """A context in which calls of the model are those of the linear map."""
    with frozen_parameters(model), activations_as_one(model, linear), torch.enable_grad(), linear:
        yield


def logits_of(output: Any, caller: str) -> Tensor:
    """The logits of what a model gave.

    Raises:
        ValueError: There are none.
    """
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("logits")
    if found is None and isinstance(output, Tensor):
        found = output
    if not isinstance(found, Tensor) or found.dim() not in (2, 3):
        kind = type(output).__name__
        if isinstance(found, Tensor):
            kind = f"logits {list(found.shape)}"
        raise ValueError(
            f"{caller}: the model must give logits [B, V] or [B, L, V], got {kind}: take one with "
            "a head, or a function of its output as target"
        )
    return found


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has an argument of that name."""
    return argument in inspect.signature(model.forward).parameters
