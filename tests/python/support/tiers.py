"""How much of the suite runs: IKATTN_TESTS is ``check``, ``commit`` (where unset) or ``full``.

* ``check``: a handful of samples for the operators, each in one dtype, and the first test of every
  other module. What one runs while editing.
* ``commit``: every sample in one dtype, the dtypes taking turns; the handful in all of them.
* ``full``: every sample in every dtype, and the tests marked ``full``.

tests/README.md lists what ``full`` alone proves.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from samples import FEW, Sample, name_of

Row = TypeVar("Row")
Setting = TypeVar("Setting")

TIERS = ("check", "commit", "full")
TIER = os.environ.get("IKATTN_TESTS", "commit")
if TIER not in TIERS:
    raise ValueError(f"IKATTN_TESTS must be check, commit or full, got {TIER}")


def turn(count: int, index: int) -> int:
    """Returns which of ``count`` settings has turn ``index``.

    Turns shift by one after each round: options that repeat in a list of samples would otherwise
    meet the same setting again and again.
    """
    return (index + index // count) % count


def covering(
    rows: Sequence[Row], settings: Sequence[Setting], few: Collection[Row] = (), tier: str = TIER
) -> list[tuple[Row, Setting]]:
    """The pairs that a test runs on in a tier.

    Args:
        rows: All that the test is about, such as samples.
        settings: All that it is about, too, such as dtypes. ``full`` is every pair.
        few: Rows that meet every setting in ``commit``, and stand for all rows in ``check``, where
            without any some 15 do.
        tier: One of TIERS.
    """
    if tier == "full":
        return list(itertools.product(rows, settings))
    if tier == "check":
        rows = [row for row in rows if row in few] or rows[:: -(-len(rows) // 15)]
    pairs = []
    for index, row in enumerate(rows):
        if tier == "commit" and row in few:
            pairs += [(row, setting) for setting in settings]
        else:
            pairs.append((row, settings[turn(len(settings), index)]))
    return pairs


def each(
    names: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
    axes: Mapping[str, Sequence[Any] | Mapping[str, Any]],
    few: Collection[tuple[Any, ...]] = (),
) -> pytest.MarkDecorator:
    """Parametrizes a test by the pairs of :func:`covering`.

    Args:
        names: The arguments of a row.
        rows: Their values.
        axes: Other arguments, each with its values, whose combinations are the settings. A mapping
            names values for the ids of tests; others, as those of rows, are named by ``name_of``.
        few: As for :func:`covering`.
    """
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(None, x) for x in values]
        for values in axes.values()
    ]

    def parameters(row: tuple[Any, ...], setting: tuple[tuple[str | None, Any], ...]) -> Any:
        told = [(None, value) for value in row] + list(setting)
        names_of_all = [str(name_of(x) or x) if name is None else name for name, x in told]
        return pytest.param(*(x for _, x in told), id="-".join(names_of_all))

    pairs = covering(rows, list(itertools.product(*named)), few)
    return pytest.mark.parametrize((*names, *axes), [parameters(*pair) for pair in pairs])


def each_call(
    samples: Iterable[Sample],
    few: Iterable[Sample] = FEW,
    **axes: Sequence[Any] | Mapping[str, Any],
) -> pytest.MarkDecorator:
    """Parametrizes a test by ``sample`` and by the axes, as :func:`each` does.

    Example:
        @each_call(SAMPLES, dtype=DTYPES, average={"per head": False, "averaged": True})
        def test_something(sample, dtype, average): ...
    """
    rows = [(sample,) for sample in samples]
    return each(("sample",), rows, axes, [(sample,) for sample in few])


def share(rows: Sequence[Row], index: int, of: int = 4) -> Sequence[Row]:
    """One row in ``of``, from row ``index`` on; all in ``full``. For loops within a test."""
    return rows if TIER == "full" else rows[index % of :: of]


def few_of(samples: Sequence[Sample]) -> Sequence[Sample]:
    """All in ``full``, otherwise those of FEW: for what holds of a call whatever its numbers."""
    return samples if TIER == "full" else [sample for sample in samples if sample in FEW]
