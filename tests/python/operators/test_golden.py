"""The numbers of the authors' own code (ika_ns, 'ikandirect'), values and gradients."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, error, gradients
from golden import golden_files
from samples import Arguments, name_of, of_weights

FILES = golden_files("ika_official", "[dmx]*.npz")
MODES = ("official", "paper")
# float64: rounding. float32: what the authors' code in float32 differs from these arrays by, at
# most, over all of them.
FLOAT64 = 1e-13
FLOAT32 = {"out": 6.9e-6, "query": 1.4e-5, "key": 1.2e-5, "value": 5.5e-6, "w1": 1e-5, "w2": 1e-5}


class Golden:
    """One file and mode: a call of the core, inside projections where the file has them (m*)."""

    def __init__(self, path: Path, mode: str, dtype: torch.dtype) -> None:
        with np.load(path) as arrays:
            self.arrays = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        self.mode, self.dtype = mode, dtype
        self.heads = int(self.arrays["H"])
        self.has_heads = self.arrays["query"].dim() == 4

    def has(self, name: str) -> bool:
        return f"{self.mode}_{name}" in self.arrays

    def expected(self, name: str) -> Tensor:
        return self.arrays[f"{self.mode}_{name}"]

    def leaves(self) -> Arguments:
        names = ["query", "key", "value", "w1", "w2"]
        names += [name for name in self.arrays if name.startswith("fc_")]
        return {name: self.arrays[name].to(self.dtype).requires_grad_() for name in names}

    def split_heads(self, x: Tensor) -> Tensor:
        return x if self.has_heads else x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def project(self, x: Tensor, leaves: Arguments, name: str) -> Tensor:
        if f"fc_{name}_weight" not in leaves:
            return x
        weight, bias = leaves[f"fc_{name}_weight"], leaves[f"fc_{name}_bias"]
        return torch.nn.functional.linear(x, weight, bias)

    def core(self, leaves: Arguments) -> Arguments:
        """The arguments of the operator. The authors' frequencies are [.., d, H, M]."""
        tokens = {
            name: self.split_heads(self.project(leaves[name], leaves, name[0]))
            for name in ("query", "key", "value")
        }
        frequencies = {name: leaves[name].movedim(-2, -3) for name in ("w1", "w2")}
        options = {
            "p": float(self.arrays["p"]),
            "eps": float(self.arrays["eps"]),
            "magnitude_scale": 1 / float(self.expected("norm_divisor")),
        }
        return tokens | frequencies | options

    def output(self, leaves: Arguments) -> Tensor:
        output = ikattn.implicit_kernel_attention(**self.core(leaves))
        if self.has_heads:
            return output
        return self.project(output.transpose(1, 2).flatten(2), leaves, "o")


def modes_holding(array: str) -> pytest.MarkDecorator:
    """Every file and mode that holds an array of this name."""
    cases = []
    for path in FILES:
        with np.load(path) as arrays:
            for mode in MODES:
                names = [name.removeprefix(f"{mode}_") for name in arrays.files]
                if array in names:
                    cases.append(pytest.param(path, mode, id=f"{path.stem}, {mode}"))
    return pytest.mark.parametrize(("path", "mode"), cases)


DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)


@modes_holding("out")
@DTYPES
def test_output_is_the_authors(path: Path, mode: str, dtype: torch.dtype) -> None:
    golden = Golden(path, mode, dtype)
    tolerance = FLOAT64 if dtype == torch.float64 else FLOAT32["out"]
    assert_close(golden.output(golden.leaves()), golden.expected("out"), tolerance)


@modes_holding("dkey")
@DTYPES
def test_gradients_are_the_authors(path: Path, mode: str, dtype: torch.dtype) -> None:
    golden = Golden(path, mode, dtype)
    leaves = golden.leaves()
    names = [name for name in leaves if golden.has(f"d{name}")]
    incoming = golden.arrays["g"].to(dtype)
    found = torch.autograd.grad(golden.output(leaves), [leaves[name] for name in names], incoming)
    sizes = [golden.expected(f"d{name}").abs().max().item() for name in names]
    for name, size, gradient in zip(names, sizes, found, strict=True):
        tolerance = FLOAT64 if dtype == torch.float64 else FLOAT32.get(name, 1.4e-5)
        # All gradients of a lone token but the value's vanish, but for the rounding of either code.
        scale = max(sizes) if size < 1e-9 * max(sizes) else 0.0
        assert_close(gradient, golden.expected(f"d{name}"), tolerance, name, scale)


@modes_holding("attn")
def test_weights_are_the_authors(path: Path, mode: str) -> None:
    golden = Golden(path, mode, torch.float64)
    expected = golden.expected("attn")
    with torch.no_grad():
        weights = ikattn.implicit_kernel_weights(**of_weights(golden.core(golden.leaves())))
    assert_close(weights[:, :, : expected.shape[2]], expected, FLOAT64)


@modes_holding("norm")
def test_similarity_and_magnitude_are_the_authors(path: Path, mode: str) -> None:
    golden = Golden(path, mode, torch.float64)
    with torch.no_grad():
        call = golden.core(golden.leaves())
        w1, w2 = call["w1"], call["w2"]
        for name in ("query", "key"):
            phi = ikattn.ops.spectral_features(call[name], w1, w2)
            assert_close(phi, golden.arrays[f"phi_{name[0]}"], FLOAT64, name)
        options = {name: call[name] for name in ("p", "w1", "w2", "eps", "magnitude_scale")}
        similarity, magnitude = ikattn.ops.similarity_and_magnitude(
            call["query"], call["key"], kernel="implicit", **options
        )
        assert_close(similarity - call["eps"], golden.arrays["scores"], 1e-12)
        # The authors' norm adds that of the query, which cancels in the softmax.
        _, of_query = ikattn.ops.similarity_and_magnitude(
            call["query"], call["query"], kernel="implicit", **options
        )
        norm = of_query.log().unsqueeze(-1) + magnitude.log().unsqueeze(-2)
        assert_close(norm, golden.expected("norm"), FLOAT64)


def test_the_two_modes_cannot_be_mistaken_for_each_other() -> None:
    path = next(path for path in FILES if path.stem.startswith("m00"))
    official, paper = (Golden(path, mode, torch.float64) for mode in MODES)
    assert error(official.expected("out"), paper.expected("out")) > 0.01
    assert math.isclose(float(paper.expected("norm_divisor")), 2 * math.sqrt(8))
    assert math.isclose(float(official.expected("norm_divisor")), 2 * 8**0.25, rel_tol=1e-7)


def test_papers_mode_is_the_default() -> None:
    path = next(path for path in FILES if path.stem.startswith("m00"))
    golden = Golden(path, "paper", torch.float64)
    leaves = golden.leaves()
    call = golden.core(leaves)
    del call["magnitude_scale"], call["eps"], call["p"]
    output = ikattn.implicit_kernel_attention(**call).transpose(1, 2).flatten(2)
    output = golden.project(output, leaves, "o")
    assert_close(output, golden.expected("out"), FLOAT64)
    assert gradients(ikattn.implicit_kernel_attention, call, ["query"])["query"].isfinite().all()
