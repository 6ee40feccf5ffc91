"""The operators under what torch does to functions: checks, transforms, graphs, autocast."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import ikattn
from agreement import assert_close, assert_identical, direction, gradients
from samples import (
    BY_NAME,
    DIFFERENTIABLE,
    FEW,
    SAMPLES,
    TINY,
    Arguments,
    Sample,
    differentiable,
    name_of,
    of_weights,
    with_gradients,
)
from tiers import each, each_call

operators = torch.ops.ikattn
attention = ikattn.implicit_kernel_attention
weights = ikattn.implicit_kernel_weights


average_weights = functools.partial(weights, average_heads=True)


def features(query: Tensor, w1: Tensor, w2: Tensor | None, **_: Any) -> Tensor:
    """Returns the features of a call's queries."""
    return ikattn.ops.spectral_features(query, w1, w2)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "attention": attention,
    "weights": weights,
    "average weights": average_weights,
}
each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
each_tiny = pytest.mark.parametrize("sample", TINY, ids=name_of)

STATIONARY, SIDES, BOOL_MASK, BATCHED, DROPOUT = (
    BY_NAME[f"tiny, {name}"]
    for name in (
        *("stationary, no magnitude", "bias [BHS], mask [B1LS], p = 1.8"),
        *("bool mask with empty rows", "grouped, w [BH]", "dropout, causal, mask [L1]"),
    )
)
# torch.library.opcheck sees every option, strides of several kinds, more than one tile.
CHECKED = (
    *TINY,
    *FEW,
    *(BY_NAME[f"layout: {layout}"] for layout in ("strided", "expanded batch", "negated")),
    BY_NAME["causal, padding mask"],
)


def arguments_for(function: Callable[..., Tensor], arguments: Arguments) -> Arguments:
    """Only attention takes a value."""
    return arguments if function is attention else of_weights(arguments)


def positional(
    function: Callable[..., Tensor], arguments: Arguments, names: list[str] | None = None
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The call as a function of its differentiable arguments alone, and these."""
    arguments = arguments_for(function, arguments)
    names = differentiable(arguments) if names is None else names

    def call(*tensors: Tensor) -> Tensor:
        return function(**(arguments | dict(zip(names, tensors, strict=True))))

    return call, tuple(arguments[name].detach() for name in names)


def leaves(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.clone().requires_grad_() for tensor in tensors)


# --- Numerical differentiation --------------------------------------------------------------------


@each_tiny
@each_function
def test_gradients_are_those_of_small_differences(function, sample):
    """Backward and forward mode, one at a time and in batches."""
    call, tensors = positional(function, sample.arguments())
    modes = {"check_forward_ad": True, "check_batched_grad": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop.*")
        assert gradcheck(call, leaves(tensors), atol=1e-6, **modes)


@each_tiny
@each_function
def test_second_gradients_are_those_of_small_differences(function, sample):
    call, tensors = positional(function, sample.arguments())
    assert gradgradcheck(call, leaves(tensors), atol=1e-5)


@pytest.mark.parametrize("stationary", [False, True])
def test_gradients_of_features_are_those_of_small_differences(stationary: bool) -> None:
    arguments = Sample("tiny features", L=3, d=3, M=2, stationary=stationary).arguments()
    names = ["query", "w1"] if stationary else ["query", "w1", "w2"]
    call, tensors = positional(features, arguments, names)
    assert gradcheck(call, leaves(tensors), check_forward_ad=True)
    assert gradgradcheck(call, leaves(tensors))


# --- Registration ---------------------------------------------------------------------------------


@each_call(CHECKED, few=(), dtype=[torch.float64, torch.bfloat16])
def test_attention_is_registered_as_torch_expects(sample: Sample, dtype: torch.dtype) -> None:
    arguments = with_gradients(sample.arguments(dtype))
    torch.library.opcheck(operators.implicit_kernel_attention.default, (), arguments)


@each_call(CHECKED, few=(), average_heads=[False, True])
def test_weights_are_registered_as_torch_expects(sample: Sample, average_heads: bool) -> None:
    arguments = with_gradients(of_weights(sample.arguments()))
    arguments["average_heads"] = average_heads
    torch.library.opcheck(operators.implicit_kernel_weights.default, (), arguments)


def wanted_of(arguments: Arguments, names: Sequence[str], wanted: str) -> list[bool]:
    """For each of the names: does the backward operator compute its gradient?"""
    available = differentiable(arguments)
    chosen = {
        "all": available,
        "every second": available[::2],
        "query alone": ["query"],
        "none": [],
    }[wanted]
    return [name in chosen for name in names]


backwards = [(sample, "all") for sample in (*TINY, *FEW)] + [
    (sample, wanted)
    for sample in (STATIONARY, SIDES, BATCHED)
    for wanted in ("every second", "query alone", "none")
]
each_backward = pytest.mark.parametrize(("sample", "wanted"), backwards, ids=name_of)
each_backward_of_weights = each(("sample", "wanted"), backwards, {"average_heads": [False, True]})


@each_backward
def test_backward_of_attention_is_registered_as_torch_expects(sample: Sample, wanted: str) -> None:
    call = sample.arguments()
    output, log_normalizer = operators.implicit_kernel_attention(**call)
    options = {"wanted": wanted_of(call, DIFFERENTIABLE, wanted)}
    inputs = [call.pop(name) for name in ("query", "key", "value", "w1", "w2")]
    torch.library.opcheck(
        operators.implicit_kernel_attention_backward.default,
        (direction(output), *inputs, output, log_normalizer),
        call | options,
    )


@each_backward_of_weights
def test_backward_of_weights_is_registered_as_torch_expects(sample, wanted, average_heads):
    call = of_weights(sample.arguments()) | {"average_heads": average_heads}
    incoming = direction(weights(**call))
    names = [name for name in DIFFERENTIABLE if name != "value"]
    options = {"wanted": wanted_of(call, names, wanted)}
    inputs = [call.pop(name) for name in ("query", "key", "w1", "w2")]
    torch.library.opcheck(
        operators.implicit_kernel_weights_backward.default, (incoming, *inputs), call | options
    )


@pytest.mark.parametrize("stationary", [False, True])
def test_features_and_mask_are_registered_as_torch_expects(stationary: bool) -> None:
    arguments = Sample("registered features", stationary=stationary).arguments()
    x, w1 = (arguments[name].detach().requires_grad_() for name in ("query", "w1"))
    w2 = None if stationary else arguments["w2"].requires_grad_()
    torch.library.opcheck(operators.spectral_features.default, (x, w1, w2))
    incoming = direction(ikattn.ops.spectral_features(x, w1, w2))
    for wanted in ([True, True, not stationary], [False, True, False], [False] * 3):
        plain = (x.detach(), w1.detach(), None if w2 is None else w2.detach())
        torch.library.opcheck(
            operators.spectral_features_backward.default, (incoming, *plain, wanted)
        )
    torch.library.opcheck(
        operators.dropout_keep_mask.default, (torch.tensor([1, 2]), 1, 2, 3, 4, 0.5)
    )


def fake_copy(arguments: Arguments, mode: FakeTensorMode) -> Arguments:
    return {n: mode.from_tensor(x) if torch.is_tensor(x) else x for n, x in arguments.items()}


@each_call(SAMPLES, dtype=[torch.float32, torch.bfloat16], function=FUNCTIONS)
def test_fake_results_have_the_shapes_types_and_strides_of_real_ones(sample, dtype, function):
    arguments = arguments_for(function, sample.arguments(dtype))
    mode = FakeTensorMode()
    fake = fake_copy(arguments, mode)
    with mode:
        expected = [function(**fake), *gradients(function, fake).values()]
    found = [function(**arguments), *gradients(function, arguments).values()]
    for real, imagined in zip(found, expected, strict=True):
        for attribute in ("shape", "dtype", "device"):
            assert getattr(real, attribute) == getattr(imagined, attribute)
        assert real.stride() == imagined.stride() or real.numel() == 0


# --- torch.func -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["query", "key", "value", "w1", "key_bias", "attn_mask"])
def test_vmap_over_one_argument_shares_the_others(name: str) -> None:
    call, (tensor,) = positional(attention, SIDES.arguments(), [name])
    stack = torch.stack([tensor, -tensor], dim=-1)
    expected = torch.stack([call(tensor), call(-tensor)], dim=-1)
    assert_close(torch.vmap(call, in_dims=-1, out_dims=-1)(stack), expected, 1e-13)


def test_vmap_over_bool_masks_is_a_loop() -> None:
    arguments = BOOL_MASK.arguments()
    masks = torch.stack([arguments["attn_mask"], ~arguments["attn_mask"]])
    found = torch.vmap(lambda mask: attention(**(arguments | {"attn_mask": mask})))(masks)
    for i in range(2):
        assert_close(found[i], attention(**(arguments | {"attn_mask": masks[i]})), 1e-13)


def test_vmap_over_seeds_drops_differently() -> None:
    arguments = DROPOUT.arguments() | {"attn_mask": None}
    seeds = torch.tensor([[1, 2], [3, 4], [5, 6]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop.*")
        found = torch.vmap(lambda seed: attention(**(arguments | {"dropout_seed": seed})))(seeds)
    for i in range(3):
        assert_close(found[i], attention(**(arguments | {"dropout_seed": seeds[i]})), 1e-13)


def test_vmap_of_grad_gives_gradients_per_example() -> None:
    call, tensors = positional(attention, SIDES.arguments())
    incoming = direction(call(*tensors))
    stacks = tuple(torch.stack([x, -x, 0.5 * x]) for x in tensors)

    def loss(*inputs: Tensor) -> Tensor:
        return (call(*inputs) * incoming).sum()

    every = tuple(range(len(tensors)))
    found = torch.vmap(torch.func.grad(loss, argnums=every))(*stacks)
    for i in range(3):
        own = leaves(tuple(stack[i] for stack in stacks))
        expected = torch.autograd.grad(call(*own), own, incoming)
        for stack, truth in zip(found, expected, strict=True):
            assert_close(stack[i], truth, 1e-12, scale=1.0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def output_and_average(**arguments: Any) -> tuple[Tensor, Tensor]:
    return attention(**arguments), average_weights(**of_weights(arguments))


def with_gradients_of(function: Callable[..., tuple[Tensor, ...]], call: Arguments) -> list[Tensor]:
    """The results of a call, then its gradients."""
    call = with_gradients(call)
    outputs = function(**call)
    inputs = [call[name] for name in differentiable(call)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, [direction(x) for x in outputs])]


# The first pair differs from every other size, or the compiler would take them for the same symbol.
LENGTHS = ((9, 11), (5, 7), (70, 131), (64, 64))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("mask_kind", "dropout_p"), [("float", 0.0), ("float", 0.4), ("bool", 0.4)]
)
def test_compiled_once_for_every_length_it_computes_what_eager_does(mask_kind, dropout_p):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(output_and_average, backend=counter, fullgraph=True, dynamic=True)
    frames = 0
    for length, keys in LENGTHS:
        sample = Sample("compiled", B=3, L=length, S=keys, mask="B1LS", mask_kind=mask_kind)
        call = sample.arguments() | {"is_causal": True, "dropout_p": dropout_p}
        results = []
        for function in (compiled, output_and_average):
            torch.manual_seed(5)
            results.append(with_gradients_of(function, call))
        for got, expected in zip(*results, strict=True):
            assert_close(got, expected, 1e-12)
        frames = counter.frame_count if (length, keys) == LENGTHS[0] else frames
        assert counter.frame_count == frames, f"compiled again for {length} queries, {keys} keys"


# --- Autocast, checkpointing ----------------------------------------------------------------------


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=name_of)
@each_call(FEW)
def test_autocast_lowers_the_tokens_and_leaves_the_frequencies(sample, lower):
    arguments = sample.arguments(torch.float32)
    lowered = arguments | {n: arguments[n].to(lower) for n in ("query", "key", "value")}
    for function in FUNCTIONS.values():
        call = with_gradients(arguments_for(function, arguments))
        with torch.autocast("cpu", lower):
            output = function(**call)
        assert output.dtype == lower
        expected = arguments_for(function, lowered)
        assert_identical([output], [function(**expected)])
        names = differentiable(call)
        found = torch.autograd.grad(output, [call[n] for n in names], direction(output))
        for gradient, of_lowered in zip(found, gradients(function, expected).values(), strict=True):
            assert gradient.dtype == torch.float32
            assert_identical([gradient], [of_lowered.float()])


def test_autocast_lowers_the_features_but_not_their_angles() -> None:
    arguments = BY_NAME["15 queries, 17 keys"].arguments(torch.float32)
    call = {"x": arguments["query"], "w1": arguments["w1"], "w2": arguments["w2"]}
    with torch.autocast("cpu", torch.bfloat16):
        found = ikattn.ops.spectral_features(**call)
    lowered = call | {"x": call["x"].bfloat16()}
    assert found.dtype == torch.bfloat16
    assert_identical([found], [ikattn.ops.spectral_features(**lowered)])


def test_autocast_leaves_float64_alone_and_accepts_tokens_of_either_precision() -> None:
    """A projection may have run under autocast where a residual did not."""
    arguments, narrow = FEW[0].arguments(), FEW[0].arguments(torch.float32)
    expected = attention(**arguments)
    mixed = narrow | {"key": narrow["key"].bfloat16()}
    with torch.autocast("cpu", torch.bfloat16):
        assert_identical([attention(**arguments)], [expected])
        assert_identical([attention(**mixed)], [attention(**narrow)])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_dropout_is_the_same_in_both_forwards(use_reentrant: bool) -> None:
    arguments = Sample("checkpointed", L=20, S=30).arguments() | {"dropout_p": 0.4}
    call, tensors = positional(attention, arguments)
    results = []
    for function in (call, functools.partial(checkpoint, call, use_reentrant=use_reentrant)):
        inputs = leaves(tensors)
        torch.manual_seed(6)
        output = function(*inputs)
        torch.rand(3)
        output.backward(direction(output))
        results.append([output, *(x.grad for x in inputs)])
    assert_identical(*results)
