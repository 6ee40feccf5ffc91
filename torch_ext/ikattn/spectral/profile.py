"""Shows a learned kernel: the similarity of two tokens against the distance between them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ikattn._optional import optional
from ikattn.ops.attention import spectral_features
from ikattn.spectral.direct import Direct
from ikattn.spectral.generator import Generator
from ikattn.spectral.interface import call_source

_PAIRS = 512  # of tokens at each distance


@torch.no_grad()
def kernel_profile(module: nn.Module, distances: Tensor) -> Tensor:
    """Computes how similar each head finds two tokens that lie so far apart.

    The similarity is s squared, the factor of an attention weight that the frequencies make (see
    :func:`ikattn.implicit_kernel_attention`), averaged over 512 pairs, the same at each call. Their
    queries are standard normal, and the key of each lies at the distance in a random direction.
    Equal tokens have 1 in a stationary kernel, and less in others.

    Args:
        module: One with a source of frequencies as its ``spectral``, such as
            ``ikattn.MultiheadAttention``, or a source itself.
        distances: ``[n]``, in the units of queries and keys.

    Returns:
        ``[H, n]`` in float32, on the source's device.

    Raises:
        TypeError: The module has no frequencies.

    Example:
        >>> import torch
        >>> from ikattn.spectral import Stationary, kernel_profile
        >>> profile = kernel_profile(Stationary(2, 8, 16), torch.tensor([0.0, 2.0]))
        >>> profile.shape, profile[:, 0].round(decimals=4)
        (torch.Size([2, 2]), tensor([1., 1.]))
    """
    source, heads, size = _source_of(module, "kernel_profile")
    like = next(source.parameters(), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    query, step = (torch.randn(_PAIRS, size, generator=generator) for _ in range(2))
    step = step / step.norm(dim=-1, keepdim=True)
    far = torch.as_tensor(distances, dtype=torch.float32).cpu().view(-1, 1, 1)
    key = (query + far * step).to(like.device).flatten(0, 1).expand(1, heads, -1, -1)
    query = query.to(like.device).expand(1, heads, -1, -1)
    is_training = source.training
    source.eval()  # generators draw noise in training
    try:
        w1, w2, _ = call_source(source, query.to(like.dtype), key.to(like.dtype), None)
    finally:
        source.train(is_training)
    w1, w2 = w1.float(), None if w2 is None else w2.float()
    of_query = spectral_features(query, w1, w2)
    of_key = spectral_features(key, w1, w2).unflatten(2, (len(far), _PAIRS))
    s = torch.einsum("hif,hnif->hni", of_query[0], of_key[0]) / (2 * of_query.size(-1))
    return s.square().mean(-1)


def plot_kernel(
    module: nn.Module, before: nn.Module | None = None, *, distances: Tensor | None = None
) -> Any:
    """Draws the similarity of two tokens against their distance, for each head.

    A dotted line stands at the distance that two random tokens have, ``sqrt(2 d)``. A head whose
    curve falls early takes from near tokens only. A head with a flat curve takes from all alike.

    Args:
        module: As for :func:`kernel_profile`.
        before: The same module before training, drawn as thin lines.
        distances: ``[n]``; None: from 0 to twice the distance of random tokens.

    Returns:
        A figure of matplotlib's pyplot, with one pair of axes for each head.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        TypeError: A module has no frequencies.

    Example:
        >>> import pytest, ikattn
        >>> _ = pytest.importorskip("matplotlib").use("agg")
        >>> figure = ikattn.spectral.plot_kernel(ikattn.MultiheadAttention(32, 4))
        >>> len(figure.axes)
        4
    """
    pyplot = optional("matplotlib.pyplot", "plot_kernel", "'ikattn[viz]'")
    _, heads, size = _source_of(module, "plot_kernel")
    usual = math.sqrt(2 * size)
    if distances is None:
        distances = torch.linspace(0, 2 * usual, 65)
    columns = min(heads, 4)
    rows = -(-heads // columns)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(2.2 * columns, 2 * rows + 0.3),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    styles = [(module, {"color": "#e67800", "linewidth": 2, "label": "after"})]
    if before is not None:
        styles.insert(0, (before, {"color": "0.4", "linewidth": 0.8, "label": "before"}))
    for one, style in styles:
        for axis, curve in zip(axes.flat, kernel_profile(one, distances).cpu(), strict=False):
            axis.plot(distances, curve, **style)
    for head, axis in enumerate(axes.flat):
        axis.axvline(usual, color="0.7", linestyle=":", linewidth=1)
        axis.set_title(f"head {head}", fontsize=9)
        axis.set_visible(head < heads)
    if before is not None:
        axes[0, 0].legend(fontsize=8)
    figure.supxlabel("distance of query and key", fontsize=9)
    figure.supylabel("similarity, s²", fontsize=9)
    return figure


def _source_of(module: nn.Module, function: str) -> tuple[nn.Module, int, int]:
    """Returns a module's source of frequencies, H and d."""
    source = module if isinstance(module, (Direct, Generator)) else module._modules.get("spectral")
    for holder in (source, module):
        heads, size = (getattr(holder, name, None) for name in ("num_heads", "head_dim"))
        if source is not None and isinstance(heads, int) and isinstance(size, int):
            return source, heads, size
    raise TypeError(
        f"{function}: module must have a source of frequencies as its spectral, and num_heads and "
        f"head_dim, got {type(module).__name__}: convert the model with ikattn.convert first"
    )
