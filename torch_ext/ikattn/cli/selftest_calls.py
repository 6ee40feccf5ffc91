"""The calls of the self-test: those that reach each family of kernels, and their errors.

Results are held against the reference in float64: outputs may have twice, gradients five times the
error of a composition of torch's operators in the call's type, as in the project's tests.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ikattn

Call = dict[str, Any]

# --- Calls, and what they are held against


def attention_call(
    dtype: torch.dtype, B: int, H: int, L: int, S: int, d: int = 16, M: int = 16, **options: Any
) -> Call:
    """The arguments of a call, on the CPU, the same every time."""
    generator = torch.Generator().manual_seed(L + S + M)
    sizes = ((B, H, L, d), (B, H, S, d), (B, H, S, d), (H, d, M), (H, d, M))
    drawn = [torch.randn(size, generator=generator) for size in sizes]
    tensors = [x.to(dtype) for x in drawn[:3]] + [0.3 / d**0.5 * x for x in drawn[3:]]
    return dict(zip(("query", "key", "value", "w1", "w2"), tensors, strict=True)) | options


def _composition(
    query: Tensor, key: Tensor, value: Tensor, w1: Tensor, w2: Tensor, is_causal: bool = False
) -> Tensor:
    """Attention whose features, scores, weights and output have the type of the query."""
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    phi_q, phi_k = (
        ikattn.reference.spectral_features(x.to(wide), w1, w2).to(dtype) for x in (query, key)
    )
    scores = (phi_q @ phi_k.mT / (4 * w1.shape[-1])).to(wide)
    magnitudes = key.to(wide).square().sum(-1).unsqueeze(-2) / (2 * math.sqrt(key.shape[-1]))
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        magnitudes = magnitudes.expand_as(scores).masked_fill(hidden, -math.inf)
    exponents = (magnitudes - magnitudes.detach().amax(-1, keepdim=True)).exp()
    weights = (scores.square() + 1e-5) * exponents
    return (weights / weights.sum(-1, keepdim=True)).to(dtype) @ value


def _to(call: Call, device: str, dtype: torch.dtype | None = None) -> Call:
    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().to(device)
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x

    return {name: placed(x) for name, x in call.items()}


def _results(function: Callable[..., Tensor], call: Call) -> list[Tensor]:
    """The output of a call, and the gradients of its tensors of floating point."""
    leaves = {
        name: x.requires_grad_()
        for name, x in call.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    output = function(**call | leaves)
    if not output.requires_grad:
        return [output]
    incoming = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    return [output, *torch.autograd.grad(output, list(leaves.values()), incoming.to(output))]


def _error(found: Tensor, truth: Tensor) -> float:
    found, truth = found.detach().cpu().double(), truth.detach().cpu().double()
    if not bool(found.isfinite().all()):
        return math.inf
    return float((found - truth).abs().max() / truth.abs().max().clamp_min(1e-300))


def worst(
    function: Callable[..., Any],
    call: Call,
    device: str,
    composition: Callable[..., Any] | None = None,
    floor: float = 0.0,
) -> float:
    """The largest error of a call's outputs and gradients on a device, over what is allowed.

    composition: The same of torch's operators in the type of the call; None: the function itself
        on the CPU.
    floor: Allowed beside the composition's errors, relative to the largest element.
    """
    truth = _results(function, _to(call, "cpu", torch.float64))
    composed = _results(composition or function, _to(call, "cpu"))
    got = _results(function, _to(call, device))
    dtype = next(x.dtype for x in call.values() if isinstance(x, Tensor))
    arithmetic = torch.promote_types(dtype, torch.float32)
    worst_of_all = 0.0
    for index, (x, reference, exact) in enumerate(zip(got, composed, truth, strict=True)):
        factor, ulps = (2, 6) if index == 0 else (5, 10)
        allowed = factor * _error(reference, exact) + ulps * torch.finfo(arithmetic).eps + floor
        if index > 0 and dtype.itemsize < 4:
            allowed += torch.finfo(dtype).eps
        worst_of_all = max(worst_of_all, _error(x, exact) / allowed)
    return worst_of_all


# --- Families of a GPU


class Check(NamedTuple):
    """A family's calls, and how their error is found.

    environment: what is set beside the family's own switch.
    reached: what ``which_kernels`` must say of the first call.
    timed: makes a call of the size that the family is for; None: the first of the calls.
    """

    calls: list[Call]
    function: Callable[..., Any]
    environment: dict[str, str]
    reached: Callable[[Any], bool] | None = None
    composition: Callable[..., Any] | None = None
    timed: Callable[[], Call] | None = None
    floor: float = 0.0


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _attention(
    calls: list[Call],
    reached: Callable[[Any], bool],
    timed: Callable[[], Call] | None = None,
    linear_time: str = "auto",
) -> Check:
    environment = {"IKATTN_LINEAR_TIME": linear_time}
    function = ikattn.implicit_kernel_attention
    return Check(calls, function, environment, reached, _composition, timed)


def _maps(**given: Any) -> Any:
    return ikattn.contributions(**given).summed


def _streamed(**given: Any) -> Any:
    return ikattn.streamed_contributions(**given).summed


def _decoded(query: Tensor, key: Tensor, value: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    features = ikattn.KeyFeatures(w1, w2)
    with torch.no_grad():
        features.append(key)
        return features.attend(query, value)


def _maps_call(dtype: torch.dtype, tokens: int, H: int = 4, d: int = 16) -> Call:
    generator = torch.Generator().manual_seed(tokens)
    weights = torch.rand(2, H, tokens, tokens, generator=generator).softmax(-1)
    value = torch.randn(2, H, tokens, d, generator=generator)
    projection = torch.randn(H * d, H * d, generator=generator) / (H * d) ** 0.5
    named = {"attn_weights": weights, "value": value, "out_proj_weight": projection}
    return {name: x.to(dtype) for name, x in named.items()}


def _streamed_call(dtype: torch.dtype, tokens: int) -> Call:
    call = _maps_call(dtype, tokens)
    del call["attn_weights"]
    generator = torch.Generator().manual_seed(1)
    for name in ("query", "key"):
        call[name] = torch.randn(call["value"].shape, generator=generator).to(dtype)
    return call


def gpu_checks(device: str) -> dict[str, Check]:
    """The checks of each family, by name, of the GPU that is current or of the interpreter."""

    def having(name: str, value: str) -> Callable[[Any], bool]:
        return lambda choice: all(getattr(one, name) == value for one in choice)

    is_linear = having("algorithm", "linear")

    # Heads and queries that give every multiprocessor of Hopper's a block.
    many = {"B": 2, "H": 33, "L": 300, "d": 64} if device == "cuda" else {"B": 1, "H": 1, "L": 70}
    mma = [attention_call(t, 2, 2, 130, 150, 16, 20) for t in (BF16, F16)]
    mma += [attention_call(BF16, 1, 2, 100, 100, 16, 20, is_causal=True)]
    mma += [attention_call(F16, 1, 2, 40, 70, 24, 100)]  # wide rows
    hopper = [attention_call(BF16, S=200, M=32, **many), attention_call(F16, S=70, M=40, **many)]
    int8 = [attention_call(BF16, S=200, M=64, **many)]
    causal = [attention_call(F16, 1, 2, 1200, 1200, 16, 16, is_causal=True)]
    weights = [attention_call(dtype, 2, 2, 70, 90) for dtype in (F16, BF16)]
    for call in weights:
        del call["value"]
    checks = {
        "mma": _attention(mma, having("unit", "tensor_cores")),
        "linear": _attention(
            [attention_call(F16, 1, 2, 600, 600, 16, 16)], is_linear, linear_time="always"
        ),
        "hopper": _attention(hopper, having("unit", "hopper")),
        "int8": _attention(int8, having("scores", "int8")),
        "causal_linear": _attention(
            causal,
            is_linear,
            lambda: attention_call(BF16, 1, 8, 65536, 65536, 64, 16, is_causal=True),
            "always",
        ),
        "split": _attention(
            [attention_call(F32, 2, 2, 130, 150, 16, M) for M in (20, 40)],
            having("scores", "float16x2"),
            lambda: attention_call(F32, 4, 8, 1024, 1024, 64, 64),
        ),
        "weights": Check(weights, ikattn.implicit_kernel_weights, {}, floor=2**-8),
        "decoding": Check(
            [attention_call(F32, 2, 4, 3, 600, 16, 20), attention_call(F16, 2, 4, 1, 300, 16, 9)],
            _decoded,
            {},
            timed=lambda: attention_call(F16, 8, 32, 1, 16384, 64, 32),
            floor=4e-6,
        ),
        "given_maps": Check(
            [_maps_call(F32, 70), _maps_call(BF16, 50)],
            _maps,
            {},
            timed=lambda: _maps_call(F32, 1024, 12, 64),
            floor=4e-6,
        ),
        "streamed_maps": Check(
            [_streamed_call(dtype, 70) for dtype in (F32, BF16, F16)],
            _streamed,
            {},
            timed=lambda: _streamed_call(BF16, 2048),
            floor=2e-3,
        ),
    }
    switches = {name: f"+{name}" for name in checks} | {"mma": "-hopper"}
    return {
        name: check._replace(
            environment=check.environment | {"IKATTN_KERNELS": f"-unproven,{switches[name]}"}
        )
        for name, check in checks.items()
    }


def _run_gpu_family(family: str, device: str, is_timed: bool) -> dict[str, Any]:
    check = gpu_checks(device)[family]
    if check.reached is not None and device == "cuda":
        choice = ikattn.which_kernels(**_to(check.calls[0], device))
        if not check.reached(choice):
            return {"skipped": f"this GPU takes {choice.forward}; backward: {choice.backward}"}
    error = max(
        worst(check.function, call, device, check.composition, check.floor) for call in check.calls
    )
    found: dict[str, Any] = {"error": error}
    if is_timed and error <= 1:
        call = _to(check.timed() if check.timed else check.calls[0], device)
        found["ratio"] = _time(check.function, call) / _time(check.function, call, family)
    return found


def _time(function: Callable[..., Any], call: Call, without: str = "") -> float:
    """The median time of forward and backward, with a family or without."""
    before = os.environ["IKATTN_KERNELS"]
    if without:
        os.environ["IKATTN_KERNELS"] = f"{before},-{without}"
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        began = time.perf_counter()
        _results(function, call)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    os.environ["IKATTN_KERNELS"] = before
    return sorted(times[2:])[len(times[2:]) // 2]


# --- Instruction sets of a CPU


def cpu_environments() -> dict[str, dict[str, str]]:
    """Returns the settings that choose each set of instructions of this library and processor."""
    isas = json.loads(torch.ops.ikattn.build_info())["isas"]
    capabilities = {"baseline": "default", "avx2": "avx2", "avx512": "avx512"}
    found = {
        isa: {"ATEN_CPU_CAPABILITY": capabilities[isa], "IKATTN_SIXTEEN_BITS": "none"}
        for isa in isas
    }
    if torch.ops.ikattn.instruction_set() == "avx512":
        best = torch.ops.ikattn.sixteen_bit_instructions()
        sets = ["avx512_vnni", "avx512_bf16", "amx"]
        known = sets[: sets.index(best) + 1] if best in sets else []
        if len(isas) == 1:  # of IKATTN_ISA=native
            known = known[-1:]
        found |= {name: {"IKATTN_SIXTEEN_BITS": name} for name in known}
    return found


def _run_cpu_family(family: str) -> dict[str, Any]:
    narrow = family not in ("baseline", "avx2", "avx512")
    dtype = BF16 if narrow else F32
    calls = [
        attention_call(dtype, 1, 2, 70, 90, 16, 20),
        attention_call(dtype, 1, 2, 64, 64, 16, 20, is_causal=True),
        attention_call(dtype, 1, 1, 1300, 1300, 16, 8),  # in linear time
    ]
    taken = ikattn.which_kernels(**calls[0]).forward.unit
    if taken != family:
        return {"skipped": f"this processor takes {taken}"}
    attention = ikattn.implicit_kernel_attention
    error = max(worst(attention, call, "cpu", _composition) for call in calls)
    if not narrow:
        exact = _to(calls[0], "cpu", torch.float64)
        error = max(
            error,
            worst(attention, exact, "cpu", _composition, 1e-13),
            worst(_maps, _maps_call(F32, 40), "cpu", floor=2e-6),
        )
    return {"error": error}


# --- The process of a family


def child(family: str, device: str, is_timed: bool) -> None:
    """Runs a family's checks in this process, prints what it found, as JSON, and ends it."""
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
        found = _run_cpu_family(family)
    else:
        found = _run_gpu_family(family, device, is_timed)
    print(json.dumps(found), flush=True)
    os._exit(0)  # without what a device's threads have to say at the end
