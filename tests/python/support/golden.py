"""Finds the arrays of the authors' own code, tests/golden, whose README says where they are from.

With IKATTN_TESTS=full and the whole set beside the repository, each file of that set comes too, and
in the place of its trimmed copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tiers import TIER

TRIMMED = Path(__file__).resolve().parents[2] / "golden"
WHOLE = TRIMMED.parents[2] / "shared" / "data" / "golden"


def golden_files(folder: str, pattern: str = "*.npz") -> list[Path]:
    """Returns the files of a folder, such as "globenc", in the order of their names."""
    roots = [TRIMMED, WHOLE] if TIER == "full" else [TRIMMED]
    found = {path.name: path for root in roots for path in (root / folder).glob(pattern)}
    if not found:
        raise FileNotFoundError(
            f"{TRIMMED / folder} has no {pattern}; tests/golden/trim.py makes it"
        )
    return [path for _, path in sorted(found.items())]


def load_golden(folder: str, case: str) -> dict[str, Any]:
    (path,) = golden_files(folder, f"{case}.npz")
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}
