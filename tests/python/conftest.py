"""The settings and fixtures of this suite as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Tab, browser_tab, find_chromium


def pytest_configure(config: pytest.Config) -> None:
    """One thread, for the workers share the cores; what tests threads sets their number itself.

    A thread that waits awake for one without a core makes a small call twenty times as slow.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of this tier, and starts what compiles first.

    Otherwise one worker could end up compiling alone.
    """
    from tiers import TIER

    if TIER != "full":
        _keep(config, items, [item.get_closest_marker("full") is None for item in items])
    if TIER == "check":
        _keep(config, items, _checked(items))
    items.sort(key=lambda item: item.get_closest_marker("compiles") is None)


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: list[bool]) -> None:
    left_out = [item for item, wants in zip(items, wanted, strict=True) if not wants]
    items[:] = [item for item, wants in zip(items, wanted, strict=True) if wants]
    config.hook.pytest_deselected(items=left_out)


def _checked(items: list[pytest.Item]) -> list[bool]:
    """The tests of operators, and of every module the first that compiles nothing."""
    modules: set[Path] = set()
    wanted = []
    for item in items:
        is_first = item.path not in modules and item.get_closest_marker("compiles") is None
        if is_first:
            modules.add(item.path)
        wanted.append(is_first or item.get_closest_marker("operators") is not None)
    return wanted


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


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    """A tab of a headless Chromium, for the tests of pages."""
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    pytest.importorskip("websocket", reason="pip install websocket-client")
    with browser_tab(program) as opened:
        yield opened
