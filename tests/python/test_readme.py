"""What the README shows runs as shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def test_examples_of_the_readme_run_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    attention, analysis = map(run, code_blocks("README.md"))
    assert torch.isfinite(attention["output"]).all()
    assert attention["weights"].shape == (2, 1000, 1000)
    torch.testing.assert_close(attention["weights"].sum(-1), torch.ones(2, 1000))
    assert analysis["contribution"].shape == (1, 12, 12)
    torch.testing.assert_close(analysis["flow"].sum(-1), torch.ones(1, 12))
    assert (tmp_path / "maps.html").stat().st_size > 10_000


@pytest.mark.parametrize("page", ["docs/analysis.md", "docs/analysis_aggregation.md"])
def test_examples_of_the_analysis_pages_run_as_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks(page)
    assert blocks
    for block in blocks:
        run(block)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in DOCS.glob("*.md"))])
def test_files_a_page_links_to_exist(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
