"""The snippets of docs/guide/integrations.md run as shown, where their libraries are installed."""

from __future__ import annotations

import re
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ikattn
from ikattn.integrations.opacus import prepare
from ikattn.integrations.peft import with_trainable_frequencies
from transformers_models import keyword_of_cache

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "integrations.md").read_text()
SNIPPETS = dict(
    re.findall(r"^## ([^\n]*)\n\n```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)
)
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
    assert SNIPPETS.keys() == LIBRARIES.keys()
    assert len(re.findall("```python", PAGE)) == len(SNIPPETS)


@pytest.mark.parametrize("section", LIBRARIES)
def test_the_snippet_of_each_section_runs(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(LIBRARIES[section], reason=f"{LIBRARIES[section]} is not installed")
    monkeypatch.chdir(tmp_path)  # which is where snippets save
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_torchrun = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if section == "DDP and FSDP2":
        for name, value in of_torchrun.items():
            monkeypatch.setenv(name, str(value))
    torch.manual_seed(0)
    snippet = SNIPPETS[section]
    if section == "transformers":
        snippet = snippet.replace(" cache=cache", f" {keyword_of_cache()}=cache")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries
            exec(compile(snippet, f"docs/guide/integrations.md, {section}", "exec"), {})
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("library", ["transformers", "peft", "opacus"])
def test_a_missing_library_is_an_error_that_says_what_to_install(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == library:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    model = ikattn.convert(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    calls: dict[str, Callable[[], object]] = {
        "transformers": ikattn.recorder.register_norms,
        "peft": lambda: with_trainable_frequencies(model),
        "opacus": lambda: prepare(model),
    }
    with pytest.raises(ModuleNotFoundError, match=rf"needs {library}: pip install .*\[{library}\]"):
        calls[library]()
