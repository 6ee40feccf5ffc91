"""Short calls on Hopper, whose features and pairs one kernel makes."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import ikattn
from gpu import IN_THE_INTERPRETER, is_on, needs_a_gpu, on_gpu, turn

if IN_THE_INTERPRETER:
    has_hopper = os.environ.get("IKATTN_INTERPRETER_HOPPER") == "1"
else:
    has_hopper = torch.cuda.get_device_capability()[0] == 9
if not (has_hopper and is_on("hopper") and is_on("short")):
    pytest.skip("no GPU here takes short calls in one kernel", allow_module_level=True)


def arguments(dtype: torch.dtype, tokens: int, M: int, key_heads: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given = {"query": normal(2, 2, tokens, 16).to(dtype)}
    given |= {name: normal(2, key_heads, tokens, 16).to(dtype) for name in ("key", "value")}
    return given | {name: 0.1 * normal(key_heads, 16, M) for name in ("w1", "w2")}


def relative(x: Tensor, expected: Tensor) -> float:
    return float((x.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "M", "is_causal"), [(130, 64, True), (70, 20, False)])
def test_a_short_call_errs_as_the_other_kernels_do(dtype, tokens, M, is_causal, monkeypatch):
    given = arguments(dtype, tokens, M)
    options = {"is_causal": is_causal, "enable_gqa": True}
    exact = {name: x.double() for name, x in given.items()}
    expected = ikattn.reference.implicit_kernel_attention(**exact, **options)
    there = on_gpu(given)
    short = ikattn.implicit_kernel_attention(**there, **options)  # type: ignore[arg-type]
    turn(monkeypatch, "-short")
    other = ikattn.implicit_kernel_attention(**there, **options)  # type: ignore[arg-type]
    assert relative(short, expected) < 1.1 * relative(other, expected)


def test_hidden_keys_may_hold_anything() -> None:
    given = arguments(torch.bfloat16, 70, 20)
    mask = torch.ones(2, 1, 1, 70, dtype=torch.bool)
    mask[..., 50:] = False
    attend = ikattn.implicit_kernel_attention
    expected = attend(**on_gpu(given | {"attn_mask": mask}), enable_gqa=True)
    given["key"][..., 50:, :] = torch.nan
    given["value"][..., 50:, :] = torch.inf
    found = attend(**on_gpu(given | {"attn_mask": mask}), enable_gqa=True)
    assert torch.equal(found, expected)
    assert expected.isfinite().all()


def gradients(given: dict[str, Tensor], upstream: Tensor, **options: bool) -> dict[str, Tensor]:
    """Returns gradients of the sum of output times upstream, by argument."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    output = ikattn.implicit_kernel_attention(**leaves, **options)  # type: ignore[arg-type]
    found = torch.autograd.grad(output, list(leaves.values()), upstream)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize(("tokens", "M", "is_causal"), [(270, 40, False), (130, 20, True)])
def test_gradients_of_a_short_call_err_as_those_of_the_other_kernels(
    tokens: int, M: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(torch.bfloat16, tokens, M)
    upstream = torch.randn(2, 2, tokens, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    options = {"is_causal": is_causal, "enable_gqa": True}
    exact = {name: x.double().requires_grad_() for name, x in given.items()}
    output = ikattn.reference.implicit_kernel_attention(**exact, **options)
    expected = torch.autograd.grad(output, list(exact.values()), upstream.double())
    there, upstream = on_gpu(given), on_gpu({"upstream": upstream})["upstream"]
    short = gradients(there, upstream, **options)
    turn(monkeypatch, "-short")
    other = gradients(there, upstream, **options)
    for (name, x), truth in zip(short.items(), expected, strict=True):
        assert relative(x, truth) < 1.1 * relative(other[name], truth), name


@needs_a_gpu
def test_which_kernels_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = on_gpu(arguments(torch.float16, 130, 20, key_heads=2))
    assert ikattn.which_kernels(**given).forward.unit == "hopper_short"
    assert ikattn.which_kernels(**given).backward.unit == "hopper"
    # There are as many key heads as multiprocessors, or more.
    many = {name: x[:1].expand(300, -1, -1, -1) if x.dim() == 4 else x for name, x in given.items()}
    assert ikattn.which_kernels(**many).backward.unit == "hopper_short"
    turn(monkeypatch, "-short")
    assert ikattn.which_kernels(**given).forward.unit == "hopper"
    assert ikattn.which_kernels(**many).backward.unit == "hopper"
