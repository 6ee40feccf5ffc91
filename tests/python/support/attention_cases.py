"""Calls of nn.MultiheadAttention that the drop-in must serve, and the formulas to check them by."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn

KERNELS = ("dot", "rbf", "implicit")
E, H, N, L, S = 12, 4, 3, 5, 6  # the head size, 3, is no power of two

Arguments = dict[str, Any]

each_kernel = pytest.mark.parametrize("kernel", KERNELS)

WEIGHTS = {
    "no weights": {"need_weights": False},
    "mean weights": {},
    "weights per head": {"average_attn_weights": False},
}
each_weights = pytest.mark.parametrize("wanted", WEIGHTS.values(), ids=WEIGHTS.keys())


def make(kernel: str, **options: Any) -> nn.MultiheadAttention:
    """A float64 module ("stock": torch's) in which every parameter differs from its default."""
    torch.manual_seed(0)
    if kernel == "stock":
        module = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    else:
        options = {"p": 3.0, "num_frequencies": 7, "seed": 0, **options}
        module = ikattn.MultiheadAttention(E, H, dtype=torch.float64, kernel=kernel, **options)
    torch.manual_seed(1)
    for name, parameter in module.named_parameters():
        if "spectral" not in name:
            nn.init.normal_(parameter, std=0.4)
    return module


def batch(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same at every call."""
    torch.manual_seed(4)
    return torch.randn(shape, dtype=dtype)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def ignore(*shape: int) -> Tensor:
    """A bool mask; in every row some key stays visible."""
    mask = torch.rand(shape) < 0.35
    mask[..., 0] = False
    return mask


def causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def self_attention(**masks: Any) -> Arguments:
    x = leaf(L, N, E)
    return {"query": x, "key": x, "value": x, **masks}


def cross_attention(kdim: int = E, vdim: int = E, **masks: Any) -> Arguments:
    return {"query": leaf(L, N, E), "key": leaf(S, N, kdim), "value": leaf(S, N, vdim), **masks}


def encoder_decoder() -> Arguments:
    memory = leaf(S, N, E)
    return {"query": leaf(L, N, E), "key": memory, "value": memory}


def unbatched(**masks: Any) -> Arguments:
    return {"query": leaf(L, E), "key": leaf(S, E), "value": leaf(S, E), **masks}


def single() -> Arguments:
    return {"query": leaf(1, 1, E), "key": leaf(1, 1, E), "value": leaf(1, 1, E)}


# name: options of the module, and arguments of forward, made anew each time, sequence first
CASES: dict[str, tuple[dict[str, Any], Callable[[], Arguments]]] = {
    "self attention": ({}, self_attention),
    "cross attention": ({}, cross_attention),
    "encoder-decoder": ({}, encoder_decoder),
    "no bias": ({"bias": False}, cross_attention),
    "kdim, vdim": ({"kdim": 7, "vdim": 5}, lambda: cross_attention(7, 5)),
    "kdim, no bias": ({"kdim": 7, "bias": False}, lambda: cross_attention(7)),
    "one query, one key": ({}, single),
    "unbatched": ({}, unbatched),
    "unbatched, padding": ({}, lambda: unbatched(key_padding_mask=ignore(S))),
    "unbatched, 3-D mask": ({}, lambda: unbatched(attn_mask=ignore(H, L, S))),
    "bool padding": ({}, lambda: cross_attention(key_padding_mask=ignore(N, S))),
    "float padding": ({}, lambda: cross_attention(key_padding_mask=leaf(N, S))),
    "bool 2-D mask": ({}, lambda: cross_attention(attn_mask=ignore(L, S))),
    "float 2-D mask": ({}, lambda: cross_attention(attn_mask=leaf(L, S))),
    "bool 3-D mask": ({}, lambda: cross_attention(attn_mask=ignore(N * H, L, S))),
    "float 3-D mask": ({}, lambda: cross_attention(attn_mask=leaf(N * H, L, S))),
    "two bool masks": (
        {},
        lambda: cross_attention(key_padding_mask=ignore(N, S), attn_mask=ignore(L, S)),
    ),
    "two float masks": (
        {},
        lambda: cross_attention(key_padding_mask=leaf(N, S), attn_mask=leaf(N * H, L, S)),
    ),
    "bool padding, float mask": (
        {},
        lambda: cross_attention(key_padding_mask=ignore(N, S), attn_mask=leaf(L, S)),
    ),
    "float padding, bool mask": (
        {},
        lambda: cross_attention(key_padding_mask=leaf(N, S), attn_mask=ignore(L, S)),
    ),
    "causal mask": ({}, lambda: self_attention(attn_mask=causal(L))),
    "causal hint": ({}, lambda: self_attention(attn_mask=causal(L), is_causal=True)),
    "causal hint, padding": (
        {},
        lambda: self_attention(
            attn_mask=causal(L), is_causal=True, key_padding_mask=ignore(N, L).double() * -9.0
        ),
    ),
    "bias_kv": ({"add_bias_kv": True}, cross_attention),
    "zero_attn": ({"add_zero_attn": True}, cross_attention),
    "bias_kv, zero_attn, bool masks": (
        {"add_bias_kv": True, "add_zero_attn": True},
        lambda: cross_attention(key_padding_mask=ignore(N, S), attn_mask=ignore(L, S)),
    ),
    "bias_kv, zero_attn, float masks": (
        {"add_bias_kv": True, "add_zero_attn": True},
        lambda: cross_attention(key_padding_mask=leaf(N, S), attn_mask=leaf(N * H, L, S)),
    ),
}

# name: masks, made for n sequences (None: unbatched) of length queries and s keys
MASKS: dict[str, Callable[[int | None, int, int], Arguments]] = {
    "none": lambda n, length, s: {},
    "bool padding": lambda n, length, s: {"key_padding_mask": _padding_mask(ignore, n, s)},
    "float padding": lambda n, length, s: {"key_padding_mask": _padding_mask(leaf, n, s)},
    "bool 2-D": lambda n, length, s: {"attn_mask": ignore(length, s)},
    "float 2-D": lambda n, length, s: {"attn_mask": leaf(length, s)},
    "bool 3-D": lambda n, length, s: {"attn_mask": ignore(_heads_of(n), length, s)},
    "float 3-D": lambda n, length, s: {"attn_mask": leaf(_heads_of(n), length, s)},
    "both bool": lambda n, length, s: {
        "key_padding_mask": _padding_mask(ignore, n, s),
        "attn_mask": ignore(length, s),
    },
    "both float": lambda n, length, s: {
        "key_padding_mask": _padding_mask(leaf, n, s),
        "attn_mask": leaf(_heads_of(n), length, s),
    },
    "bool padding, float mask": lambda n, length, s: {
        "key_padding_mask": _padding_mask(ignore, n, s),
        "attn_mask": leaf(_heads_of(n), length, s),
    },
    "float padding, bool mask": lambda n, length, s: {
        "key_padding_mask": _padding_mask(leaf, n, s),
        "attn_mask": ignore(length, s),
    },
}


def _heads_of(n: int | None) -> int:
    return H if n is None else n * H


def _padding_mask(make_mask: Callable[..., Tensor], n: int | None, s: int) -> Tensor:
    return make_mask(s) if n is None else make_mask(n, s)


def arguments_of(
    mask: str,
    is_batched: bool,
    batch_first: bool,
    sizes: tuple[int, int, int] = (N, L, S),
    kdim: int = E,
    vdim: int = E,
) -> Arguments:
    """Arguments of forward: random inputs that require grad, and masks."""
    n, length, keys = sizes
    torch.manual_seed(9)

    def sequence(count: int, size: int) -> Tensor:
        if not is_batched:
            return leaf(count, size)
        return leaf(n, count, size) if batch_first else leaf(count, n, size)

    inputs = {
        "query": sequence(length, E),
        "key": sequence(keys, kdim),
        "value": sequence(keys, vdim),
    }
    return inputs | MASKS[mask](n if is_batched else None, length, keys)


# Options of the module, all together
OPTIONS: list[dict[str, Any]] = [
    dict(zip(("kdim", "vdim", "add_bias_kv", "add_zero_attn", "bias"), values, strict=True))
    for values in itertools.product((None, 7), (None, 5), *[(False, True)] * 3)
]


def case(name: str, batch_first: bool) -> tuple[dict[str, Any], Arguments]:
    """Options and arguments of a case, the same at every call; query stays key where it was."""
    torch.manual_seed(2)
    options, make_arguments = CASES[name]
    arguments = make_arguments()
    if batch_first and arguments["query"].dim() == 3:
        inputs = [arguments[name] for name in ("query", "key", "value")]
        swapped = {id(x): x.detach().transpose(0, 1).requires_grad_() for x in inputs}
        arguments |= dict(zip(arguments, (swapped[id(x)] for x in inputs), strict=False))
    return {**options, "batch_first": batch_first}, arguments


def run(
    module: nn.MultiheadAttention,
    arguments: Arguments,
    forward: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
) -> dict[str, Tensor]:
    """Output, weights, and the gradients of a random loss in all parameters and arguments."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched")
        output, weights = (forward or module)(**arguments)
    results = {"output": output} if weights is None else {"output": output, "weights": weights}
    torch.manual_seed(3)
    loss = sum((x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in results.values())
    leaves = dict(module.named_parameters())
    leaves |= {name: x for name, x in arguments.items() if torch.is_tensor(x) and x.requires_grad}
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return results | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], context: str = "") -> None:
    assert actual.keys() == expected.keys(), context
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, msg=lambda text, n=name: f"{context}, {n}: {text}"
        )


def assert_as_precise_as_upstream(mask: str, wanted: Arguments, dtype: torch.dtype) -> None:
    """Both against float64, on inputs that are rounded to dtype whatever computes."""

    def results(kernel: str, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        rounded = {
            name: x.detach().to(dtype).to(compute_dtype) if x.is_floating_point() else x
            for name, x in arguments_of(mask, True, False).items()
        }
        module = make(kernel).to(dtype).to(compute_dtype)
        output: tuple[Tensor, Tensor | None] = module(**rounded, **wanted)
        return output

    for got, want, exact in zip(
        results("dot", dtype), results("stock", dtype), results("stock", torch.float64), strict=True
    ):
        if want is None:
            assert got is None
            continue
        assert got.dtype == want.dtype
        errors = [(x.double() - exact).abs().max().item() for x in (got, want)]
        rounding = torch.finfo(dtype).eps * exact.abs().max().item()
        assert errors[0] <= 2 * errors[1] + rounding, errors


def double_backward_case(
    kernel: str, options: dict[str, Any], mask: str
) -> tuple[Callable[..., tuple[Tensor, Tensor | None]], list[Tensor]]:
    """A small module as a function of everything that has a gradient, and all of that."""
    module = make(kernel, **options)
    arguments = arguments_of(mask, True, False, sizes=(2, 2, 3))
    names = [name for name, x in arguments.items() if x.requires_grad]
    fixed = {name: x for name, x in arguments.items() if name not in names}
    parameters = dict(module.named_parameters())

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        given = dict(zip(names, tensors[: len(names)], strict=True))
        state = dict(zip(parameters, tensors[len(names) :], strict=True))
        output, weights = torch.func.functional_call(module, state, (), {**given, **fixed})
        return output, weights

    return call, [arguments[name] for name in names] + list(parameters.values())


def explicit(
    module: ikattn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """MultiheadAttention.forward by the formulas: weights = similarity x magnitude, normalised."""
    is_batched = query.dim() == 3
    sequence_first = is_batched and not module.batch_first
    x = [t.transpose(0, 1) if sequence_first else t for t in (query, key, value)]
    x = [t if is_batched else t[None] for t in x]
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (0.0,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        (t @ w.T + b).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for t, w, b in zip(x, weights, biases, strict=True)
    )
    logits = _added_logits(
        q, k, key_padding_mask if is_batched else _first(key_padding_mask), attn_mask
    )
    if module.bias_k is not None:
        k, v = (
            _append(t, b.view(module.num_heads, 1, -1))
            for t, b in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        k, v = (_append(t, torch.zeros_like(t[0, :, :1])) for t in (k, v))
    logits = nn.functional.pad(logits, (0, k.size(2) - logits.size(3)))
    a = (log_similarity(module, q, k) + magnitude(module, k)[:, :, None] + logits).softmax(-1)
    output = module.out_proj((a @ v).transpose(1, 2).flatten(2))
    output = output.transpose(0, 1) if sequence_first else output
    a = (a.mean(1) if average_attn_weights else a) if need_weights else None
    return (output, a) if is_batched else (output[0], None if a is None else a[0])


def log_similarity(module: ikattn.MultiheadAttention, q: Tensor, k: Tensor) -> Tensor:
    """[N, H, L, d], [N, H, S, d] -> [N, H, L, S]."""
    if module.kernel != "implicit":
        difference = q[:, :, :, None] - k[:, :, None]
        return -difference.square().sum(-1) / (2 * math.sqrt(q.size(-1)))
    w1, w2 = module.spectral.frequencies()
    w2 = w1 if w2 is None else w2
    t1, t2, u1, u2 = (2 * math.pi * (x @ w) for x in (q, k) for w in (w1, w2))
    phi_q = torch.cat([t1.cos() + t2.cos(), t1.sin() + t2.sin()], -1)
    phi_k = torch.cat([u1.cos() + u2.cos(), u1.sin() + u2.sin()], -1)
    s = phi_q @ phi_k.transpose(-2, -1) / (4 * w1.size(-1))
    return (s.square() + 1e-5).log()


def magnitude(module: ikattn.MultiheadAttention, k: Tensor) -> Tensor:
    """[N, H, S, d] -> [N, H, S], the logarithm."""
    p = 2.0 if module.kernel == "dot" else module.p
    if p is None:
        return k.new_zeros(k.shape[:-1])
    return k.abs().pow(p).sum(-1).pow(2 / p) / (2 * math.sqrt(k.size(-1)))


def _added_logits(q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor:
    total = q.new_zeros(q.size(0), q.size(1), q.size(2), k.size(2))
    if padding is not None:
        total = total + _as_float(padding)[:, None, None]
    if mask is not None:
        total = total + _as_float(mask if mask.dim() == 2 else mask.view(total.shape))
    return total


def _as_float(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)


def _first(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[None]


def _append(x: Tensor, row: Tensor) -> Tensor:
    """[N, H, S, d] and [H, 1, d] -> [N, H, S + 1, d]."""
    return torch.cat([x, row.expand(x.size(0), -1, -1, -1)], dim=2)


def function_of(module: Any, function: Callable[..., Any], **new: Any) -> Callable[..., Any]:
    """``function`` with the parameters of ``module``, called like its forward."""

    def forward(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
        separate = {}
        if not module._qkv_same_embed_dim:
            separate = {f"{x}_proj_weight": getattr(module, f"{x}_proj_weight") for x in "qkv"}
            separate["use_separate_proj_weight"] = True
        return function(
            query,
            key,
            value,
            module.embed_dim,
            module.num_heads,
            module.in_proj_weight,
            module.in_proj_bias,
            module.bias_k,
            module.bias_v,
            module.add_zero_attn,
            module.dropout,
            module.out_proj.weight,
            module.out_proj.bias,
            training=module.training,
            **separate,
            **arguments,
            **new,
        )

    return forward


def kernel_options(module: Any) -> Arguments:
    """Returns the options of ``multi_head_attention_forward`` after upstream's."""
    if module.kernel != "implicit":
        return {"kernel": module.kernel, "p": module.p}
    w1, w2 = module.spectral.frequencies()
    return {"kernel": "implicit", "p": module.p, "w1": w1, "w2": w2}
