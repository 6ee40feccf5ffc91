"""The snippets of docs/guide/parallel.md run as shown, in one process that torchrun would start."""

from __future__ import annotations

import re
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "parallel.md").read_text()
SNIPPETS = dict(
    re.findall(r"^## ([^\n]*)\n\n```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)
)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The environment of torchrun's only process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    for name, value in (of_torchrun | {"MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_snippet_is_found() -> None:
    assert len(SNIPPETS) == len(re.findall("```python", PAGE)) >= 5


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("section", SNIPPETS)
def test_the_snippet_of_each_section_runs(section: str) -> None:
    if section == "transformers":
        pytest.importorskip("transformers")
    source = SNIPPETS[section]
    if "init_process_group" not in source:  # the first one begins for all
        dist.init_process_group("gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and of transformers
        exec(compile(source, f"docs/guide/parallel.md, {section}", "exec"), {})
    assert torch.is_grad_enabled()
