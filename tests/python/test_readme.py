"""What the README shows runs as shown."""

from __future__ import annotations

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def code_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_python_example_of_the_readme_runs_as_shown() -> None:
    blocks = code_blocks("python")
    assert blocks
    for block in blocks:
        names: dict[str, object] = {}
        exec(block, names)
        output = names["output"]
        assert isinstance(output, torch.Tensor)
        assert torch.isfinite(output).all()
        weights = names["weights"]
        assert isinstance(weights, torch.Tensor)
        assert weights.shape == (2, 1000, 1000)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1000))


def test_files_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert missing == []
