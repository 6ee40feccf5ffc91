"""Calls too long for a reference of all pairs: some rows of them, their time and their memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ikattn
from fuzz.condition import OF_16_BITS, Attention, arithmetic_of
from fuzz.draws import Draws, integers, numbers
from fuzz.holding import Wrong, assert_bounded

SLOWEST = 100  # times as many products in torch; quadratic time in the place of linear takes more


@dataclass(frozen=True)
class LargeCall:
    """Sizes are letters as in ``ikattn.ops.attention``."""

    seed: int
    H: int = 1
    L: int = 1
    S: int = 1
    d: int = 1
    d_v: int = 1
    M: int = 1
    dtype: str = "float32"
    causal: bool = False
    backward: bool = False

    @staticmethod
    def draw(seed: int) -> LargeCall:
        r = Draws(seed)
        is_long = r.chance(2)  # for linear time
        M = 1 + r.below(4) if is_long else 32 + r.below(32)
        L, S = ((20_000 if is_long else 4000) + r.below(1000) for _ in range(2))
        causal = r.chance(2)
        dtype = r.choice(["float32", "float64", "bfloat16"])
        S = L if causal else S
        d, d_v = 1 + r.below(32), 1 + r.below(32)
        return LargeCall(seed, 1 + r.below(2), L, S, d, d_v, M, dtype, causal, r.chance(2))

    def cell(self) -> dict[str, Any]:
        forward, backward = ikattn.which_kernels(**self.arguments())
        routes = forward.algorithm, backward.algorithm if self.backward else "none"
        return {"forward": routes[0], "backward": routes[1], "dtype": self.dtype}

    def arguments(self) -> dict[str, Any]:
        dtype, H = getattr(torch, self.dtype), self.H

        def make(role: str, number: int, *shape: int) -> Tensor:
            return numbers("exact", role, self.seed + 16 * number, *shape).to(dtype)

        return {
            "query": make("token", 1, 1, H, self.L, self.d),
            "key": make("token", 2, 1, H, self.S, self.d),
            "value": make("value", 3, 1, H, self.S, self.d_v),
            "w1": make("frequency", 4, H, self.d, self.M),
            "w2": make("frequency", 5, H, self.d, self.M),
            "is_causal": self.causal,
        }

    def check(self) -> None:
        given = self.arguments()
        incoming = numbers("exact", "value", self.seed + 9, 1, self.H, self.L, self.d_v)
        choices = ikattn.which_kernels(**given)
        leaves = given | {"query": given["query"].requires_grad_(self.backward)}

        def forward() -> Tensor:
            return ikattn.implicit_kernel_attention(**leaves)

        output = self.measured("forward", choices.forward, forward)
        gradient = None
        if self.backward:
            wanted = [output, leaves["query"], incoming.to(output)]
            (gradient,) = self.measured(
                "backward",
                choices.backward,
                lambda: torch.autograd.grad(*wanted, retain_graph=True),
            )
        rows = integers(self.seed + 7, 0, self.L - 1, 4).long().unique()
        mask = rows.unsqueeze(-1) >= torch.arange(self.S) if self.causal else None
        of_rows = {"query": given["query"].detach()[:, :, rows], "attn_mask": mask}
        used = choices if self.backward else choices[:1]
        narrow = next((x.unit for x in used if x.unit in OF_16_BITS), "")
        is_linear = any(x.algorithm == "linear" for x in used)
        how = arithmetic_of(output.dtype, narrow, is_linear)
        truth = Attention(given | of_rows | {"is_causal": False}, how)
        assert_bounded("rows of a large output", output[:, :, rows], truth.output)
        if gradient is not None:
            bounds = truth.gradients(incoming[:, :, rows], ["query"])
            assert_bounded("rows of a large gradient", gradient[:, :, rows], bounds["query"])

    def measured(self, what: str, choice: Any, call: Callable[[], Any]) -> Any:
        """Calls, and holds time and memory to what this route takes."""
        tokens = self.H * (self.L + self.S)
        room = 2**25 + 32 * tokens * (self.d + self.d_v + 2 * self.M)
        F, pairs = 2 * self.M, self.H * self.L * self.S
        products = pairs * (F + self.d_v)
        if choice.algorithm == "linear":
            room += (self.L + self.S) << 12
            products = tokens * F * (F // 2 + 1) * (self.d_v + 16) + 2000 * tokens
            products += self.causal * tokens * 128 * (F + self.d_v)
        products *= 4 if what == "backward" else 1
        most = SLOWEST * products / _rate() + 0.05
        for _ in range(3):
            before, began = _memory("VmRSS"), time.process_time()
            Path("/proc/self/clear_refs").write_text("5")
            result = call()
            seconds, peak = time.process_time() - began, _memory("VmHWM") - before
            if peak > room:
                raise Wrong(f"the {what} takes {peak >> 20} MB, more than {room >> 20} MB")
            if seconds <= most:
                return result
        raise Wrong(f"the {what} takes {seconds:.2f} s in {choice.algorithm} time, over {most:.2f}")


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(field)) << 10


@functools.cache
def _rate() -> float:
    """Returns the multiply-adds that torch makes in a second, in float32."""
    x, seconds = torch.ones(512, 512), []
    for _ in range(5):
        began = time.process_time()
        x @ x
        seconds.append(time.process_time() - began)
    return 512.0**3 / min(seconds)
