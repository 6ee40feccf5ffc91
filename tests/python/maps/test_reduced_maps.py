"""Maps reduced as they are made, and of chosen queries, against whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ikattn
from agreement import assert_close
from ikattn.maps import Contributions, Groups, PairMap, Recording, TopK, TopSources
from ikattn.maps.sequences import AXES
from ikattn.recorder import record
from ikattn.recorder.runs import rows as made_rows
from ikattn.recorder.runs.rows import in_own_coordinates
from programs import megabytes_grown
from recorded_models import TOLERANCE, attention, encoder, recorded
from tiny_transformers import build_tiny
from transformers_models import build, inputs_of

pytestmark = pytest.mark.usefixtures("float64_by_default")

PAIR_MAPS = [name for name, axes in AXES.items() if "L" in axes]
QUERIES: list[Any] = [slice(1, 3), slice(-2, None), slice(None, None, 2), [2, 0, 1], [-1]]


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps are made in four blocks, however small they are."""
    monkeypatch.setattr(made_rows, "FEW", 0)


def pair_maps(maps: Contributions) -> dict[str, Tensor]:
    return {name: x for name in PAIR_MAPS if (x := getattr(maps, name)) is not None}


def explicit(map_: Tensor, reduce: str, diagonal: int = 0) -> Tensor:
    if reduce == "columns":
        return map_.sum(-2)
    if reduce == "diagonal":
        return map_.diagonal(diagonal, -2, -1)
    return map_.gather(-1, map_.abs().topk(min(8, map_.size(-1)), -1).indices)  # parts have signs


def assert_reduced(found: Recording, whole: Recording, reduce: str, batch: int = 0) -> None:
    names = list(whole.batches[batch])
    assert list(found.batches[batch]) == names
    for name in names:
        maps, expected = found.batches[batch][name], whole.batches[batch][name]
        assert not pair_maps(maps)
        assert sorted(maps.reduced) == sorted(pair_maps(expected))
        for map_name, map_ in pair_maps(expected).items():
            got = maps.reduced[map_name]
            values = got.values if isinstance(got, TopSources) else got
            diagonal = map_.size(-1) - map_.size(-2)
            assert_close(values, explicit(map_, reduce, diagonal), TOLERANCE)
            if isinstance(got, TopSources):
                there = got.sources >= 0
                picked = map_.gather(-1, got.sources.clamp_min(0))
                assert_close(picked[there], values[there], TOLERANCE)
                assert not values[~there].any()
        for field in ("value_norms", "magnitude"):
            if getattr(expected, field) is not None:
                assert_close(getattr(maps, field), getattr(expected, field), TOLERANCE)
        assert list(maps.mixing_ratio) == list(expected.mixing_ratio)
        for key, ratio in expected.mixing_ratio.items():
            assert_close(maps.mixing_ratio[key], ratio, TOLERANCE)


# --- Every kind of model

CASES = ["post", "pre", "implicit", "bert", "bert, eager", "llama", "mistral", "gpt2", "t5", "vit"]


def model_and_inputs(case: str) -> tuple[Any, Any]:
    if case in ("post", "pre"):
        return encoder(norm_first=case == "pre"), torch.randn(2, 6, 16)
    if case == "implicit":
        return ikattn.convert(encoder()), torch.randn(2, 6, 16)
    pytest.importorskip("transformers")
    family, _, implementation = case.partition(", ")
    return build(family, implementation or "sdpa"), inputs_of(family)


@pytest.mark.parametrize("case", CASES)
def test_reduced_maps_are_those_of_whole_maps(case: str) -> None:
    model, inputs = model_and_inputs(case)
    whole = recorded(model, inputs)
    names = ["columns", "top_k"] + ["diagonal"] * (case != "t5")
    for reduce in names:
        assert_reduced(recorded(model, inputs, reduce=reduce), whole, reduce)


@pytest.mark.parametrize("case", CASES)
def test_chosen_rows_are_those_of_whole_maps(case: str) -> None:
    model, inputs = model_and_inputs(case)
    whole = recorded(model, inputs).batches[0]
    for queries in QUERIES[CASES.index(case) % 2 :: 2]:
        for name, maps in recorded(model, inputs, queries=queries).batches[0].items():
            L = pair_maps(whole[name])["summed"].size(-2)
            for b in range(2):
                padding = whole[name].query_padding
                own = torch.arange(L) if padding is None else (~padding[b]).nonzero()[:, 0]
                chosen = own[queries]
                rows = slice(None) if maps.query_padding is None else ~maps.query_padding[b]
                if len(own) == L:
                    is_of_all = bool((maps.rows >= 0).all())
                    assert (maps.rows if is_of_all else maps.rows + L).tolist() == chosen.tolist()
                for map_name, map_ in pair_maps(whole[name]).items():
                    found = getattr(maps, map_name)[b][..., rows, :]
                    assert_close(found, map_[b][..., chosen, :], TOLERANCE)
                for key, ratio in whole[name].mixing_ratio.items():
                    assert_close(maps.mixing_ratio[key][b][rows], ratio[b][chosen], TOLERANCE)


def test_padding_is_no_source_and_has_none() -> None:
    pytest.importorskip("transformers")
    model, inputs = build("bert"), inputs_of("bert")
    padding = inputs["attention_mask"] == 0
    for maps in recorded(model, inputs, maps="encoder", reduce=TopK(6)).batches[0].values():
        assert (maps.reduced["encoder"].sources[padding] == -1).all()
        assert (maps.reduced["encoder"].sources[1, 0] >= 4).sum() == 0


def test_masks_of_modules_are_cut_with_their_rows() -> None:
    module, x = attention(batch_first=True), torch.randn(2, 6, 16)
    mask = torch.randn(8, 6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])

    def run(**options: Any) -> Contributions:
        with torch.no_grad(), record(module, "all", **options) as recording:
            bias = torch.zeros(2, 6).masked_fill(padding, -torch.inf)
            module(x, x, x, attn_mask=mask, key_padding_mask=bias)
        return recording["MultiheadAttention"]

    whole, columns, some = run(), run(reduce="columns"), run(queries=[3, 1])
    for name, map_ in pair_maps(whole).items():
        assert_close(columns.reduced[name], map_.sum(-2), TOLERANCE)
        assert_close(getattr(some, name), map_[..., [3, 1], :], TOLERANCE)


def test_steps_of_generate_are_reduced_call_by_call() -> None:
    pytest.importorskip("transformers")
    model = build("llama", head="ForCausalLM")
    ids = torch.tensor([[5, 6, 7, 8]])

    def run(**options: Any) -> Recording:
        with torch.no_grad(), record(model, ("summed", "with_residual"), **options) as recording:
            model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
        return recording

    whole = run()
    assert len(whole.batches) == 3
    for reduce in ("columns", "diagonal", "top_k"):
        found = run(reduce=reduce)
        for call in range(3):
            assert_reduced(found, whole, reduce, call)
    for call, last in zip(whole.batches, run(queries=slice(-1, None)).batches, strict=True):
        for name in call:
            assert_close(last[name].summed, call[name].summed[:, -1:], TOLERANCE)


def test_rows_that_a_slice_does_not_reach_are_none() -> None:
    model, x = encoder(), torch.randn(1, 4, 16)
    maps = recorded(model, x, queries=slice(7, 9))["layers.0.self_attn"]
    assert maps.summed.shape == (1, 0, 4)
    maps = recorded(model, x, queries=slice(7, 9), reduce="columns")["layers.0.self_attn"]
    assert not maps.reduced["summed"].any()
    assert recorded(model, x, queries=slice(None))["layers.0.self_attn"].rows is None


def test_reductions_hold_with_chosen_rows_nested_recordings_and_check_all() -> None:
    model, x = encoder(), torch.randn(2, 6, 16)
    options: Any = {"reduce": TopK(2), "queries": [1, 5], "check": "all"}
    with (
        torch.no_grad(),
        record(model, "summed") as outer,
        record(model, "summed", **options) as inner,
    ):
        model(x)
    expected = outer["layers.1.self_attn"].summed[:, [1, 5]].topk(2)
    found = inner["layers.1.self_attn"]
    assert_close(found.reduced["summed"].values, expected.values, TOLERANCE)
    assert torch.equal(found.reduced["summed"].sources, expected.indices)
    assert found.rows.tolist() == [1, 5]


def test_checks_hold_reduced_layers_to_what_the_model_computed() -> None:
    module, x = attention(batch_first=True), torch.randn(1, 5, 16)
    module.register_forward_hook(lambda module, args, output: (1.5 * output[0], output[1]))
    inputs = {"query": x, "key": x, "value": x}
    for check in ("rows", "all"):
        with pytest.raises(RuntimeError, match="does not add up"):
            recorded(module, inputs, "summed", reduce="columns", check=check)


@pytest.mark.parametrize("case", ["encoder", "grouped", "capped"])
def test_many_blocks_have_the_maps_of_few(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of heads are then in coordinates of their own, where nothing else is asked for."""
    if case == "encoder":
        model, inputs = encoder(), torch.randn(2, 9, 16)
    else:
        pytest.importorskip("transformers")
        model = build("llama") if case == "grouped" else build_tiny("gemma2")
        inputs = inputs_of("llama")
    whole = recorded(model, inputs, ("summed", "per_head", "value_norms", "weights"))
    taken: list[int] = []

    def noted(call: Any, projection: Tensor) -> Any:
        taken.append(call.sizes[1])
        return in_own_coordinates(call, projection)

    monkeypatch.setattr(made_rows, "in_own_coordinates", noted)
    found = recorded(model, inputs, whole.maps, reduce="columns")
    assert_reduced(found, whole, "columns")
    assert taken == [4] * len(whole.names)


def test_reduced_maps_have_a_gradient_on_demand() -> None:
    module, x = attention(batch_first=True), torch.randn(1, 5, 16, requires_grad=True)
    with record(module, detach=False) as whole, record(module, detach=False, reduce="columns") as r:
        module(x, x, x)
    expected = whole["MultiheadAttention"].summed.sum(-2).square().sum()
    found = r["MultiheadAttention"].reduced["summed"].square().sum()
    gradients = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in (expected, found)]
    assert_close(gradients[1], gradients[0], 1e-9)


# --- Reductions


def test_groups_add_up_columns_by_name_by_list_and_by_sequence() -> None:
    model, x = encoder(), torch.randn(2, 6, 16)
    map_ = recorded(model, x, "summed")["layers.0.self_attn"].summed
    named = Groups({"system": slice(0, 2), "image": [2, 4], "rest": slice(2, None)})
    assert named.names == ["system", "image", "rest"]
    parts = (map_[..., :2], map_[..., [2, 4]], map_[..., 2:])
    expected = torch.stack([part.sum(-1) for part in parts], -1)
    numbers = torch.tensor([[0, 0, 1, 1, -1, 1], [1, 0, 0, 0, 0, -1]])
    assert Groups(numbers).names == ["0", "1"]
    member = torch.stack([numbers == 0, numbers == 1]).to(map_)
    by_sequence = torch.einsum("bts,nbs->btn", map_, member)
    for groups, wanted in ((named, expected), (Groups(numbers), by_sequence)):
        found = recorded(model, x, "summed", reduce=groups)["layers.0.self_attn"]
        assert_close(found.reduced["summed"], wanted, TOLERANCE)
    found = recorded(model, x, "weights", reduce=named)["layers.0.self_attn"].reduced["weights"]
    assert found.shape == (2, 4, 6, 3)
    assert_close(found[..., 0] + found[..., 2], torch.ones(2, 4, 6), TOLERANCE)


def test_function_gets_rows_and_the_number_of_the_first() -> None:
    firsts: list[int] = []

    def entropy(rows: Tensor, first: int) -> Tensor:
        firsts.append(first)
        return -(rows * rows.log()).sum(-1)

    model, x = encoder(), torch.randn(2, 6, 16)
    weights = recorded(model, x, "weights")["layers.1.self_attn"].weights
    found = recorded(model, x, "weights", reduce=entropy)["layers.1.self_attn"]
    assert_close(found.reduced["weights"], -(weights * weights.log()).sum(-1), TOLERANCE)
    assert firsts == [0, 2, 4] * 2


def test_reduction_of_ones_own_sees_what_it_needs() -> None:
    class LargestEntry:
        def begin(self, about: PairMap) -> Any:
            begun.append(about)
            return LargestOf()

    class LargestOf:
        def __init__(self) -> None:
            self.found: list[Tensor] = []

        def add(self, rows: Tensor, queries: range) -> None:
            self.found.append(rows.amax((-2, -1)))

        def finish(self) -> Tensor:
            return torch.stack(self.found).amax(0)

    class Nothing(LargestEntry):
        def begin(self, about: PairMap) -> Any:
            state = super().begin(about)
            state.finish = lambda: None
            return state

    begun: list[PairMap] = []
    model, x = encoder(), torch.randn(2, 6, 16)
    whole = recorded(model, x, "summed")["layers.0.self_attn"]
    found = recorded(model, x, "summed", reduce=LargestEntry())["layers.0.self_attn"]
    assert_close(found.reduced["summed"], whole.summed.amax((-2, -1)), TOLERANCE)
    assert begun[0] == ("layers.0.self_attn", "summed", (2, 6, 6), 0)
    with pytest.raises(TypeError, match="finish of a reduction must return a tensor or TopSources"):
        recorded(model, x, "summed", reduce=Nothing())


# --- Files


def test_saved_and_loaded_as_they_are(tmp_path: Path) -> None:
    model, x = encoder(), torch.randn(2, 6, 16)
    for suffix in (".safetensors", ".npz", ".json"):
        for reduce in ("columns", "top_k"):
            recording = recorded(model, x, "all", reduce=reduce, queries=[2, 4])
            recording.save(tmp_path / f"maps{suffix}")
            loaded = ikattn.load_maps(tmp_path / f"maps{suffix}")
            for name, maps in recording.batches[0].items():
                found = loaded[name]
                assert torch.equal(found.rows, torch.tensor([2, 4]))
                assert sorted(found.reduced) == sorted(maps.reduced)
                for leaf, other in zip(
                    tree_leaves([found.reduced[key] for key in maps.reduced]),
                    tree_leaves(list(maps.reduced.values())),
                    strict=True,
                ):
                    assert torch.equal(leaf, other)


# --- Memory


class Largest(TorchDispatchMode):
    """The largest tensor that an operation of torch made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(output) if isinstance(x, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return output


@pytest.mark.parametrize("case", ["stock", "implicit", "llama"])
def test_nothing_has_the_size_of_a_map(case: str) -> None:
    L = 768
    if case == "llama":
        pytest.importorskip("transformers")
        model = build("llama", max_position_embeddings=L)
        inputs: Any = {"input_ids": torch.randint(3, 30, (1, L))}
    else:
        model = ikattn.convert(encoder()) if case == "implicit" else encoder()
        inputs = torch.randn(1, L, 16)
    maps = ("summed", "with_residual", "mixing_ratio")
    with Largest() as largest:
        found = recorded(model, inputs, maps, reduce="top_k").batches[0]
    assert all(each.reduced["summed"].values.shape == (1, L, 8) for each in found.values())
    assert largest.numbers <= L * L / 4


def test_memory_of_a_long_call_is_less_than_a_map() -> None:
    before = """
        layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 3).eval()
        x = torch.randn(1, 4096, 32)
        with torch.no_grad(), ikattn.record(model, "summed", queries=slice(0, 8)):
            model(x)
    """
    call = """
        with torch.no_grad(), ikattn.record(model, "summed", reduce="columns") as recording:
            model(x)
        assert recording["layers.2.self_attn"].reduced["summed"].shape == (1, 4096)
    """
    assert megabytes_grown(before, call) < 128  # two maps; without it three are kept


def test_a_map_that_a_run_does_not_have_is_not_reduced() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "ffn_dim": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.OPTConfig(vocab_size=30, word_embed_proj_dim=16, **sizes)
    model = transformers.OPTModel(config).train()  # where dropout hides the sum
    recording = recorded(model, torch.tensor([[4, 5, 6, 7]]), reduce="columns")
    reduced = recording[recording.names[0]].reduced
    assert "summed" in reduced
    assert "alti" not in reduced
