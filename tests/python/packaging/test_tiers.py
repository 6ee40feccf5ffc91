"""Tests of every commit name every option, operator and public name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import ikattn
from samples import DTYPES, FEW, SAMPLES, Sample
from tiers import covering, turn

COMMIT = covering(SAMPLES, DTYPES, FEW, "commit")


def test_every_sample_runs_at_every_commit_and_all_pairs_in_full() -> None:
    assert {sample for sample, _ in COMMIT} == set(SAMPLES)
    assert len(COMMIT) == len(set(COMMIT)) < 1.2 * len(SAMPLES)
    full = covering(SAMPLES, DTYPES, FEW, "full")
    assert len(full) == len(set(full)) == len(SAMPLES) * len(DTYPES)
    assert {sample for sample, _ in covering(SAMPLES, DTYPES, FEW, "check")} == set(FEW)


@pytest.mark.parametrize("option", [field.name for field in fields(Sample)][1:])
def test_every_option_meets_every_dtype(option: str) -> None:
    usual = getattr(Sample("usual"), option)
    unusual = {dtype for sample, dtype in COMMIT if getattr(sample, option) != usual}
    assert unusual == set(DTYPES)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_settings_take_turns_whatever_repeats_among_the_samples(count: int) -> None:
    turns = [turn(count, index) for index in range(count * count)]
    assert all(set(turns[first::count]) == set(range(count)) for first in range(count))


@pytest.fixture
def texts(request: pytest.FixtureRequest) -> list[str]:
    """The sources of this run's test files and of what they share."""
    files = {item.path for item in request.session.items}
    suite = Path(__file__).parents[1]
    if len(files) < 0.8 * len(list(suite.rglob("test_*.py"))):
        pytest.skip("this run is of some files alone")
    shared = suite.glob("support/*.py")
    return [path.read_text() for path in (*files, *shared) if path != Path(__file__)]


def test_every_operator_is_called(texts: list[str]) -> None:
    schemas = [schema.name for schema in torch._C._jit_get_all_schemas()]
    names = {name.removeprefix("ikattn::") for name in schemas if name.startswith("ikattn::")}
    # Fake kernels call those that only check; others may be called through the first.
    names = {re.sub("_(backward|reference)$", "", x) for x in names if not x.startswith("check_")}
    assert len(names) > 10
    left_out = [name for name in names if not any(re.search(rf"\b{name}\b", t) for t in texts)]
    assert left_out == []


def test_every_name_at_the_top_function_of_a_room_and_integration_is_used(texts):
    names = {*ikattn.__all__, *(x.name for x in pkgutil.iter_modules(ikattn.integrations.__path__))}
    for room in (x.name for x in pkgutil.iter_modules(ikattn.__path__) if x.name[0] != "_"):
        public = vars(importlib.import_module(f"ikattn.{room}"))
        functions = (name for name in public.get("__all__", ()) if inspect.isfunction(public[name]))
        names.update(functions)
    left_out = [name for name in names if not any(re.search(rf"\b{name}\b", t) for t in texts)]
    assert left_out == []
