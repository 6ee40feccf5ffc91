"""transformers shares a Llama out over two processes, and its kernels with it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ikattn

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)
pytest.importorskip("transformers.distributed.tensor_parallel")

import llama_programs
from agreement import assert_close
from ikattn.integrations.transformers import from_pretrained
from llama_programs import KERNELS, LLAMA, TOKENS
from processes import run_processes

TOLERANCE = 1e-11  # all of it in float64


def test_kernels_are_in_the_plan_where_their_heads_are() -> None:
    model = ikattn.convert(llama_programs.make_model(), num_frequencies=6)
    assert model.tp_plan["model.layers.*.self_attn.spectral"] == "ikattn_heads"
    assert model.model.tp_plan["layers.*.self_attn.spectral"] == "ikattn_heads"
    whole = llama_programs.make_model()
    whole.tp_plan = {"model.layers.*.self_attn.q_proj": "colwise_gather_output"}
    assert len(ikattn.convert(whole, num_frequencies=6).tp_plan) == 1
    assert not ikattn.convert(llama_programs.make_bert(), num_frequencies=6).tp_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    llama_programs.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_processes(llama_programs.run, folder, 2)


@pytest.mark.parametrize("way", [*KERNELS, "by torch"])
def test_two_ranks_compute_what_one_process_does(way, results, folder):
    model = from_pretrained(LLAMA, folder / (way if way in KERNELS else "direct"))
    expected = llama_programs.evaluate(model)
    assert expected["gradient of model.layers.0.self_attn.q_proj.weight"].any()
    for of_rank in results:
        assert of_rank[way].keys() == expected.keys()
        for name, x in expected.items():
            scale = 1e-3 * expected["loss"].item()
            assert_close(of_rank[way][name].double(), x.double(), TOLERANCE, name, scale)


def test_two_ranks_average_keys_as_one_process_does(results: list[dict[str, Any]]) -> None:
    expected = llama_programs.evaluate_bert(llama_programs.use_mikan(llama_programs.make_bert()))
    for of_rank in results:
        for name, x in expected.items():
            assert_close(of_rank["bert"][name], x, TOLERANCE, name, 1e-3 * abs(expected["loss"]))


def test_each_rank_holds_the_frequencies_of_its_heads(results, folder):
    whole = from_pretrained(LLAMA, folder / "direct").model.layers[0].self_attn.spectral.w1
    assert torch.equal(torch.cat([of_rank["local"] for of_rank in results]), whole)


@pytest.mark.usefixtures("results")
def test_what_two_ranks_save_one_process_loads(folder: Path) -> None:
    found, expected = (from_pretrained(LLAMA, folder / name) for name in ("again", "direct"))
    for name, x in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], x)


def test_a_model_that_was_shared_out_before_takes_the_first_ranks_frequencies(results, folder):
    first = results[0]["changed when loaded"]
    plain = ikattn.convert(LLAMA.from_pretrained(folder / "softmax"), num_frequencies=6)
    plain.load_state_dict(first["state"], strict=False)
    for of_rank in results:
        found = of_rank["changed when loaded"]
        assert_close(found["logits"], plain(TOKENS).logits, TOLERANCE)
        assert all(torch.equal(x, first["state"][name]) for name, x in found["state"].items())


def test_every_head_has_dropout_of_its_own(results: list[dict[str, Any]]) -> None:
    kept = torch.cat([of_rank["dropout"] for of_rank in results], 1).movedim(1, 0) != 0
    below = torch.ones(64, 64).tril().bool()
    for a, b in itertools.combinations(kept[..., below], 2):
        assert 0.4 < (a == b).double().mean() < 0.6


ERRORS = {
    "whole kernels": "RuntimeError: ikattn_implicit: LlamaAttention got queries of 2 heads, and",
    "whole generators": "RuntimeError: ikattn_implicit: LlamaAttention got queries of 2 heads, and",
    "key heads": "ValueError: ikattn_implicit, keys: expected a number of ranks that divides the 1",
    "keys of all": "RuntimeError: ikattn_implicit: LlamaAttention got keys of 2 heads, expected",
    "wrapped": "ValueError: convert: expected a model that is not wrapped yet, got",
    "without kernels": "RuntimeError: LlamaAttention has the attention implementation",
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_cannot_be_is_refused_on_every_rank(what: str, results: list[dict[str, Any]]) -> None:
    assert results[0]["errors"].keys() == ERRORS.keys()
    for of_rank in results:
        assert of_rank["errors"][what].startswith(ERRORS[what]), of_rank["errors"][what]
