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

from ikattn._precision import widened, without_autocast
from ikattn.ops._fixed_kernel import added, check_broadcasts, check_floating, to_heads, with_heads
from ikattn.ops.attention import implicit_kernel_attention, spectral_features
from ikattn.ops.magnitude import log_magnitude
from ikattn.ops.moments import causal_attention_from_moments
from ikattn.ops.options import AttentionOptions, changed

_NEVER = -1e4  # the logarithm that a gate of 0 counts as; its exponential is 0 in float64
_NEAR = 128.0  # summed logarithms that float32 rounds by at most 4e-6
_PAIRS = 128  # tokens for each frequency up to which pairs are faster than moments
_CHUNK = 128  # tokens that the operator takes by pairs, at least (on CUDA 64)


class ForgetGates(nn.Module):
    """The gates of tokens, sigmoid(weight . value + bias) for each head, from the token's value.

    At first they are the same for all tokens, and heads differ: those of the first keep some eight
    tokens, those of the last three thousand.

    Args:
        num_heads: H.
        head_dim: d_v.
        factory: Device and dtype of the parameters.

    Example:
        >>> import torch
        >>> from ikattn.ops.forgetting import ForgetGates
        >>> gates = ForgetGates(num_heads=2, head_dim=4)
        >>> gates(torch.randn(3, 2, 10, 4)).shape  # their logarithms
        torch.Size([3, 2, 10])
    """

    def __init__(self, num_heads: int, head_dim: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, **factory))
        self.bias = nn.Parameter(torch.empty(num_heads, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes every gate the first one again."""
        with torch.no_grad():
            self.weight.zero_()
            self.bias.copy_(torch.linspace(2.0, 8.0, len(self.bias)))

    def forward(self, value: Tensor) -> Tensor:
        """Returns logarithms of gates [B, H, S], in float32 at least, of values [B, H, S, d_v]."""
        wide = widened(value)
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        return logsigmoid((wide * weight.unsqueeze(-2)).sum(-1) + bias.unsqueeze(-1))

    def extra_repr(self) -> str:
        return "num_heads={}, head_dim={}".format(*self.weight.shape)


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    w1: Tensor
    w2: Tensor | None
    total: Tensor  # of the logarithms, float64 [B or 1, heads or 1, S]
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

    In short calls with sums near zero they are a bias of the keys. Other calls take moments, in
    linear time, and by pairs the rows whose digits sums in float32 would lose. Masks of pairs,
    dropout and batch-invariant bits take all pairs, in quadratic memory.
    """
    is_traced = (  # numbers cannot be looked at
        torch.compiler.is_compiling()
        or query.is_meta
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )
    if not is_traced:
        named = changed("implicit_kernel_attention", options, query)
        torch.ops.ikattn.check_implicit_kernel_attention(query, key, value, w1, w2, **named)
    total = _summed(query, key, log_decay, options)
    kind = query.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        query, key, value = (x.to(lower) for x in (query, key, value))
    call = _Call(query, key, value, w1, w2, total, options)
    takes_pairs = options.get("attn_mask") is not None or options.get("dropout_p", 0.0) != 0.0
    if takes_pairs or (not is_traced and torch.ops.ikattn.deterministic() == "batch"):
        return _by_pairs(call)
    with without_autocast(query.device):
        # A graph has no branches, and sums in float64 keep the digits of every row.
        if is_traced:
            return _by_moments(call, torch.float64)[0]
        if query.size(2) <= _PAIRS * w1.size(-1) and bool((total.abs() <= _NEAR).all()):
            bias = _with_bias(call).to(torch.promote_types(query.dtype, torch.float32))
            near: AttentionOptions = {**options, "key_bias": bias}
            return implicit_kernel_attention(*call[:5], **near)
        output, lost = _by_moments(call, widened(query).dtype)
        rows = lost.nonzero().squeeze(-1)
        if 8 * len(rows) > len(lost):
            return _by_moments(call, torch.float64)[0]
        return output if not len(rows) else output.index_copy(2, rows, _by_pairs(call, rows))


def options_of_weights(
    query: Tensor, key: Tensor, log_decay: Tensor, options: AttentionOptions
) -> AttentionOptions:
    """Returns the options with which ``implicit_kernel_weights`` has gates."""
    return _with_decay(query, _summed(query, key, log_decay, options), options)


def _summed(query: Tensor, key: Tensor, log_decay: Tensor, options: AttentionOptions) -> Tensor:
    """Returns the sums up to each token, less half of the last."""
    name = "implicit_kernel_attention"
    check_floating(name, log_decay=log_decay)
    if log_decay.device != query.device:
        raise ValueError(
            f"{name}: log_decay must be on the device of query, {query.device}, got "
            f"{log_decay.device}"
        )
    if not options.get("is_causal") or query.size(2) != key.size(2):
        raise ValueError(
            f"{name}: log_decay wants is_causal=True and as many queries as keys, got is_causal="
            f"{options.get('is_causal', False)}, {query.size(2)} queries and {key.size(2)} keys"
        )
    whole, heads = with_heads(log_decay, query.size(1), key.size(1))
    check_broadcasts(name, "log_decay", log_decay, (key.size(0), heads, key.size(2)))
    whole = whole.expand(*whole.shape[:2], key.size(2)).double().clamp(min=_NEVER)
    total = whole.masked_fill(whole == math.inf, math.nan).cumsum(-1)
    return total - total[..., -1:].detach().nan_to_num(0.0) / 2


def _with_decay(
    query: Tensor, total: Tensor, options: AttentionOptions, rows: Tensor | None = None
) -> AttentionOptions:
    """Returns options whose mask of pairs has the decay, beside the mask that was given."""
    of_keys = to_heads(total, query.size(1))
    of_queries = of_keys if rows is None else of_keys.index_select(2, rows)
    decay = of_queries.unsqueeze(-1) - of_keys.unsqueeze(-2)
    at = torch.arange(decay.size(-1), device=decay.device)
    later = (at if rows is None else rows).unsqueeze(-1) < at
    decay = decay.masked_fill(later, -math.inf)
    decay = decay.to(torch.promote_types(query.dtype, torch.float32))
    mask = options.get("attn_mask")
    if mask is not None:
        decay = decay.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else decay + mask
    return {**options, "attn_mask": decay, "is_causal": False}


def _by_pairs(call: _Call, rows: Tensor | None = None) -> Tensor:
    """Returns the output, or some rows of it."""
    query = call.query if rows is None else call.query.index_select(2, rows)
    options = _with_decay(query, call.total, call.options, rows)
    return implicit_kernel_attention(query, *call[1:5], **options)


def _by_moments(call: _Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the output by features in a type, and rows that lose digits, bool [L]."""
    query, key, options = call.query.to(dtype), call.key.to(dtype), call.options
    magnitude = log_magnitude(key, options.get("p", 2.0), options.get("magnitude_scale"))
    logits = _with_bias(call, magnitude)
    own = max(call.w1.size(-3), logits.size(1))  # K
    batch, groups = key.shape[:2]
    key = key if groups == own else key.repeat_interleave(own // groups, 1)
    of_query, of_key = (_features(x, call.w1, call.w2) for x in (query, key))
    logits, size = to_heads(logits, own).expand(batch, own, -1), of_key.size(-1)
    nothing = query.new_zeros(batch, own, size * (size + 1) // 2 + 1, call.value.size(-1) + 1)
    reference = torch.full((batch, own), -math.inf, dtype=torch.float64, device=query.device)
    eps = options.get("eps", 1e-5)
    output, log_z, *_ = causal_attention_from_moments(
        of_query, of_key, logits, call.value, nothing, reference, eps=eps
    )
    lost = _lost(of_query.detach(), of_key.detach(), logits.detach(), log_z.detach())
    return output.to(call.query.dtype), lost


def _with_bias(call: _Call, *terms: Tensor) -> Tensor:
    """Adds what gates and the bias of keys are in logits, float64 [.., heads, S], to terms."""
    terms = (*terms, -call.total)
    bias = call.options.get("key_bias")
    if bias is not None:
        terms = (*terms, with_heads(bias, call.query.size(1), call.key.size(1))[0])
    heads = max(x.size(1) for x in terms)
    return functools.reduce(added, (to_heads(x.double(), heads) for x in terms))


def _features(x: Tensor, w1: Tensor, w2: Tensor | None) -> Tensor:
    def own(w: Tensor) -> Tensor:
        return w.repeat_interleave(x.size(1) // w.size(-3), -3).to(x.dtype)

    return spectral_features(x, own(w1), None if w2 is None else own(w2))


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
