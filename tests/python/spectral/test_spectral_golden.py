"""Mikan with faithful="code" against every number that the authors' code gave, draw for draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import ikattn
from agreement import assert_close
from golden import golden_files
from ikattn.spectral import Mikan

FILES = golden_files("ika_mikan_official")
TOLERANCE = 1e-13  # rounding; of gradients, through the quantile function: 1e-12

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


class Golden:
    """One file: a call of the authors' attention layer with a MIKAN generator."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.arrays = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        self.heads, self.size = (int(self.arrays[name]) for name in ("H", "d_head"))
        self.count = int(self.arrays["M"])
        self.projections = {
            name: self.arrays[f"param.{name}"].double().requires_grad_()
            for name in (f"fc_{x}.{y}" for x in "qkvo" for y in ("weight", "bias"))
        }
        self.inputs = {
            name: self.arrays[name].double().requires_grad_() for name in ("query", "key", "value")
        }
        self.source = self._source()

    def _source(self) -> Mikan:
        weights = ("kl_lambda", "copula_lambda", "prior_var")
        kl_weight, copula_weight, prior_scale = (float(self.arrays[name]) for name in weights)
        source = Mikan(
            self.heads,
            self.size,
            self.count,
            faithful="code",
            prior_scale=prior_scale,
            kl_weight=kl_weight,
            copula_weight=copula_weight,
            dtype=torch.float64,
        )
        with torch.no_grad():
            for (module, parameter), names in self.names().items():
                # theirs are [in, out], flat ours [out, in]
                theirs = [self.arrays[f"param.attsharedw.{name}"].double() for name in names]
                flat = torch.cat([(x.mT if x.dim() == 2 else x).flatten() for x in theirs])
                getattr(getattr(source, module), parameter).copy_(flat)
        return source.eval()  # in which theirs is random too

    @staticmethod
    def names() -> dict[tuple[str, str], list[str]]:
        """Our flat parameters, and the authors' that they hold, in order."""
        layers = ["w1", "w2", "w3", "copula_w1"]
        table = {
            ("posterior", "weights"): [f"copulanet.{name}" for name in layers],
            ("posterior", "biases"): [f"copulanet.{name.replace('w', 'b')}" for name in layers],
        }
        for number in (1, 2):
            for kind, letter in (("weights", "w"), ("biases", "b")):
                names = [f"wnet{number}.{letter}{layer}" for layer in (1, 2, 3)]
                table[f"network{number}", kind] = names
        return table

    def project(self, x: Tensor, name: str) -> Tensor:
        return linear(x, *(self.projections[f"fc_{name}.{y}"] for y in ("weight", "bias")))

    def heads_of(self, name: str) -> Tensor:
        x = self.project(self.inputs[name], name[0])
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def frequencies(self) -> tuple[Tensor, Tensor | None, Tensor]:
        torch.manual_seed(int(self.arrays["draw_seed"]))
        return self.source(self.heads_of("query"), self.heads_of("key"), None)

    def output(self, mode: str) -> tuple[Tensor, Tensor]:
        w1, w2, regularization = self.frequencies()
        output = ikattn.implicit_kernel_attention(
            *(self.heads_of(name) for name in ("query", "key", "value")),
            w1,
            w2,
            p=float(self.arrays["p"]),
            eps=float(self.arrays["eps"]),
            magnitude_scale=1 / float(self.arrays[f"{mode}_norm_divisor"]),
        )
        return self.project(output.transpose(1, 2).flatten(2), "o"), regularization

    def assert_gradients(self, of: Tensor, incoming: Tensor, prefix: str) -> None:
        """Compares with the authors' gradients: of inputs, and of every parameter they recorded."""
        of.backward(incoming)
        compared = 0
        largest = max(
            x.abs().max() for name, x in self.arrays.items() if name.startswith(f"{prefix}d")
        )

        def compare(found: Tensor, expected: Tensor, name: str) -> None:
            # of a lone token most gradients vanish, but for the rounding of either code
            vanishes = expected.abs().max() < 1e-9 * largest
            assert_close(found, expected, 1e-12, name, float(largest) if vanishes else 0.0)

        for name, x in self.inputs.items():
            if f"{prefix}d{name}" in self.arrays:
                expected = self.arrays[f"{prefix}d{name}"]
                compare(x.grad, expected, name)
                compared += 1
        for name, x in self.projections.items():
            expected = self.arrays.get(f"{prefix}grad.{name}")
            if expected is not None and x.grad is not None:
                compare(x.grad, expected, name)
                compared += 1
        for (module, parameter), names in self.names().items():
            ours = getattr(getattr(self.source, module), parameter).grad
            theirs = [self.arrays.get(f"{prefix}grad.attsharedw.{name}") for name in names]
            if ours is None or any(x is None for x in theirs):
                continue
            expected = torch.cat([(x.mT if x.dim() == 2 else x).flatten() for x in theirs])
            compare(ours, expected, f"{module}.{parameter}")
            compared += 1
        assert compared >= 3


@each_file
def test_frequencies_and_regulariser_are_the_authors(path: Path) -> None:
    golden = Golden(path)
    w1, w2, regularization = golden.frequencies()
    assert_close(w1, golden.arrays["w1"].transpose(1, 2), TOLERANCE, "w1")
    assert_close(w2, golden.arrays["w2"].transpose(1, 2), TOLERANCE, "w2")
    assert_close(regularization, golden.arrays["KLD"], TOLERANCE, "KLD")


@pytest.mark.parametrize("mode", ["official", "paper"])
@each_file
def test_output_is_the_authors(path: Path, mode: str) -> None:
    golden = Golden(path)
    assert_close(golden.output(mode)[0], golden.arrays[f"{mode}_out"], TOLERANCE)


@each_file
def test_gradients_of_the_output_are_the_authors(path: Path) -> None:
    golden = Golden(path)
    golden.assert_gradients(golden.output("official")[0], golden.arrays["g"].double(), "official_")


@each_file
def test_gradients_of_the_regulariser_are_the_authors(path: Path) -> None:
    golden = Golden(path)
    regularization = golden.frequencies()[2]
    golden.assert_gradients(regularization, torch.ones_like(regularization), "kld_")


def test_our_default_is_not_the_published_computation() -> None:
    golden = Golden(FILES[0])
    ours = Mikan(golden.heads, golden.size, golden.count, dtype=torch.float64)
    ours.load_state_dict(golden.source.state_dict())
    torch.manual_seed(int(golden.arrays["draw_seed"]))
    w1 = ours.train()(golden.heads_of("query"), golden.heads_of("key"), None)[0]
    assert not torch.allclose(w1, golden.arrays["w1"].transpose(1, 2), rtol=0.1)


def test_more_than_one_sample_and_padding_are_refused() -> None:
    golden = Golden(FILES[0])
    source, x = golden.source, torch.zeros(2, golden.heads, 5, golden.size, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"faithful='code' takes one sample .* got 2 samples"):
        source(x, x, None)
    with pytest.raises(ValueError, match="key_padding_mask given"):
        source(x[:1], x[:1], torch.zeros(1, 5, dtype=torch.bool))
