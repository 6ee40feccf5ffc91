"""A call of attention that has run, beside the truth."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import ikattn
from devices import DEVICE
from fuzz.condition import (
    OF_16_BITS,
    ON_TENSOR_CORES,
    Arithmetic,
    Attention,
    Bounded,
    arithmetic_of,
)
from fuzz.holding import Wrong, assert_bits, assert_bounded, placed, unchanged

if TYPE_CHECKING:
    from fuzz.attention import AttentionCall


def routes_of(call: dict[str, Any]) -> tuple[str, str]:
    forward, backward = ikattn.which_kernels(**call)
    return f"{forward.algorithm} {forward.unit}", f"{backward.algorithm} {backward.unit}"


class Tried:
    """A call with its results and the truth, which the laws share."""

    def __init__(self, call: AttentionCall) -> None:
        self.call, self.arguments = call, call.arguments()
        self.wanted = list(call.gradients)
        self.incoming = call.incoming()
        with unchanged(*self.arguments.values(), self.incoming):
            self.output, self.gradients = self.run(self.arguments)
        self.keep = None
        if call.dropout:
            kept = 1 - min(math.floor(256 * call.dropout + 0.5), 255) / 256
            self.keep = _kept(self.arguments["dropout_seed"], call) / kept
        self.truth = Attention(self.arguments, self.arithmetic_of(self.arguments), self.keep)

    def run(
        self,
        arguments: dict[str, Any],
        incoming: Tensor | None = None,
        wanted: list[str] | None = None,
        function: Callable[..., Tensor] = ikattn.implicit_kernel_attention,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wanted = self.wanted if wanted is None else wanted
        given = {name: placed(x) for name, x in arguments.items()}
        for name in wanted:
            given[name] = given[name].detach().requires_grad_()
        output = function(**given)
        if not wanted:
            return output.cpu(), {}
        coming = placed(self.incoming if incoming is None else incoming)
        found = torch.autograd.grad(output, [given[x] for x in wanted], coming)
        return output.detach().cpu(), {x: y.cpu() for x, y in zip(wanted, found, strict=True)}

    def check(self) -> None:
        self.compare("output", self.output, self.truth.output)
        if self.output.dtype != self.call.torch_dtype:
            raise Wrong(f"the output is of type {self.output.dtype}")
        unseen = ~self.truth.seen
        if bool(self.output[unseen].any()):
            raise Wrong("a row that sees no key is not zero")
        if self.wanted:
            self.bounds = self.truth.gradients(self.incoming, self.wanted)
            for name, found in self.gradients.items():
                if found.dtype != self.arguments[name].dtype:
                    raise Wrong(f"the gradient of {name} is of type {found.dtype}")
                self.compare(f"gradient of {name}", found, self.bounds[name])

    def assert_same_bits(self, what: str, **options: Any) -> None:
        """Holds another run of the call to the bits of the first."""
        output, gradients = self.run(self.arguments, **options)
        first = [self.output, *self.gradients.values()]
        assert_bits(what, first, [output, *gradients.values()])

    def compare(self, what: str, found: Tensor, truth: Bounded, times: float = 1.0) -> None:
        if DEVICE != "cpu" and found.numel():  # kernels keep digits beside the largest alone
            how, (expected, bound) = self.truth.arithmetic, truth
            largest = expected.nan_to_num(0.0).abs().max() + 1e-8
            truth = expected, bound + max(8 * how.unit, how.stored / 4, how.narrow / 4) * largest
        assert_bounded(what, found, truth, times)

    def truth_for(self, arguments: dict[str, Any]) -> Attention:
        """Returns the truth, with the bounds of the route that an equal call takes."""
        how = self.arithmetic_of(arguments)
        if how == self.truth.arithmetic:
            return self.truth
        return Attention(self.arguments, how, self.keep)

    def arithmetic_of(self, arguments: dict[str, Any]) -> Arithmetic:
        """Returns what the routes of a call may lose."""
        if DEVICE != "cpu":
            is_narrow = self.call.torch_dtype.itemsize < 4
            is_narrow |= self.call.dtype == "float32" and self.call.medium
            is_linear = os.environ.get("IKATTN_LINEAR_TIME") == "always"
            unit = ON_TENSOR_CORES if is_narrow else ""
            return arithmetic_of(self.call.torch_dtype, unit, is_linear)
        routes = routes_of(arguments)
        units = (x.split()[1] for x in routes)
        narrow = next((x for x in units if x in OF_16_BITS), "")
        linear = any("linear" in x for x in routes)
        return arithmetic_of(self.call.torch_dtype, narrow, linear, self.call.medium)


def _kept(seed: Tensor, call: AttentionCall) -> Tensor:
    return ikattn.ops.dropout_keep_mask(seed, call.shape("BHLS"), call.dropout).double()  # type: ignore[arg-type]
