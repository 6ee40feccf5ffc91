"""Causal attention that forgets: each token has a gate in (0, 1] on what came before it.

The weight of key j for query i is multiplied by the gates of the tokens j + 1 to i. Logarithms of
gates are added up in float64: only differences of the sums count, and the sums reach hundreds.
Sizes as in ``ikattn.ops``, and K heads of the moments.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from ikattn._precision import lowered, widened, without_autocast
from ikattn.ops._fixed_kernel import added, check_broadcasts, check_floating, to_heads, with_heads
from ikattn.ops.attention import implicit_kernel_attention, spectral_features
from ikattn.ops.magnitude import check_order, log_magnitude
from ikattn.ops.moments import causal_attention_from_moments, no_moments
from ikattn.ops.options import AttentionOptions, changed

_NEAR = 128.0  # summed logarithms that float32 rounds by at most 4e-6
_CHUNK = 128  # tokens that sums take by pairs; times M, those up to which all pairs are faster
_FAR = 2.0**33  # what larger offsets of logits count as, in the operator, too


class ForgetGates(nn.Module):
    """The gates of tokens, sigmoid(weight . value + bias) for each head, from the token's value.

    At first they are the same for all tokens, and heads differ: those of the first keep some eight
    tokens, those of the last three thousand; a head alone keeps some hundred and fifty.
    """

    def __init__(self, num_heads: int, head_dim: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, **factory))
        self.bias = nn.Parameter(torch.empty(num_heads, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets all gates to their first values."""
        with torch.no_grad():
            self.weight.zero_()
            heads = len(self.bias)
            self.bias.copy_(torch.linspace(2.0, 8.0, heads) if heads > 1 else torch.tensor([5.0]))

    def forward(self, value: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Returns logarithms of gates [B, H, S], in float32 at least, of values [B, H, S, d_v].

        Hidden tokens, bool [B, S], have gates of 1, whatever they hold.
        """
        wide = widened(value)
        if hidden is not None:
            wide = wide.masked_fill(hidden[:, None, :, None], 0.0)
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        gates = logsigmoid((wide * weight.unsqueeze(-2)).sum(-1) + bias.unsqueeze(-1))
        return gates if hidden is None else gates.masked_fill(hidden[:, None], 0.0)


class _Gates(NamedTuple):  # of tokens [B or 1, heads or 1, S]
    total: Tensor  # float64, logarithms summed up to a token, of gates that are not 0
    closed: Tensor  # bool, whether a gate is 0


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    w1: Tensor
    w2: Tensor | None
    gates: _Gates
    options: AttentionOptions


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    log_decay: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Computes ``implicit_kernel_attention`` with gates.

    In short calls with sums near zero they are a bias of the keys. Other calls take moments, and
    pairs for rows whose digits sums in float32 would lose. Masks, dropout and batch-invariant bits
    take all pairs, in quadratic memory.
    """
    name = "implicit_kernel_attention"
    named: Any = changed(name, options, query)  # with the seed of dropout
    query, key, value = lowered(query, key, value)
    traced = is_traced(query)
    if not traced:
        torch.ops.ikattn.check_implicit_kernel_attention(query, key, value, w1, w2, **named)
    check_order(name, named.get("p", 2.0))
    gates = _gates_of(name, query, key, log_decay, named)
    call = _Call(query, key, value, w1, w2, gates, named)
    takes_pairs = named.get("attn_mask") is not None or named.get("dropout_p", 0.0) != 0.0
    takes_pairs = takes_pairs or query.size(2) == 0
    if takes_pairs or (not traced and torch.ops.ikattn.deterministic() == "batch"):
        return _by_pairs(call)
    with without_autocast(query.device):
        # A graph has no branches, and sums in float64 keep the digits of every row.
        if traced:
            return _by_moments(call, torch.float64)[0]
        has_closed = bool(gates.closed.any())
        is_near = not has_closed and bool((gates.total.abs() <= _NEAR).all())
        if is_near and query.size(2) <= _CHUNK * w1.size(-1):
            bias = _with_bias(call, -gates.total)
            near = {**named, "key_bias": bias.to(torch.promote_types(query.dtype, torch.float32))}
            return implicit_kernel_attention(*call[:5], **near)
        output, lost = _by_moments(call, widened(query).dtype)
        if has_closed and not bool(output.isfinite().all()):
            return _by_pairs(call)  # NaN must not pass a gate of 0
        rows = lost.nonzero().squeeze(-1)
        if 8 * len(rows) > len(lost):
            return _by_moments(call, torch.float64)[0]
        return output if not len(rows) else output.index_copy(2, rows, _by_pairs(call, rows))


def options_of_weights(
    query: Tensor, key: Tensor, log_decay: Tensor, options: Any
) -> AttentionOptions:
    """Returns the options with which ``implicit_kernel_weights`` has gates."""
    gates = _gates_of("implicit_kernel_weights", query, key, log_decay, options)
    return _with_decay(query, gates, options)


def decay_of_pairs(log_decay: Tensor, length: int, mask: Tensor | None = None) -> Tensor:
    """Returns what gates [B, H, S] add to logits of the last queries, [B, H, length, S].

    A mask of pairs, broadcastable to that, bool, True = may attend, or floating point, is in it.
    Tokens after a query's own, where it sees some, count in full.
    """
    total = log_decay.double().cumsum(-1)
    decay = (total[..., -length:].unsqueeze(-1) - total.unsqueeze(-2)).clamp_max(0.0)
    decay = decay.to(log_decay.dtype)
    if mask is None:
        return decay
    return decay.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else decay + mask


def is_traced(x: Tensor) -> bool:
    """Whether numbers cannot be looked at: in graphs, transforms, and tensors of other classes."""
    modes = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
    return (
        torch.compiler.is_compiling()
        or x.is_meta
        or type(x) not in (Tensor, nn.Parameter)
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.maybe_current_level() is not None
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in modes)
    )


def _gates_of(
    name: str, query: Tensor, key: Tensor, log_decay: Tensor, options: AttentionOptions
) -> _Gates:
    if query.is_nested or key.is_nested or log_decay.is_nested:
        hint = "gates of 0 keep sequences in one row apart"
        raise ValueError(f"{name}: log_decay must be None for nested tensors; {hint}")
    check_floating(name, log_decay=log_decay)
    if log_decay.device != query.device:
        both = f"{query.device}, got {log_decay.device}"
        raise ValueError(f"{name}: log_decay must be on the device of query, {both}")
    if not options.get("is_causal") or query.size(2) != key.size(2):
        got = f"got {query.size(2)} and {key.size(2)}, is_causal={options.get('is_causal', False)}"
        wants = "is_causal=True and as many queries as keys"
        raise ValueError(f"{name}: log_decay wants {wants}, {got}")
    if key.size(1) != query.size(1) and not options.get("enable_gqa"):
        raise ValueError(f"{name}: enable_gqa=True allows fewer heads of key than of query")
    whole, heads = with_heads(log_decay, query.size(1), key.size(1))
    check_broadcasts(name, "log_decay", log_decay, (key.size(0), heads, key.size(2)))
    whole = whole.expand(*whole.shape[:2], key.size(2)).double()
    first = torch.arange(key.size(2), device=key.device) == 0  # whose gate nothing is before
    closed = (whole == -math.inf) & ~first
    whole = whole.masked_fill(closed | first, 0.0).masked_fill(whole == math.inf, math.nan)
    total = whole.masked_fill(first, 0.0).cumsum(-1)
    return _Gates(total - total[..., -1:].detach().nan_to_num(0.0) / 2, closed)


def _with_decay(
    query: Tensor, gates: _Gates, options: AttentionOptions, rows: Tensor | None = None
) -> AttentionOptions:
    """Returns options whose mask of pairs has the decay, beside the mask that was given."""
    heads, L = query.size(1), gates.total.size(-1)
    at = torch.arange(L, device=query.device)
    rows = at if rows is None else rows
    total, part = (to_heads(x, heads) for x in (gates.total, gates.closed.cumsum(-1)))
    decay = total.index_select(2, rows).unsqueeze(-1) - total.unsqueeze(-2)
    is_same = part.index_select(2, rows).unsqueeze(-1) == part.unsqueeze(-2)
    decay = decay.masked_fill(~is_same | (rows.unsqueeze(-1) < at), -math.inf)
    decay = decay.to(torch.promote_types(query.dtype, torch.float32))
    mask = options.get("attn_mask")
    if mask is not None:
        decay = decay.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else decay + mask
    return {**options, "attn_mask": decay, "is_causal": False}


def _by_pairs(call: _Call, rows: Tensor | None = None) -> Tensor:
    """Returns the output, or some rows of it."""
    query = call.query if rows is None else call.query.index_select(2, rows)
    options = _with_decay(query, call.gates, call.options, rows)
    return implicit_kernel_attention(query, *call[1:5], **options)


def _by_moments(call: _Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the output by features in a type, and rows that lose digits, bool [L]."""
    query, key, options = call.query.to(dtype), call.key.to(dtype), call.options
    magnitude = log_magnitude(key, options.get("p", 2.0), options.get("magnitude_scale"))
    logits = _with_bias(call, magnitude, -call.gates.total)
    # A gate of 0 is one whose exponential is 0 beside the largest key.
    finite = logits.detach().masked_fill(~logits.isfinite(), 0.0)
    never = 1000.0 + 2 * finite.abs().amax(-1, keepdim=True)
    closed = call.gates.closed
    logits = logits + to_heads(closed.cumsum(-1), logits.size(1)) * never
    own = max(call.w1.size(-3), logits.size(1))  # K
    batch, groups = key.shape[:2]
    key = key if groups == own else key.repeat_interleave(own // groups, 1)
    of_query, of_key = (features_of(x, call.w1, call.w2) for x in (query, key))
    logits = to_heads(logits, own).expand(batch, own, -1)
    nothing, eps = no_moments(of_key, call.value.size(-1)), options.get("eps", 1e-5)
    output, log_z, *_ = causal_attention_from_moments(
        of_query, of_key, logits, call.value, *nothing, eps=eps
    )
    # Rows that see no key since the last gate of 0.
    seen = (logits != -math.inf).long().cumsum(-1)
    before = torch.where(to_heads(closed, own), seen.roll(1, -1), 0)
    is_blind = to_heads(seen == before.cummax(-1).values, query.size(1))
    output = output.masked_fill(is_blind.unsqueeze(-1), 0.0)
    if dtype == torch.float64:
        return output.to(call.query.dtype), closed.new_zeros(query.size(2))
    lost = _lost(of_query.detach(), of_key.detach(), logits.detach(), log_z.detach())
    return output.to(call.query.dtype), lost


def _with_bias(call: _Call, *terms: Tensor) -> Tensor:
    """Adds the bias of keys to terms of logits, float64 [.., heads, S]."""
    bias = call.options.get("key_bias")
    if bias is not None:
        bias, _ = with_heads(bias.double(), call.query.size(1), call.key.size(1))
        terms = (*terms, torch.where(bias == -math.inf, bias, bias.clamp(-_FAR, _FAR)))
    heads = max(x.size(1) for x in terms)
    return functools.reduce(added, (to_heads(x.double(), heads) for x in terms))


def features_of(x: Tensor, w1: Tensor, w2: Tensor | None) -> Tensor:
    """Computes phi(x) in the type of x, of heads that frequencies are repeated for."""
    repeats = x.size(1) // w1.size(-3)
    own: Any = [w if w is None else w.repeat_interleave(repeats, -3).to(x.dtype) for w in (w1, w2)]
    return spectral_features(x, *own)


def _lost(of_query: Tensor, of_key: Tensor, logits: Tensor, log_z: Tensor) -> Tensor:
    """Tells rows whose weights are far below their mean over directions, of keys before a chunk.

    Sums over entries keep what this mean leaves of the last bits.
    """
    L, F = of_query.shape[2:]
    norm_q, norm_k = (x.square().sum(-1).double().log() for x in (of_query, of_key))
    past = (logits + norm_k).logcumsumexp(-1)[..., _CHUNK - 1 :: _CHUNK]
    past = past.repeat_interleave(_CHUNK, -1)[..., : max(0, L - _CHUNK)]
    mean = norm_q[..., _CHUNK:] + to_heads(past, log_z.size(1)) - math.log(4 * F**2)
    lost = log_z[..., _CHUNK:] < mean - math.log(4 * F)
    return pad(lost.flatten(0, 1).any(0), (min(L, _CHUNK), 0))
