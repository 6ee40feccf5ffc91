"""What pytest needs to know about this suite as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """One thread, for the workers share the cores; what tests threads sets their number itself.

    A thread that waits awake for one without a core makes a small call twenty times as slow.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
    import torch

    torch.set_num_threads(1)
    config.addinivalue_line("markers", "compiles: compiles C++ for minutes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts what compiles first, so that one worker does not end up compiling alone."""
    items.sort(key=lambda item: item.get_closest_marker("compiles") is None)


@pytest.fixture(scope="session")
def source_tree() -> Path:
    """The root of the repository (or of an unpacked sdist)."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    """A test whose modules and random numbers are float64, the numbers always the same."""
    import torch

    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def threads() -> Iterator[None]:
    """A test that sets the number of threads, which is given back."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
