"""Similarity against distance, and its picture."""

from __future__ import annotations

import math

import pytest
import torch

import ikattn
from ikattn.spectral import Direct, Ikan, Mikan, Stationary, kernel_profile, plot_kernel
from ikattn.spectral.interface import call_source

DISTANCES = torch.tensor([0.0, 1.0, 3.0])


@pytest.mark.parametrize("source", [Direct, Ikan, Mikan])
def test_a_profile_is_the_mean_similarity_of_pairs_so_far_apart(source: type) -> None:
    made = source(3, 8, 4, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    query, step = (torch.randn(512, 8, generator=generator) for _ in range(2))
    keys = torch.cat([query + far * step / step.norm(dim=-1, keepdim=True) for far in DISTANCES])
    q, k = (x.expand(1, 3, -1, -1) for x in (query, keys))
    with torch.no_grad():
        frequencies = call_source(made, q, k, None)[:2]
        waves = [[2 * math.pi * x @ w for w in frequencies] for x in (q, k)]
        of_query, of_key = (
            torch.stack([f(one) + f(two) for f in (torch.cos, torch.sin)]) for one, two in waves
        )
    similarity = (of_query.repeat(1, 1, 1, 3, 1) * of_key).sum((0, -1)) / (4 * 4)
    expected = similarity[0].square().unflatten(-1, (3, 512)).mean(-1)
    torch.testing.assert_close(kernel_profile(made, DISTANCES), expected)
    torch.testing.assert_close(kernel_profile(made.train(), DISTANCES), expected)
    assert made.training


def test_a_stationary_profile_falls_from_one_as_its_frequencies_say() -> None:
    made = Stationary(2, 1, 64, seed=0)  # in one dimension both directions are alike
    expected = (2 * math.pi * DISTANCES * made.w1.view(2, 64, 1)).cos().mean(1).square()
    torch.testing.assert_close(
        kernel_profile(made, DISTANCES), expected.detach(), atol=1e-4, rtol=0
    )


def test_a_picture_has_a_pair_of_axes_for_each_head_and_both_curves() -> None:
    pytest.importorskip("matplotlib").use("agg")
    after, before = (ikattn.MultiheadAttention(32, 4, num_frequencies=8) for _ in range(2))
    for module in (after, after.spectral):
        figure = plot_kernel(module, before)
        curves = [axis.lines for axis in figure.axes]
        assert [len(lines) for lines in curves] == [3] * 4  # and one at random tokens
        distances = torch.as_tensor(curves[0][0].get_xdata())
        drawn = torch.stack([torch.as_tensor(lines[1].get_ydata()) for lines in curves])
        torch.testing.assert_close(drawn, kernel_profile(after, distances))


def test_a_module_without_frequencies_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got MultiheadAttention: convert the model"):
        kernel_profile(torch.nn.MultiheadAttention(32, 4), DISTANCES)
