"""How results are held to what they must be."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from devices import DEVICE
from ikattn.maps import NormStats
from samples import LAYOUTS


class Wrong(AssertionError):
    """Something that must hold does not."""


worst: dict[str, float] = {}  # the largest error so far over its bound, by what erred


GUARD = 1024  # elements before and after an input


def guarded(x: Tensor) -> Tensor:
    """Returns the same view of a larger memory, whose other numbers are NaN, or true."""
    if x.is_neg() or not (x.is_floating_point() or x.dtype == torch.bool):
        return x
    own = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    memory = own.new_full((len(own) + 2 * GUARD,), math.nan if x.is_floating_point() else True)
    memory[GUARD : GUARD + len(own)] = own
    return memory.as_strided(x.shape, x.stride(), GUARD + x.storage_offset())


def laid_out(x: Tensor, layout: str) -> Tensor:
    return guarded(LAYOUTS[layout](x))


def placed(x: Any) -> Any:
    """Returns a tensor as the same view of a copy of its memory on the device of the tests."""
    if isinstance(x, NormStats):
        return NormStats(placed(x.weight), placed(x.scale), x.centered)
    if DEVICE == "cpu" or not isinstance(x, Tensor):
        return x
    if x.is_neg():
        return torch._neg_view(placed(torch._neg_view(x)))
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(DEVICE)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


@contextlib.contextmanager
def unchanged(*given: Any) -> Iterator[None]:
    """Holds tensors, and all the memory that they are views of, to their bits."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    before = bits(*tensors, storage=True)
    yield
    if bits(*tensors, storage=True) != before:
        raise Wrong("an input, or what lies around it, has changed")


def bits(*tensors: Tensor, storage: bool = False) -> bytes:
    """Returns the bytes of tensors, or of all the memory that they are views of."""

    def of(x: Tensor) -> bytes:
        if storage:
            memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
            return memory.numpy().tobytes()
        dense = x.detach().cpu().resolve_neg().clone(memory_format=torch.contiguous_format)
        return dense.reshape(-1).view(torch.uint8).numpy().tobytes()

    return b"".join(map(of, tensors))


def assert_bits(what: str, expected: Iterable[Tensor], found: Iterable[Tensor]) -> None:
    for one, other in zip(expected, found, strict=True):
        if one.shape != other.shape or bits(one) != bits(other):
            count = int((one.cpu() != other.cpu()).sum()) if one.shape == other.shape else -1
            raise Wrong(f"{what}: other bits, in {count} of {one.numel()} elements")


def assert_bounded(
    what: str, found: Tensor, truth: tuple[Tensor, Tensor], times: float = 1.0
) -> None:
    """Holds each element to its bound; NaN in the truth wants a number that is not finite."""
    expected, bound = truth
    found = found.detach().cpu().double()
    if found.shape != expected.shape:
        raise Wrong(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if found.numel() == 0:
        return
    must_be_nan = expected.isnan()
    if bool((must_be_nan & found.isfinite()).any()):
        raise Wrong(f"{what}: finite where a visible number is not")
    off = (found - expected).abs() / (times * bound)
    off = off.masked_fill(must_be_nan | (bound == math.inf) | (found == expected), 0.0)
    largest = math.inf if bool(off.isnan().any()) else float(off.max())
    worst[what] = max(worst.get(what, 0.0), largest)
    if largest > 1:
        at = tuple(map(int, torch.unravel_index(off.nan_to_num(math.inf).argmax(), off.shape)))
        raise Wrong(
            f"{what}{list(at)}: {float(found[at])!r} is not {float(expected[at])!r} within "
            f"{float(times * bound[at]):.1e} ({largest:.2g} times that)"
        )
