"""timm: the attention layer of vision transformers with the implicit kernel, for ``attn_layer``.

Sizes: B batch, N tokens, C channels, H heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ikattn.nn.functional import check_kernel
from ikattn.nn.with_kernel import WithKernel
from ikattn.ops.attention import implicit_kernel_attention
from ikattn.spectral import Direct
from ikattn.spectral.regularized import Regularized

__all__ = ["ImplicitAttention"]


class ImplicitAttention(Regularized):
    """Self-attention with the implicit kernel, in the place of ``timm.layers.Attention``.

    Constructor, ``forward`` and parameter names are timm's, so that pretrained weights load, with
    ``strict=True`` too; the frequencies ``spectral.w1`` and ``spectral.w2`` are new then. As timm
    makes the layers itself, from a class, options of the kernel are attributes of the class, which
    a subclass may set. In a layer that is made ``spectral`` may be exchanged for any source of
    ``ikattn.spectral``.

    Attributes:
        p: Order of the norm in a key's magnitude, a real number >= 1; None: no magnitude.
        num_frequencies: M, per head.
        stationary: One set of frequencies per head in place of two.

    Args:
        dim: C.
        num_heads: H.
        attn_head_dim: d; None: C / H.
        dim_out: Channels of the output; None: C.
        qkv_bias, proj_bias: Whether the projections have biases.
        qk_norm: Normalise queries and keys over d.
        scale_norm: Normalise the merged heads.
        attn_drop, proj_drop: Dropout on the attention weights, and on the output.
        norm_layer: Of these norms, called with a size.
        device, dtype: Of the parameters.

    Raises:
        ValueError: C is no multiple of H and no head size is given, a norm has no ``norm_layer``,
            or an option of the kernel is out of range.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).

    Example:
        >>> import pytest, torch
        >>> from ikattn.integrations.timm import ImplicitAttention
        >>> class Attention(ImplicitAttention):
        ...     p, num_frequencies = 3.0, 32
        >>> Attention(64, num_heads=4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
        >>> timm = pytest.importorskip("timm")
        >>> sizes = dict(embed_dim=64, depth=2, num_heads=4, img_size=32, patch_size=8)
        >>> model = timm.models.VisionTransformer(**sizes, attn_layer=Attention)
    """

    p: float | None = 2.0
    num_frequencies = WithKernel.default_frequencies
    stationary = False

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_kernel("implicit", self.p)
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(
                f"ImplicitAttention: dim must be a multiple of num_heads, got {dim} and {num_heads}"
            )
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError(
                "ImplicitAttention: qk_norm and scale_norm need a norm_layer, got None"
            )
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        width = num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * width, bias=qkv_bias, **placed)
        self.q_norm = norm_layer(self.head_dim, **placed) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **placed) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(width, **placed) if scale_norm else nn.Identity()
        self.proj = nn.Linear(width, dim_out or dim, bias=proj_bias, **placed)
        self.proj_drop = nn.Dropout(proj_drop)
        self.spectral = Direct(
            num_heads, self.head_dim, self.num_frequencies, stationary=self.stationary, **placed
        )

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attends from tokens to tokens.

        Args:
            x: [B, N, C].
            attn_mask: Broadcastable to [B, H, N, N]; bool, True = may attend, or added to logits.
            is_causal: Token i sees tokens 0..i.

        Returns:
            [B, N, C].

        Raises:
            RuntimeError: ``is_causal`` with frequencies that depend on whole sequences.
        """
        self._check_causality(is_causal)
        # [3, B, H, N, d]
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        query, key = self.q_norm(query), self.k_norm(key)
        w1, w2 = self._frequencies(query, key, None, None)
        drops = self.attn_drop.p if self.training else 0.0
        options: Any = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout_p": drops}
        output = implicit_kernel_attention(query, key, value, w1, w2, p=self.p, **options)
        output = self.norm(output.transpose(1, 2).flatten(2))
        projected: Tensor = self.proj_drop(self.proj(output))
        return projected

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Lets pretrained weights, which have no frequencies, leave them as they are."""
        assert self.spectral is not None
        own = f"{prefix}spectral."
        if not any(name.startswith(own) for name in state_dict):
            state_dict.update(self.spectral.state_dict(prefix=own))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
