"""What pytest needs to know about this suite as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores already
    config.addinivalue_line("markers", "compiles: compiles C++ for minutes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts what compiles first, so that one worker does not end up compiling alone."""
    items.sort(key=lambda item: item.get_closest_marker("compiles") is None)


@pytest.fixture(scope="session")
def source_tree() -> Path:
    """The root of the repository (or of an unpacked sdist)."""
    return Path(__file__).resolve().parents[2]
