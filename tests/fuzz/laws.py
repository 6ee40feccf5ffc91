"""Other calls of the same meaning as one of attention, and what must hold of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import ikattn
from devices import DEVICE
from fuzz.condition import Attention, of_heads
from fuzz.draws import integers, uniform
from fuzz.holding import Wrong, assert_bits
from fuzz.tried import Tried
from ikattn.ops.magnitude import LearnedOrder
from rank_programs import on_two_ranks

LAWS: dict[str, Callable[[Tried], None]] = {}  # of this device
WEIGHTS: dict[str, int] = {}


def law(
    weight: int, of: str = "any device"
) -> Callable[[Callable[[Tried], None]], Callable[[Tried], None]]:
    def add(function: Callable[[Tried], None]) -> Callable[[Tried], None]:
        WEIGHTS[function.__name__] = weight
        LAWS[function.__name__] = function if of in ("any device", DEVICE) else lambda _: None
        return function

    return add


@law(10)
def twice(t: Tried) -> None:
    t.assert_same_bits("the same call twice")


@law(6, of="cpu")
def threads(t: Tried) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        t.assert_same_bits("another number of threads")
    finally:
        torch.set_num_threads(before)


def item(arguments: dict[str, Any], b: int, B: int) -> dict[str, Any]:
    """Returns the call of one batch item."""

    def part(name: str, dims: int) -> Tensor | None:
        x = arguments[name]
        return x[b : b + 1] if x is not None and x.dim() == dims and x.shape[0] == B else x

    dims = {"query": 4, "key": 4, "value": 4, "w1": 4, "w2": 4, "key_bias": 3, "attn_mask": 4}
    return arguments | {name: part(name, of) for name, of in dims.items()}


@law(10)
def batch_items_alone(t: Tried) -> None:
    if t.call.dropout or t.call.B < 2:
        return
    b = t.call.seed % t.call.B
    wanted = [x for x in t.wanted if x in ("query", "key", "value")]
    own, incoming = item(t.arguments, b, t.call.B), t.incoming[b : b + 1]
    output, gradients = t.run(own, incoming, wanted)
    whole = [t.output[b : b + 1], *(t.gradients[x][b : b + 1] for x in wanted)]
    assert_bits("a batch item alone", whole, [output, *gradients.values()])


@law(8)
def permuted_keys(t: Tried) -> None:
    call = t.call
    if call.causal or call.dropout:
        return
    order = torch.randperm(call.S, generator=torch.Generator().manual_seed(call.seed))
    changed = dict(t.arguments)
    for name, axis in (("key", 2), ("value", 2), ("key_bias", -1), ("attn_mask", -1)):
        x = changed[name]
        if x is not None and x.dim() and x.shape[axis] == call.S:
            changed[name] = x.index_select(axis, order)
    output, _ = t.run(changed, wanted=[])
    t.compare("output of permuted keys", output, t.truth.output)


@law(8)
def hidden_keys_appended(t: Tried) -> None:
    call, more = t.call, 1 + t.call.seed % 70
    if call.dropout or call.S == 0:
        return
    B, H, S = call.B, call.H, call.S
    changed = dict(t.arguments)
    for name in ("key", "value"):
        x = changed[name]
        changed[name] = torch.cat([x, x.new_full((B, call.G, more, x.shape[3]), math.nan)], 2)
    bias, mask = changed["key_bias"], changed["attn_mask"]
    if mask is not None and mask.dim():
        mask = mask.expand(*mask.shape[:-1], S)
        changed["attn_mask"] = torch.cat([mask, mask[..., :1].expand(*mask.shape[:-1], more)], -1)
    heads = H if bias is None or bias.dim() < 2 else bias.shape[-2]
    bias = torch.zeros(1, dtype=t.arguments["w1"].dtype) if bias is None else bias
    bias = bias.expand(*(bias.shape[:-1] if bias.dim() > 1 else (heads,)), S)
    changed["key_bias"] = torch.cat([bias, bias.new_full((*bias.shape[:-1], more), -math.inf)], -1)
    wanted = [x for x in t.wanted if x in ("query", "key", "value", "w1", "w2")]
    output, gradients = t.run(changed, wanted=wanted)
    truth = t.truth_for(changed)
    t.compare("output with hidden keys", output, truth.output)
    bounds = truth.gradients(t.incoming, wanted) if wanted else {}
    for name, found in gradients.items():
        own = found[:, :, :S] if name in ("key", "value") else found
        t.compare(f"gradient of {name} with hidden keys", own, bounds[name])
        if name in ("key", "value") and bool((found[:, :, S:] != 0).any()):
            raise Wrong(f"a hidden {name} has a gradient")


@law(6)
def groups_repeated(t: Tried) -> None:
    call = t.call
    if call.G == call.H:
        return
    changed = dict(t.arguments)
    for name, axis in (("key", 1), ("value", 1), ("w1", -3), ("w2", -3), ("key_bias", -2)):
        x = changed[name]
        if x is not None and x.dim() >= -axis and x.shape[axis] == call.G:
            changed[name] = x.repeat_interleave(call.H // call.G, axis)
    output, _ = t.run(changed | {"enable_gqa": False}, wanted=[])
    t.compare("output of repeated groups", output, t.truth_for(changed).output)


@law(6)
def causal_as_mask(t: Tried) -> None:
    call = t.call
    if not call.causal:
        return
    tril = torch.ones(call.L, call.S, dtype=torch.bool).tril()
    mask = t.arguments["attn_mask"]
    if mask is None:
        mask = tril
    elif mask.dtype == torch.bool:
        mask = mask & tril
    else:
        mask = torch.where(tril, mask, -math.inf).to(mask.dtype)
    changed = t.arguments | {"is_causal": False, "attn_mask": mask}
    output, _ = t.run(changed, wanted=[])
    t.compare("output of causal as a mask", output, t.truth_for(changed).output)


@law(10)
def weights(t: Tried) -> None:
    given = {name: x for name, x in t.arguments.items() if name != "value"}
    function = {"function": ikattn.implicit_kernel_weights}
    found, _ = t.run(given, wanted=[], **function)
    t.compare("weights", found, t.truth.weights)
    mean, bound = (x.mean(1) for x in t.truth.weights)
    averaged, _ = t.run(given | {"average_heads": True}, wanted=[], **function)
    rounded = bound + 2 * torch.finfo(t.call.torch_dtype).eps * mean
    t.compare("averaged weights", averaged, (mean, rounded))
    wanted = [x for x in t.wanted if x != "value"]
    if not wanted or not found.numel():
        return
    # A weight is the output of a value that is 1 at its key alone.
    incoming = integers(t.call.seed + 40, -4, 4, *found.shape).to(found)
    _, gradients = t.run(given, incoming, wanted, **function)
    value = torch.eye(t.call.S).expand(t.call.B, 1, -1, -1)
    of_weights = Attention(given | {"value": value}, t.truth.arithmetic, t.keep)
    bounds = of_weights.gradients(incoming, wanted)
    for name, gradient in gradients.items():
        t.compare(f"gradient of {name} by weights", gradient, bounds[name])


@law(6)
def packed(t: Tried) -> None:
    """Packs the items, some with fewer queries, after sequences of keys that nobody reads."""
    call, given = t.call, t.arguments
    is_ragged = not call.causal and call.seed % 2 == 0
    bad = given["attn_mask"] is not None or (call.causal and call.L != call.S)
    if bad or call.dropout or not call.B * call.S:
        return
    rows = [call.L - (call.seed >> 2 * b) % min(call.L + 1, 4) * is_ragged for b in range(call.B)]
    unread = (call.seed >> 20) % 3 * is_ragged  # keys before each item

    def tokens(x: Tensor, of_keys: bool, rubbish: float = math.nan) -> Tensor:
        parts = []
        for b in range(call.B):
            if of_keys:
                parts.append(x.new_full((unread, x.shape[1], x.shape[3]), rubbish))
            parts.append(x[b].transpose(0, 1)[: call.S if of_keys else rows[b]])
        return torch.cat(parts)

    bias = given["key_bias"]
    if bias is not None:
        bias = bias.expand(call.B, bias.shape[-2] if bias.dim() > 1 else 1, call.S)
        bias = tokens(bias.unsqueeze(-1), True, 0.0).squeeze(-1).T
    of_items = [x for b in range(call.B) for x in ([b, b] if unread else [b])]
    w1, w2 = (
        x if x is None or x.dim() == 3 else x.expand(call.B, *x.shape[1:])[of_items]
        for x in (given["w1"], given["w2"])
    )
    lengths_q = [n for b in range(call.B) for n in ([0, rows[b]] if unread else [rows[b]])]
    lengths_k = [n for _ in range(call.B) for n in ([unread, call.S] if unread else [call.S])]
    ends = (torch.tensor([0, *x]).cumsum(0) for x in (lengths_q, lengths_k))
    changed = {
        "q": tokens(given["query"], False), "k": tokens(given["key"], True),
        "v": tokens(given["value"], True), "w1": w1, "w2": w2, "cu_seqlens_q": next(ends),
        "cu_seqlens_k": next(ends), "causal": call.causal, "p": call.p, "key_bias": bias,
        "eps": call.eps, "magnitude_scale": call.scale,
    }  # fmt: skip
    output, _ = t.run(changed, wanted=[], function=ikattn.implicit_kernel_attention_varlen)
    at = 0
    for b in range(call.B):
        found = output[at : at + rows[b]].transpose(0, 1)
        truth, bound = (x[b, :, : rows[b]] for x in t.truth.output)
        t.compare("packed output", found, (truth, bound))
        at += rows[b]


@law(4, of="cpu")
def in_batch_mode(t: Tried) -> None:
    call = t.call
    if call.dropout or call.L < 2:
        return
    with ikattn.deterministic("batch"):
        whole, _ = t.run(t.arguments, wanted=[])
        t.compare("output in batch mode", whole, t.truth_for(t.arguments).output)
        first = 1 + call.seed % call.L
        rows = t.arguments | {"query": t.arguments["query"][:, :, :first]}
        mask = rows["attn_mask"]
        if mask is not None and mask.dim() > 1 and mask.shape[-2] == call.L:
            rows["attn_mask"] = mask[..., :first, :]
        part, _ = t.run(rows, wanted=[])
        of_rows, of_all = (ikattn.which_kernels(**x).forward for x in (rows, t.arguments))
        if of_rows == of_all and of_all.algorithm != "linear":
            assert_bits("some rows in batch mode", [whole[:, :, :first]], [part])


def _keeps_scores(t: Tried) -> bool:
    """Tells whether a composition of torch's operators keeps the digits of scores.

    It does not beside large offsets, nor where torch rounds its own products to bfloat16.
    """
    if t.call.medium and torch.cpu._is_amx_tile_supported():
        return False
    offsets = [t.arguments[x] for x in ("key_bias", "attn_mask") if t.arguments[x] is not None]
    return all(
        float(x[x.isfinite()].abs().max()) < 1e4
        for x in offsets
        if x.is_floating_point() and bool(x.isfinite().any())
    )


@law(4, of="cpu")
def reference(t: Tried) -> None:
    if t.call.values == "special" or not _keeps_scores(t):
        return
    output, _ = t.run(t.arguments, wanted=[], function=ikattn.reference.implicit_kernel_attention)
    t.compare("the composition's output", output, t.truth.output, 2)


@law(3, of="cpu")
def vmapped(t: Tried) -> None:
    call = t.call
    is_empty = not call.B * call.S * call.L
    if call.values == "special" or call.dropout or is_empty or not _keeps_scores(t):
        return
    named = {x: t.arguments[x] for x in ("query", "key", "value")}
    others = {x: y for x, y in t.arguments.items() if x not in named}
    twice = {name: torch.stack([x, x.flip(0)]) for name, x in named.items()}

    def call_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ikattn.implicit_kernel_attention(query, key, value, **others)

    output = torch.func.vmap(call_of)(*twice.values())
    t.compare("output under vmap", output[0], t.truth.output, 2)


@law(3, of="cpu")
def forward_derivative(t: Tried) -> None:
    call = t.call
    is_extreme = call.values in ("special", "wide", "denormal")
    if not t.wanted or is_extreme or not call.L * call.S * call.B or not _keeps_scores(t):
        return
    dense = {"memory_format": torch.contiguous_format}
    named = {x: t.arguments[x].detach().clone(**dense) for x in t.wanted}
    others = {x: y for x, y in t.arguments.items() if x not in named}
    tangents = {}
    for i, (name, x) in enumerate(named.items()):
        step = integers(call.seed + 90 + i, -2, 2, *x.shape)
        tangents[name] = torch.where(x.isfinite(), step, 0.0).to(x.dtype)

    def call_of(given: dict[str, Tensor]) -> Tensor:
        return ikattn.implicit_kernel_attention(**others, **given)

    _, forward = torch.func.jvp(call_of, (named,), (tangents,))
    found = (forward.double() * self_or_zero(t.incoming)).sum()
    truth = sum((self_or_zero(t.bounds[x][0]) * y.double()).sum() for x, y in tangents.items())
    bound = sum((t.bounds[x][1] * y.double().abs()).sum() for x, y in tangents.items())
    size = (forward.double().abs() * t.incoming.double().abs()).sum()
    bound = bound + 0.05 * torch.finfo(call.torch_dtype).eps ** 0.5 * size
    if float((found - truth).abs()) > 4 * float(bound) + 1e-9:
        raise Wrong(f"the forward derivative is {float(found)}, the backward's {float(truth)}")


def self_or_zero(x: Tensor) -> Tensor:
    return x.double().nan_to_num(0.0, 0.0, 0.0)


@law(4)
def forgetting(t: Tried) -> None:
    """Gives tokens gates, whose summed logarithms the truth has as a mask of pairs."""
    call, n = t.call, min(t.call.L, t.call.S)
    is_composed = DEVICE != "cpu"  # and NaN in a composition reaches more gradients
    if call.dropout or (is_composed and call.values == "special"):
        return
    bias = t.arguments["key_bias"]
    is_of_keys = bias is not None and bias.dim() > 0 and bias.shape[-1] == call.S
    cut = {x: t.arguments[x][:, :, :n] for x in ("query", "key", "value")}
    cut |= {"attn_mask": None, "is_causal": True, "key_bias": bias[..., :n] if is_of_keys else bias}
    steps = integers(call.seed + 110, 0, 8, call.B, (1, call.G, call.H)[call.seed % 3], n)
    steps = steps * (0.0, 0.01, 1.0, 10.0)[call.seed // 3 % 4]
    closed = uniform(call.seed + 111, *steps.shape) < 0.02
    log_decay = (-steps).masked_fill(closed, -math.inf)
    given = t.arguments | cut | {"log_decay": log_decay.to(t.arguments["w1"].dtype)}
    wanted = [x for x in t.wanted if x in ("query", "key", "value", "w1", "w2")]
    both = [*wanted, "log_decay"] if wanted else []
    output, gradients = t.run(given, t.incoming[:, :, :n], both)
    closed[..., :1] = True  # nothing is before the first
    total = given["log_decay"].double().masked_fill(closed, 0.0).cumsum(-1)
    total, part = (of_heads(x, 1, call.H) for x in (total, closed.cumsum(-1)))
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril()
    decay = decay.masked_fill(part.unsqueeze(-1) != part.unsqueeze(-2), -math.inf)
    decay = decay.expand(call.B, call.H, n, n)
    # Sums have a number above all logits for each gate of 0.
    logits = t.truth.logits[t.truth.logits.isfinite()]
    largest = float(logits.abs().max()) if logits.numel() else 0.0
    how, size = t.truth.arithmetic, float(total.abs().max()) if n and call.B else 0.0
    size += (1000 + 2 * largest) * float(part.max()) if n and call.B else 0.0
    how = replace(how, linear=True, unit=max(how.unit, 2.0**-53 * size))  # sums in float64
    truth = Attention(t.arguments | cut | {"attn_mask": decay}, how)
    t.compare("output with gates", output, truth.output, 4)
    if not wanted:
        return
    bounds = truth.gradients(t.incoming[:, :, :n], [*wanted, "attn_mask"])
    # A gate is in the bias of its token and of all later ones.
    of_pairs, off = bounds.pop("attn_mask")
    off = off.sum(-2) + off.sum(-1) + 8 * how.unit * of_pairs.abs().sum(-2)
    of_gates = [
        x.flip(-1).cumsum(-1).flip(-1).unflatten(1, (steps.shape[1], -1)).sum(2)
        for x in (-of_pairs.sum(-2), off)
    ]
    bounds["log_decay"] = (
        of_gates[0].masked_fill(closed, 0.0),
        of_gates[1] + torch.finfo(given["log_decay"].dtype).eps * of_gates[0].abs(),
    )
    for name, found in gradients.items():
        t.compare(f"gradient of {name} with gates", found, bounds[name], 4)


@law(3, of="cpu")
def fake(t: Tried) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = mode.from_tensor
        given = {x: faked(y) if isinstance(y, Tensor) else y for x, y in t.arguments.items()}
        output = ikattn.implicit_kernel_attention(**given)
    told, true = ((x.shape, x.dtype, x.stride()) for x in (output, t.output))
    if told != true:
        raise Wrong(f"the fake output has shape, type and strides {told}, the true one {true}")


@law(3, of="cpu")
def autocast(t: Tried) -> None:
    if t.call.dtype != "float32" or t.call.values in ("special", "wide"):
        return
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = t.run(t.arguments, wanted=[])
    low = t.arguments | {x: t.arguments[x].to(torch.bfloat16) for x in ("query", "key", "value")}
    expected, _ = t.run(low, wanted=[])
    assert_bits("under autocast", [expected], [found])


@law(3, of="cpu")
def learned_order(t: Tried) -> None:
    call, wide = t.call, t.arguments["w1"].dtype
    has_order = call.p not in (None, 1.0) and call.scale is None and call.G == call.H
    if not has_order or call.values == "special" or call.bias or call.dropout:
        return
    if wide.itemsize < 4 or not call.S:
        return
    g = LearnedOrder(call.H, call.p, dtype=torch.float64)(t.arguments["key"]).to(wide).detach()
    output, _ = t.run(t.arguments | {"p": None, "key_bias": g}, wanted=[])
    t.compare("output with a learned order", output, t.truth.output, 4)


@law(2, of="cpu")
def second_derivative(t: Tried) -> None:
    call = t.call
    wanted = [x for x in t.wanted if x in ("query", "key", "value", "w1")]
    is_empty = call.L * call.S * call.B * call.d_v == 0
    if (
        call.dtype != "float64"
        or call.values != "normal"
        or is_empty
        or not set(wanted) - {"value"}
    ):
        return
    values, step = [], min(1e-4, 0.03 * math.sqrt(call.eps))  # weights bend where s^2 is near eps
    if call.p == 1.0 and "key" in wanted and bool((t.arguments["key"].abs() < 5 * step).any()):
        return  # the norm bends there
    given = t.arguments | {x: t.arguments[x].detach().requires_grad_() for x in wanted}
    output = ikattn.implicit_kernel_attention(**given)
    first = torch.autograd.grad(output, [given[x] for x in wanted], t.incoming, create_graph=True)
    along = [integers(call.seed + 60 + i, -2, 2, *x.shape) for i, x in enumerate(first)]
    inner = sum((x * y).sum() for x, y in zip(first, along, strict=True))
    second = torch.autograd.grad(inner, [given[x] for x in wanted], allow_unused=True)
    steps = [integers(call.seed + 70 + i, -2, 2, *x.shape) for i, x in enumerate(first)]
    found = sum(float((x * y).sum()) for x, y in zip(second, steps, strict=True) if x is not None)
    for h in (step, -step, 2 * step, -2 * step):
        moved = {x: t.arguments[x] + h * y for x, y in zip(wanted, steps, strict=True)}
        truth = Attention(t.arguments | moved, t.truth.arithmetic, t.keep)
        gradients = truth.gradients(t.incoming, wanted)
        products = (gradients[x][0] * y for x, y in zip(wanted, along, strict=True))
        values.append(sum(float(x.sum()) for x in products))
    one, two = (values[0] - values[1]) / (2 * step), (values[2] - values[3]) / (4 * step)
    truth, unsure = (4 * one - two) / 3, abs(one - two) + 1e-4 * max(map(abs, values))
    size = sum(float(x.abs().max()) for x in second if x is not None and x.numel())
    if abs(found - truth) > 2 * unsure + 1e-6 * size + 1e-7:
        raise Wrong(f"the second derivative is {found}, by differences {truth}")


@law(4, of="cpu")
def over_ranks(t: Tried) -> None:
    call = t.call
    is_empty = not call.B * call.L * call.S
    if call.mask or call.dropout or is_empty or call.frequencies not in ("H", "G"):
        return
    if (call.causal and call.L != call.S) or call.values == "special":
        return
    bias = t.arguments["key_bias"]
    wanted = [x for x in t.wanted if x != "key_bias" or bias.shape[-1] == call.S]
    output, gradients = on_two_ranks(call, wanted)
    # Parts are rounded before they are merged, by what their normalizers say.
    how, size = t.truth.arithmetic, float(t.truth.log_z.abs().max())
    how = replace(how, unit=how.unit * (8 + 4 * size) + 2 * how.stored, linear=True)
    truth = Attention(t.arguments, how)
    truth.floor = truth.floor + how.unit * (float(truth.v.abs().max()) if call.d_v else 0.0)
    t.compare("output of two ranks", output, truth.output)
    bounds = truth.gradients(t.incoming, wanted) if wanted else {}
    for name, found in gradients.items():
        found = found.reshape(t.arguments[name].shape)
        t.compare(f"gradient of {name} of two ranks", found, bounds[name])


@law(1, of="cpu")
def compiled(t: Tried) -> None:
    if t.call.seed % 20 or t.call.dropout:
        return
    torch._dynamo.reset()
    function = torch.compile(ikattn.implicit_kernel_attention, backend="aot_eager")
    t.assert_same_bits("compiled", function=function)
