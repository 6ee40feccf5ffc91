"""Snippets of the guide's pages on libraries and devices run as shown where these are."""

from __future__ import annotations

import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ikattn
from ikattn.integrations.opacus import prepare
from ikattn.integrations.peft import with_trainable_frequencies
from transformers_models import keyword_of_cache

GUIDE = Path(__file__).parents[3] / "docs" / "guide"
PAGES = {name: (GUIDE / f"{name}.md").read_text() for name in ("integrations", "parallel")}
SECTION = re.compile(r"^## ([^\n]*)\n\n```python\n(.*?)```", re.DOTALL | re.MULTILINE)
SNIPPETS = {
    (page, section): snippet
    for page, text in PAGES.items()
    for section, snippet in SECTION.findall(text)
}
LIBRARIES = {
    "transformers": "transformers",
    "PEFT": "peft",
    "Opacus": "opacus",
    "PyTorch Geometric": "torch_geometric",
    "Lightning": "lightning",
    "DDP and FSDP2": "torch.distributed",
    "timm": "timm",
    "inseq": "inseq",
    "Captum": "captum",
    "BertViz": "bertviz",
}


def test_every_section_has_a_snippet() -> None:
    assert {section for page, section in SNIPPETS if page == "integrations"} == {*LIBRARIES}
    assert sum(len(re.findall("```python", text)) for text in PAGES.values()) == len(SNIPPETS)


@pytest.fixture
def folder(
    page: str, section: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """A folder where snippets save; for those of several devices torchrun's only process."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    if page == "parallel" or section == "DDP and FSDP2":
        for name, value in (of_torchrun | {"MASTER_ADDR": "127.0.0.1"}).items():
            monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("page", "section"), sorted(SNIPPETS))
def test_the_snippet_of_each_section_runs(page: str, section: str) -> None:
    library = LIBRARIES.get(section, "torch.distributed")
    pytest.importorskip(library, reason=f"{library} is not installed")
    snippet = SNIPPETS[page, section]
    if " cache=cache" in snippet:
        snippet = snippet.replace(" cache=cache", f" {keyword_of_cache()}=cache")
    if page == "parallel" and "init_process_group" not in snippet:  # the first one begins for all
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        exec(compile(snippet, f"docs/guide/{page}.md, {section}", "exec"), {})
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("library", ["transformers", "peft", "opacus"])
def test_a_missing_library_is_an_error_that_says_what_to_install(library, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == library:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    model = ikattn.convert(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    calls: dict[str, Callable[[], object]] = {
        "transformers": ikattn.integrations.transformers.attention.register_implicit,
        "peft": lambda: with_trainable_frequencies(model),
        "opacus": lambda: prepare(model),
    }
    with pytest.raises(ModuleNotFoundError, match=rf"needs {library}: pip install .*\[{library}\]"):
        calls[library]()
