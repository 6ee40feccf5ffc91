"""Memory that no machine has: every function says who asked for it, and what for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ikattn
from ikattn._memory import memory_for, takes_memory_for
from ikattn.maps import rollout, shares
from ikattn.nn import functional

LONG = 1 << 44


def of_length(*sizes: int) -> torch.Tensor:
    """A tensor of these sizes that takes the memory of one number."""
    return torch.ones(()).expand(sizes)


def attend_by_module(kernel: str) -> torch.Tensor:
    module = ikattn.MultiheadAttention(4, 1, kernel=kernel, batch_first=True)
    x = of_length(1, LONG, 4)
    output: torch.Tensor = module(x, x, x, need_weights=False)[0]
    return output


def append_keys() -> None:
    with torch.no_grad():
        ikattn.KeyFeatures(torch.ones(1, 4, 2)).append(of_length(1, 1, LONG, 4))


QUERY, ONE, W1 = of_length(1, 1, LONG, 4), torch.ones(1, 1, 1, 4), torch.ones(1, 4, 2)
OF_MODULE = "MultiheadAttention: no memory for projections"
ALLOCATED = r".*: .*tried to allocate \d+ bytes"
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "attention": (
        lambda: ikattn.implicit_kernel_attention(QUERY, ONE, ONE, W1),
        "implicit_kernel_attention: no memory for the out" + ALLOCATED,
    ),
    "weights": (
        lambda: ikattn.implicit_kernel_weights(QUERY, ONE, W1),
        "weights: no memory for the weights" + ALLOCATED,
    ),
    "features": (
        lambda: ikattn.ops.spectral_features(QUERY, W1),
        "features: no memory for the features" + ALLOCATED,
    ),
    "dot": (lambda: attend_by_module("dot"), OF_MODULE),
    "rbf": (lambda: attend_by_module("rbf"), OF_MODULE),
    "implicit": (lambda: attend_by_module("implicit"), OF_MODULE),
    "similarity_and_magnitude": (
        lambda: ikattn.ops.similarity_and_magnitude(QUERY, torch.ones(1, 1, 7, 4)),
        "similarity_and_magnitude: no memory for similarity",
    ),
    "contributions": (
        lambda: ikattn.contributions(
            of_length(1, 1, LONG, 2), torch.ones(1, 1, 2, 4), torch.ones(4, 4), maps=["per_head"]
        ),
        "contributions: no memory for",
    ),
    "streamed contributions": (
        lambda: ikattn.streamed_contributions(QUERY, ONE, ONE, torch.ones(4, 4)),
        "contributions?: no memory for|contribution_maps: no memory for",
    ),
    "keys": (append_keys, "KeyFeatures.append: no memory for|spectral_features: no memory for"),
    "rollout": (
        lambda: rollout([of_length(1, 1 << 22, 1 << 22)] * 2, normalize=False),
        r"rollout: no memory for the products of maps, \[B, L, L\]",
    ),
    "ledger": (
        lambda: shares(
            {
                "layer": ikattn.Contributions(
                    weights=of_length(1, 1, 1, LONG),
                    similarity=of_length(1, 1, 1, LONG),
                    magnitude=of_length(1, 1, LONG),
                    value_norms=of_length(1, 1, LONG),
                )
            }
        ),
        "shares: no memory for the factors",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_named(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(torch.OutOfMemoryError, match=message):
        call()


def test_a_name_that_stands_there_is_kept_and_other_errors_pass() -> None:
    inner = "implicit_kernel_attention: no memory for the output: "
    with pytest.raises(torch.OutOfMemoryError, match=f"^{inner}"), memory_for("outer", "all"):
        raise torch.OutOfMemoryError(inner)
    with pytest.raises(RuntimeError, match=r"^another$"), memory_for("outer", "all"):
        raise RuntimeError("another")


def test_a_decorated_function_is_what_it_was() -> None:
    assert functional.attend.__doc__ is not None
    assert ikattn.ops.similarity_and_magnitude.__name__ == "similarity_and_magnitude"

    @takes_memory_for("a table")
    def table(size: int) -> torch.Tensor:
        return torch.empty(size)

    assert table(3).shape == (3,)
    with pytest.raises(torch.OutOfMemoryError, match=r"table: no memory for a table: .*allocate"):
        table(LONG)
    compiled = torch.compile(table, backend="eager", fullgraph=True)
    assert compiled(3).shape == (3,)
