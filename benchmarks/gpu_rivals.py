"""The operators that benchmarks/gpu.py compares: ikattn's, and those of others."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from contributions import five_dimensional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import ikattn

Call = Callable[[], object]
# Prepares a call to be timed, and returns it.
Prepare = Callable[[], Call]

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(
    tensors: list[Tensor],
    causal: bool = False,
    mask: Tensor | None = None,
    with_flex: bool = False,
    dropout: float = 0.0,
) -> dict[str, Callable[[], Tensor]]:
    """The rivals of ``[q, k, v, w1, w2]``; FlexAttention knows no masks and no dropout here."""
    q, k, v, w1, w2 = tensors

    def ours() -> Tensor:
        return ikattn.implicit_kernel_attention(
            q, k, v, w1, w2, is_causal=causal, attn_mask=mask, dropout_p=dropout
        )

    def softmax() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, attn_mask=mask, dropout_p=dropout
        )

    def with_backend(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return softmax()

    def eager() -> Tensor:
        return ikattn.reference.implicit_kernel_attention(
            q, k, v, w1, w2, is_causal=causal, attn_mask=mask, dropout_p=dropout
        )

    rivals: dict[str, Callable[[], Tensor]] = {"ikattn": ours}
    if q.is_cuda:
        for name, backend in SDPA.items():
            rivals[name] = lambda backend=backend: with_backend(backend)
    else:
        rivals["sdpa"] = softmax
    if with_flex and mask is None and dropout == 0:
        rivals["flex"] = flex(tensors, causal)
    rivals["eager"] = eager
    return rivals


def stored_in_half(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, is_causal: bool
) -> Tensor:
    """The eager composition whose features, scores, weights and output have the type of q.

    As those of eager softmax attention would; ``ikattn.reference`` computes in float32 whatever
    the type of its inputs. Between them angles and weights are formed in float32, as torch.softmax
    forms its.
    """
    phi_q, phi_k = (ikattn.reference.spectral_features(x.float(), w1, w2).to(q) for x in (q, k))
    s = (phi_q @ phi_k.mT / (4 * w1.shape[-1])).float()
    magnitudes = k.float().square().sum(-1, keepdim=True).mT / (2 * k.shape[-1] ** 0.5)
    logits = torch.log(s.square() + 1e-5) + magnitudes
    if is_causal:
        sees = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        logits = logits.masked_fill(~sees, -torch.inf)
    return logits.softmax(-1).to(q) @ v


def flex(tensors: list[Tensor], causal: bool, compiled: bool = True) -> Callable[[], Tensor]:
    """Returns the attention as FlexAttention over features, with log(s^2 + eps) + g as score.

    Features and magnitudes are torch's own operators, compiled with it, and gradients go back to
    all five tensors.
    """
    length, device = tensors[0].shape[2], str(tensors[0].device)

    @functools.cache  # at the first call, where a failure is told of
    def block_mask() -> BlockMask | None:
        if not causal:
            return None
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device)

    def attend(
        mask: BlockMask | None, q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor
    ) -> Tensor:
        square = k.float().square().sum(-1)
        per_square = 1 / (2 * k.shape[-1] ** 0.5)

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.log(s * s + 1e-5) + per_square * square[b, h, j]

        output = flex_attention(
            ikattn.reference.spectral_features(q, w1, w2),
            ikattn.reference.spectral_features(k, w1, w2),
            v,
            score_mod=score,
            scale=1 / (4 * w1.shape[-1]),
            block_mask=mask,
        )
        assert isinstance(output, Tensor)
        return output

    if compiled:
        torch._dynamo.reset()  # after 8 compilations of a function it would run uncompiled
        attend = torch.compile(attend, dynamic=False)
    return lambda: attend(block_mask(), *tensors)


def backward_of(call: Callable[[], Tensor], leaves: list[Tensor]) -> Prepare:
    """The backward alone, of a graph that lives as long as it is timed."""

    def prepare() -> Call:
        output = call()
        incoming = torch.ones_like(output)
        return lambda: torch.autograd.grad(
            output, leaves, incoming, retain_graph=True, allow_unused=True
        )

    return prepare


def contributions(length: int, device: str) -> dict[str, Call]:
    """N summed at H = 12, D = 768."""
    heads, size = 12, 768
    torch.manual_seed(0)
    weights = torch.randn(1, heads, length, length, device=device).softmax(-1)
    value = torch.randn(1, heads, length, size // heads, device=device)
    projection = torch.randn(size, size, device=device) / size**0.5
    query, key = torch.randn(2, 1, heads, length, size // heads, device=device).unbind()
    wide = [query, key, value, projection]
    narrow = [x.bfloat16() for x in wide]
    narrow_weights, pair_bias = weights.bfloat16(), torch.randn(length, length, device=device)
    residual = torch.randn(1, length, size, device=device)

    def and_back(tensors: list[torch.Tensor], **options: bool) -> Call:
        leaves = [x.detach().requires_grad_() for x in tensors]

        def call() -> None:
            with torch.enable_grad():
                maps = ikattn.streamed_contributions(*leaves, maps=["summed"], **options)
                torch.autograd.grad(maps.summed.sum(), leaves)

        return call

    return {
        "ikattn": lambda: ikattn.contributions(weights, value, projection, maps=["summed"]),
        "ikattn, weights in bfloat16": lambda: ikattn.contributions(
            narrow_weights, *narrow[2:], maps=["summed"]
        ),
        "streamed": lambda: ikattn.streamed_contributions(*wide, maps=["summed"]),
        "streamed, bfloat16": lambda: ikattn.streamed_contributions(
            *narrow, is_causal=True, maps=["summed"]
        ),
        "streamed, float mask": lambda: ikattn.streamed_contributions(
            *wide, attn_mask=pair_bias, maps=["summed"]
        ),
        "streamed, mixing ratio": lambda: ikattn.streamed_contributions(
            *wide, residual=residual, maps=["mixing_ratio"]
        ),
        "streamed, with its backward": and_back(wide),
        "streamed, bfloat16, with its backward": and_back(narrow, is_causal=True),
        "read weights": weights.sum,
        "5-D": lambda: five_dimensional(weights, value, projection),
    }
