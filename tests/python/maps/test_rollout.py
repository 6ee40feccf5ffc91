"""Rollout and token importance: GlobEnc's own numbers, and what must hold whatever the maps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agreement import assert_close
from golden import golden_files, load_golden
from ikattn.explain import attention_flow
from ikattn.maps import Batch, Layer, Recording, rank_tokens, rollout, token_importance
from ikattn.maps.contribution_maps import Contributions

CASES = [path.stem for path in golden_files("globenc")]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-5}

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

# GlobEnc's names of rollouts, and the options here. Its products are raw; weights add up to 1.
ROLLOUTS: dict[str, dict[str, Any]] = {
    "W": {"map": "weights", "normalize": False},
    "W-FixedRes": {"map": "weights", "normalize": False, "residual": 0.5},
    "W-Res": {"map": "weights", "normalize": False, "residual": "encoder"},
    "N": {"map": "summed", "normalize": False},
    "N-FixedRes": {"map": "summed", "normalize": True, "residual": 0.5},
    "N-Res": {"map": "with_residual", "normalize": False},
    "N-ResLN": {"map": "with_norm", "normalize": False},
    "N-Enc": {"map": "encoder", "normalize": False},
}


@dataclass
class Golden:
    """One case: its arrays, a recording of its maps, and the padding of its batch."""

    arrays: dict[str, Tensor]
    recording: Recording
    padding: Tensor

    def lengths(self) -> list[int]:
        return (~self.padding).sum(-1).tolist()


def golden(case: str, dtype: torch.dtype = torch.float64) -> Golden:
    arrays = {}
    for folder in ("bert_inputs", "kobayashi2021", "globenc"):
        file = load_golden(folder, case)
        arrays |= {name: torch.from_numpy(x) for name, x in file.items() if x.dtype.kind in "fi"}
    padding = arrays["attention_mask"] == 0
    maps = {
        "weights": arrays["attn_headmean"].unsqueeze(2),
        "summed": arrays["attn_n"],
        "with_residual": arrays["attnres_n"],
        "with_norm": arrays["attnresln_n"],
        "encoder": arrays["n_enc"],
    }
    layers = {}
    for number in range(len(arrays["n_enc"])):
        layers[f"layer.{number}"] = Contributions(
            **{name: x[number].to(dtype) for name, x in maps.items()},
            mixing_ratio={"encoder": arrays["n_enc_ratio"][number].to(dtype)},
            query_padding=padding,
            key_padding=padding,
        )
    return Golden(arrays, recording_of(layers), padding)


def recording_of(
    layers: dict[str, Contributions], kinds: dict[str, Any] | None = None
) -> Recording:
    plain = Layer("", kind="self", side="encoder", heads=1, block="post", family="bert")
    described = {name: replace(plain, name=name, **(kinds or {}).get(name, {})) for name in layers}
    return Recording("Bert", ("encoder",), described, [Batch(layers)])


def random_maps(B: int, L: int, N: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(B * 100 + L)
    return list(torch.rand(N, B, L, L, generator=generator, dtype=torch.float64).to(dtype))


@DTYPES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ROLLOUTS)
@pytest.mark.filterwarnings("ignore:rollout of")
def test_rollouts_are_those_of_globenc(case: str, name: str, dtype: torch.dtype) -> None:
    of_case = golden(case, dtype)
    got = rollout(of_case.recording, all_layers=True, **ROLLOUTS[name])
    assert got.dtype == dtype
    compared = 0
    for b, length in enumerate(of_case.lengths()):
        expected = of_case.arrays.get(f"rollout_{name}_{b}")
        if expected is not None:
            found = got[-len(expected) :, b, :length, :length]
            assert_close(found, expected, TOLERANCE[dtype], f"sentence {b}")
            compared += 1
        assert not got[:, b, length:].any()
        assert not got[:, b, :, length:].any()
    # The authors' W-Res of a sentence of one token is 0/0; it is the only array that is missing.
    assert compared == (0 if (case, name) == ("tiny_t1", "W-Res") else len(of_case.lengths()))


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_raw_product_is_the_aggregate_of_globenc(case: str, dtype: torch.dtype) -> None:
    of_case = golden(case, dtype)
    maps = list(of_case.arrays["n_enc"].to(dtype))
    got = rollout(maps, normalize=False, padding=of_case.padding)
    assert_close(got, of_case.arrays["globenc_aggregate"], TOLERANCE[dtype])


def test_the_lone_token_keeps_itself_under_mixing_ratios() -> None:
    got = rollout([torch.ones(1, 1, 1)] * 2, residual=[torch.zeros(1, 1)] * 2)
    assert got.tolist() == [[[1.0]]]


def test_rows_of_a_normalized_rollout_add_up_to_one() -> None:
    maps = [x * torch.rand(2, 5, 1, dtype=x.dtype) * 9 for x in random_maps(2, 5)]
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    for residual in (None, 0.5, [torch.full((2, 5), 0.3)] * 3):
        sums = rollout(maps, residual=residual, padding=padding).sum(-1)
        torch.testing.assert_close(sums, (~padding).double())


def test_normalizing_by_hand_and_multiplying_raw_is_the_same() -> None:
    maps = random_maps(2, 6)
    by_hand = [x / x.sum(-1, keepdim=True) for x in maps]
    torch.testing.assert_close(rollout(maps), rollout(by_hand, normalize=False))
    torch.testing.assert_close(rollout(maps), by_hand[2] @ by_hand[1] @ by_hand[0])
    assert not torch.allclose(rollout(maps), rollout(maps, normalize=False))


def test_padding_changes_nothing_even_if_it_holds_nan() -> None:
    alone = random_maps(1, 4)
    padded = [torch.full((1, 7, 7), torch.nan, dtype=torch.float64) for _ in alone]
    for place, x in zip(padded, alone, strict=True):
        place[:, 2:6, 2:6] = x
    padding = torch.tensor([[True, True, False, False, False, False, True]])
    ratio = torch.full((1, 7), torch.nan, dtype=torch.float64)
    ratio[:, 2:6] = 0.25
    for residual, unpadded in ((None, None), (0.5, 0.5), ([ratio] * 3, [ratio[:, 2:6]] * 3)):
        got = rollout(padded, residual=residual, padding=padding)
        torch.testing.assert_close(got[:, 2:6, 2:6], rollout(alone, residual=unpadded))
        got[:, 2:6, 2:6] = 0
        assert not got.any()


def test_a_row_that_sees_nothing_stays_zero() -> None:
    maps = random_maps(1, 4)
    maps[1][0, 2] = 0
    got = rollout(maps, all_layers=True)
    assert got.isfinite().all()
    assert not got[1, 0, 2].any()


def test_heads_are_averaged_and_a_tensor_is_its_layers() -> None:
    heads = torch.rand(3, 2, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(rollout(heads), rollout(list(heads.mean(2))))


def test_half_precision_maps_are_multiplied_in_float32() -> None:
    maps = random_maps(1, 4, dtype=torch.bfloat16)
    got = rollout(maps)
    assert got.dtype == torch.float32
    assert_close(got, rollout([x.double() for x in maps]), 1e-6)


def test_rollout_is_differentiable() -> None:
    maps = [x.requires_grad_() for x in random_maps(1, 3)]
    assert torch.autograd.gradcheck(lambda *x: rollout(x, residual=0.5), maps)


def test_with_norm_warns_once_a_call_and_others_do_not() -> None:
    x = torch.rand(1, 3, 3)
    layers = {f"{n}": Contributions(with_norm=x, encoder=x, with_residual=x) for n in range(3)}
    recording = recording_of(layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rollout(recording)
        rollout(recording, map="with_residual")
        rollout([x, x])
        assert caught == []
        rollout(recording, map="with_norm")
        token_importance(recording.batches[0], 0, map="with_norm")
    assert [warning.category for warning in caught] == [UserWarning, UserWarning]
    assert all("encoder" in str(w.message) and w.filename == __file__ for w in caught)


def test_recording_takes_self_attention_of_one_side() -> None:
    of_layer = [Contributions(encoder=x) for x in random_maps(1, 4)]
    cross = Contributions(encoder=torch.rand(1, 4, 6))
    layers = {"one": of_layer[0], "cross": cross, "two": of_layer[1], "three": of_layer[2]}
    recording = recording_of(layers, {"cross": {"kind": "cross"}})
    expected = rollout([x.encoder for x in of_layer if x.encoder is not None])
    assert torch.equal(rollout(recording), expected)
    assert torch.equal(rollout(recording.batches[0], layers=["one", "two", "three"]), expected)
    with pytest.raises(ValueError, match=r"must have shape \[1, 4, 4\].*got \[1, 4, 6\]"):
        rollout(recording.batches[0])
    two_sided = recording_of(layers, {"cross": {"kind": "cross"}, "two": {"side": "decoder"}})
    with pytest.raises(ValueError, match="layers must be given"):
        rollout(two_sided)
    assert torch.equal(
        rollout(two_sided, layers=["one", "three"]),
        rollout(recording, layers=(name for name in ("one", "three"))),
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, r: rollout([]), ValueError, "at least one layer"),
        (lambda m, r: rollout([m[0], m[1][:, :3]]), ValueError, r"maps\[1\].*\[2, 4, 4\].*got"),
        (lambda m, r: rollout([m[0][:, :3]]), ValueError, r"square.*\[2, 3, 4\]"),
        (lambda m, r: rollout([m[0][0]]), ValueError, r"maps\[0\].*\[B, L, S\].*got \[4, 4\]"),
        (lambda m, r: rollout(m, residual=1.5), ValueError, r"residual.*\[0, 1\], got 1.5"),
        (lambda m, r: rollout(m, residual="encoder"), ValueError, "residual.*got 'encoder'"),
        (lambda m, r: rollout(r, residual="encoder"), ValueError, "none recorded"),
        (lambda m, r: rollout(m, residual=[m[0][0]]), ValueError, r"residual.*\[2, 4\].*3 layers"),
        (lambda m, r: rollout(m, padding=torch.zeros(2, 4)), ValueError, "padding must be bool"),
        (lambda m, r: rollout(m, layers=["a"]), ValueError, "layers must be None"),
        (
            lambda m, r: rollout(r, map="with_norm"),
            ValueError,
            "recorded of layer 'a', encoder, go",
        ),
        (lambda m, r: rollout(r, map="mixing_ratio"), ValueError, "got 'mixing_ratio'"),
        (lambda m, r: rollout(r, layers=["b"]), KeyError, "no layer 'b'; there are a"),
        (lambda m, r: rollout(Recording("", ())), LookupError, "nothing was recorded"),
        (lambda m, r: token_importance(m, 4), ValueError, r"\[-4, 4\) in sequence 0.*got 4"),
        (lambda m, r: token_importance(m, torch.zeros(2)), ValueError, "int64 tensor"),
        (lambda m, r: token_importance(m, 0, layer=3), IndexError, r"\[-3, 3\), got 3"),
        (lambda m, r: token_importance(m, 0, layer="a"), ValueError, "layer must be a number"),
        (lambda m, r: token_importance(r, 0, layer="b"), KeyError, "no layer 'b'"),
        (
            lambda m, r: token_importance([m[0][:, :3]], 0, layer=0, residual=0.5),
            ValueError,
            "residual must be None",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:rollout of")
def test_errors_name_the_argument(call: Any, error: type[Exception], message: str) -> None:
    maps = random_maps(2, 4)
    with pytest.raises(error, match=message):
        call(maps, recording_of({"a": Contributions(encoder=maps[0])}))


PADDING = torch.tensor(
    [[False] * 5, [False, False, False, True, True], [True, False, False, False, False]]
)


@pytest.mark.parametrize("residual", [None, 0.5, "ratios"])
@pytest.mark.parametrize("normalize", [True, False])
def test_importance_is_a_row_of_rollout_counted_without_padding(residual, normalize):
    maps = random_maps(3, 5)
    if residual == "ratios":
        residual = [torch.rand(3, 5, dtype=torch.float64) for _ in maps]
    options = {"normalize": normalize, "residual": residual}
    whole = rollout(maps, padding=PADDING, **options)
    for position, places in (
        (0, (0, 0, 1)),
        (-1, (4, 2, 4)),
        (torch.tensor([3, -2, 2]), (3, 1, 3)),
    ):
        got = token_importance(maps, position, query_padding=PADDING, **options)
        torch.testing.assert_close(got, whole[torch.arange(3), torch.tensor(places)])
    with pytest.raises(ValueError, match="in sequence 1, which has 3 tokens, got 3"):
        token_importance(maps, 3, query_padding=PADDING, **options)


def test_importance_of_a_recording_uses_its_padding() -> None:
    maps = random_maps(3, 5)
    layers = {
        f"{n}": Contributions(encoder=x, query_padding=PADDING, key_padding=PADDING)
        for n, x in enumerate(maps)
    }
    got = token_importance(recording_of(layers), -1)
    assert torch.equal(got, token_importance(maps, -1, query_padding=PADDING))
    single = token_importance(recording_of(layers), -1, layer="1")
    hidden = maps[1].masked_fill(PADDING.unsqueeze(1), 0)
    rows = hidden[torch.arange(3), torch.tensor([4, 2, 4])]
    torch.testing.assert_close(single, rows / rows.sum(-1, keepdim=True))
    assert torch.equal(single, token_importance(Batch(layers), -1, layer=-2))


def test_importance_without_self_is_that_of_the_others() -> None:
    maps = [torch.rand(2, 4, 4).softmax(-1) for _ in range(2)]
    whole = token_importance(maps, -1, residual=0.5)
    others = token_importance(maps, -1, residual=0.5, without_self=True)
    expected = whole.clone()
    expected[:, 3] = 0
    torch.testing.assert_close(others, expected / expected.sum(-1, keepdim=True))
    raw = token_importance(maps, slice(1, 3), layer=0, normalize=False, without_self=True)
    assert raw[:, 1:3].eq(0).all()
    torch.testing.assert_close(raw[:, 0], maps[0][:, 1:3, 0].mean(1))
    with pytest.raises(ValueError, match=r"without_self must be False .* \[1, 2, 3\]"):
        token_importance([torch.rand(1, 2, 3)], 0, layer=0, without_self=True)


def test_importance_of_no_sequence_is_empty() -> None:
    assert token_importance(torch.zeros(2, 0, 0, 0), -1).shape == (0, 0)
    with pytest.raises(ValueError, match=r"position must be in \[0, 0\) in sequence 0"):
        token_importance(torch.zeros(2, 1, 0, 0), -1)


def test_single_layer_importance_through_cross_attention() -> None:
    cross = torch.rand(2, 3, 5, dtype=torch.float64)
    keys = PADDING[:2]
    got = token_importance([cross], 1, layer=0, normalize=False, key_padding=keys)
    assert torch.equal(got, cross[:, 1].masked_fill(keys, 0))


def test_ranking_pairs_tokens_without_padding() -> None:
    importance = torch.tensor([[0.0, 0.5, 0.3, 0.2], [0.25, 0.25, 0.5, 0.0]])
    padding = torch.tensor([[True, False, False, False], [False, False, False, True]])
    ranked = rank_tokens(importance, [["a", "b", "c"], ["d", "e", "f"]], padding=padding)
    assert [[x.token for x in row] for row in ranked] == [["a", "b", "c"], ["f", "d", "e"]]
    assert ranked[1][0].position == 2
    assert ranked[0][1].importance == pytest.approx(0.3)
    assert [x.token for x in rank_tokens(importance[1:], [list("defg")], top=2)[0]] == ["f", "d"]
    equal = rank_tokens(torch.ones(1, 300), [[str(n) for n in range(300)]])
    assert [x.position for x in equal[0]] == list(range(300))
    with pytest.raises(ValueError, match=r"tokens\[0\] must hold the 3 tokens.*got 4"):
        rank_tokens(importance, [list("abcd"), list("def")], padding=padding)
    with pytest.raises(ValueError, match="B = 1"):
        rank_tokens(importance, [list("abcd")])


def test_attention_flow_is_the_largest_flow() -> None:
    """One layer gives a map's row; several give the narrowest cut between two tokens."""
    pytest.importorskip("networkx")
    torch.manual_seed(0)
    maps = [torch.rand(2, 4, 4, dtype=torch.float64).softmax(-1) for _ in range(2)]
    torch.testing.assert_close(attention_flow(maps[:1], -1), maps[0][:, -1])
    found = attention_flow(maps, torch.tensor([1, 3]))
    for b, i in enumerate((1, 3)):  # two layers: each token between carries the smaller of two
        between = torch.minimum(maps[1][b, i, :, None], maps[0][b])
        torch.testing.assert_close(found[b], between.sum(0))
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    found = attention_flow(maps, -1, residual=0.5, padding=padding)
    assert found[1, 2:].tolist() == [0, 0]
    assert bool((found[1, :2] > 0).all())
    causal = [x.tril() for x in maps]
    assert attention_flow(causal, 1)[:, 2:].tolist() == [[0, 0], [0, 0]]
