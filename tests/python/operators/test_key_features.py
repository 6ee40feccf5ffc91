"""Attention from features that are there already, and the keys that are kept in that form."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, assert_identical, assert_output_accurate
from drawing import normals
from samples import DTYPES, Sample, converted, name_of

reference = ikattn.reference.implicit_kernel_attention


def of_features(sample: Sample, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Arguments of attention_from_features; some keys hidden, one row sees none."""
    draw = normals(sample.L * 1000 + sample.S)
    groups, batch, length, keys = sample.G or sample.H, sample.B, sample.L, sample.S
    kept = groups if sample.frequencies == "G" else sample.H
    query = draw(batch, sample.H, length, 2 * sample.M)
    key = draw(batch, kept, keys, 2 * sample.M)
    logits = draw(batch, sample.H, length, keys)
    logits = logits.masked_fill(draw(*logits.shape) > 0.6, -torch.inf)
    logits[:, 0, :1] = -torch.inf
    value = draw(batch, groups, keys, sample.d_v)
    return [x.to(dtype) for x in (query, key, logits, value)]


# --- Numbers --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("threads")
def test_the_same_bits_for_every_number_of_threads() -> None:
    sample = Sample("threads", B=1, H=3, L=9, S=5000, d=16, d_v=70, M=33)
    for dtype in (torch.float32, torch.float64):
        call = of_features(sample, dtype)
        torch.set_num_threads(1)
        expected = ikattn.ops.attention_from_features(*call)
        for number in (2, 3, 7):
            torch.set_num_threads(number)
            assert_identical([ikattn.ops.attention_from_features(*call)], [expected])


@pytest.mark.parametrize("value_type", DTYPES, ids=name_of)
def test_values_of_any_type_and_strides(value_type: torch.dtype) -> None:
    query, key, logits, value = of_features(Sample("types", S=100, L=3, d_v=20), torch.float32)
    value = value.to(value_type)
    strided = torch.full((2, 2, 20, 200), torch.nan, dtype=value_type).mT[:, :, ::2]
    strided.copy_(value)
    expected = torch.ops.ikattn.attention_from_features_reference(query, key, logits, value)
    for given in (value, strided):
        found = ikattn.ops.attention_from_features(query, key, logits, given)
        assert found.dtype == value_type
        assert_close(found, expected, 2 * torch.finfo(value_type).eps + 1e-6)
    call, operator = (query, key, logits, value), torch.ops.ikattn.attention_from_features.default
    composed = operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *call)
    imagined = operator(*(x.to("meta") for x in call))
    assert found.stride() == composed.stride() == imagined.stride() == (120, 20, 40, 1)


def test_logits_are_broadcast() -> None:
    query, key, logits, value = of_features(Sample("broadcast", S=70, L=3))
    for shape in ((2, 1, 3, 70), (1, 2, 1, 70), (1, 70), (3, 1), (1,)):
        given = torch.randn(shape, dtype=torch.float64)
        found = ikattn.ops.attention_from_features(query, key, given, value)
        whole = ikattn.ops.attention_from_features(query, key, given.expand(logits.shape), value)
        assert_identical([found], [whole])


def test_a_visible_value_counts_whatever_its_weight_is() -> None:
    """Rows that it is hidden from do not see it: NaN stands exactly where the operator has it."""
    query, key, _, value = of_features(Sample("values", B=1, H=1, S=1100, L=3))
    logits = torch.zeros(1, 1, 3, 1100, dtype=torch.float64)
    logits[..., 1, 7], logits[..., 2, 7] = -2000, -torch.inf  # no weight; hidden
    value[0, 0, 7, 1] = torch.nan
    found = ikattn.ops.attention_from_features(query, key, logits, value)[0, 0]
    assert found[:2, 1].isnan().all()
    assert found[2].isfinite().all()
    assert found[:, 0].isfinite().all()


def test_a_row_that_sees_nothing_has_no_gradient_whatever_it_is() -> None:
    call = of_features(Sample("blind", B=1, H=1, L=2, S=5))
    call[2] = torch.zeros(1, 1, 2, 5, dtype=torch.float64)
    call[2][..., 0, :] = -torch.inf
    call[0][0, 0, 0] = torch.nan
    leaves = [x.requires_grad_() for x in call]
    output = ikattn.ops.attention_from_features(*leaves)
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize(
    ("size", "p"), [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0), (3.0, 2.0), (20.0, 2.0), (3.0, 3.0)]
)
def test_large_magnitudes_keep_their_digits(size: float, p: float) -> None:
    """At 20 of keys of much the same norm, whose logits are large and differ by little."""
    for seed in range(5):
        torch.manual_seed(seed)
        key = torch.randn(1, 2, 100, 64)
        if size == 20.0:
            key *= 8 * (1 + 1e-3 * torch.randn(1, 2, 100, 1)) / key.norm(dim=-1, keepdim=True)
        call = {"query": torch.randn(1, 2, 1, 64), "key": size * key}
        call |= {"value": torch.randn(1, 2, 100, 64)}
        call |= {"w1": 0.02 * torch.randn(2, 64, 16), "w2": 0.02 * torch.randn(2, 64, 16)}
        truth = reference(**converted(call, torch.float64), p=p)
        features = ikattn.KeyFeatures(call["w1"], call["w2"], p=p)
        features.append(call["key"])
        found = features.attend(call["query"], call["value"])
        assert_output_accurate(found, reference(**call, p=p), truth)


@pytest.mark.operators
@pytest.mark.parametrize("place", ["query", "key", "logits"])
def test_what_is_not_a_number_reaches_the_rows_that_see_it(place: str) -> None:
    torch.manual_seed(0)
    call = of_features(Sample("nan", B=1, H=1, S=1100, L=2))
    call[2] = torch.zeros(1, 1, 2, 1100, dtype=torch.float64)
    call[2][..., 0, 7] = -torch.inf  # row 0 does not see key 7
    clean = ikattn.ops.attention_from_features(*call)
    index = {"query": (0, 0, 1), "key": (0, 0, 7), "logits": (0, 0, 1, 7)}[place]
    call[["query", "key", "logits"].index(place)][index] = torch.nan
    found = ikattn.ops.attention_from_features(*call)
    assert found[0, 0, 1].isnan().all()
    assert_identical([found[0, 0, 0]], [clean[0, 0, 0]])


def test_large_logits_do_not_overflow() -> None:
    query, key, logits, value = of_features(Sample("large", S=2100, L=3), torch.float32)
    for shift in (-1e4, 1e4):
        shifted = logits.nan_to_num(neginf=0).double().round() * 8 + shift
        call = (query, key, shifted.float(), value)
        truth = torch.ops.ikattn.attention_from_features_reference(*(x.double() for x in call))
        assert_close(ikattn.ops.attention_from_features(*call), truth, 1e-5)


# --- Transformations ------------------------------------------------------------------------------


def test_a_recorded_call_is_differentiable_twice() -> None:
    call = [x.clone() for x in of_features(Sample("grad", B=1, L=2, S=3, M=2, d_v=2))]
    call[2] = torch.randn(1, 1, 1, 3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in call]
    assert torch.autograd.gradcheck(ikattn.ops.attention_from_features, leaves)
    assert torch.autograd.gradgradcheck(ikattn.ops.attention_from_features, leaves)


def test_opcheck() -> None:
    query, key, logits, value = of_features(Sample("opcheck", S=70, L=3), torch.float32)
    logits = logits.nan_to_num(neginf=-1)
    operator = torch.ops.ikattn.attention_from_features.default
    torch.library.opcheck(operator, (query, key, logits, value), {"eps": 1e-4})
    recorded = [x.clone().requires_grad_() for x in (query, key, logits, value)]
    torch.library.opcheck(operator, tuple(recorded))


def test_vmap_and_autocast() -> None:
    call = of_features(Sample("vmap", S=70, L=3), torch.float32)
    expected = ikattn.ops.attention_from_features(*call)
    stacked = [torch.stack([x, x]) for x in call]
    for part in torch.vmap(ikattn.ops.attention_from_features)(*stacked):
        assert_close(part, expected, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert_identical([ikattn.ops.attention_from_features(*call)], [expected])
        recorded = ikattn.ops.attention_from_features(call[0].clone().requires_grad_(), *call[1:])
    assert_close(recorded, expected, 1e-6)


def test_a_compiled_step_is_the_step() -> None:
    w1, w2 = 0.1 * torch.randn(2, 2, 16, 8)

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        phi = ikattn.ops.spectral_features(key, w1, w2)
        logits = key.square().sum(-1).unsqueeze(-2) / 8
        queries = ikattn.ops.spectral_features(query, w1, w2)
        return ikattn.ops.attention_from_features(queries, phi, logits, value)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for length in (5, 9):
        q, k, v = torch.randn(1, 2, 1, 16), *torch.randn(2, 1, 2, length, 16)
        assert_close(compiled(q, k, v), step(q, k, v), 1e-6)


# --- What is kept ---------------------------------------------------------------------------------


def kept(length: int = 5, **options: Any) -> tuple[ikattn.KeyFeatures, Tensor]:
    torch.manual_seed(0)
    features = ikattn.KeyFeatures(0.1 * torch.randn(2, 8, 4), **options)
    key = torch.randn(3, 2, length, 8)
    features.append(key)
    return features, key


def test_features_and_magnitudes_are_the_operators() -> None:
    features, key = kept(70, p=3.0, magnitude_scale=0.2)
    assert_identical([features.features], [ikattn.ops.spectral_features(key, features.w1)])
    magnitudes = 0.2 * torch.linalg.vector_norm(key.double(), 3.0, dim=-1).square()
    assert_close(features.log_magnitudes, magnitudes, 1e-15)
    assert repr(features) == "KeyFeatures(70 keys, 2 heads of size 8, num_frequencies=4, p=3.0)"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))]
)
def test_copies_go_on_from_one_prompt_by_themselves(copied: Any) -> None:
    features, key = kept(3)
    before = features.features.clone()
    with torch.inference_mode():
        other = copied(features)
    with torch.no_grad():
        features.append(key)
        other.append(2 * key)
    expected = ikattn.ops.spectral_features(torch.cat([key, 2 * key], 2), features.w1)
    assert_identical([other.features], [expected])
    assert_identical([features.features[:, :, :3]], [before])
    assert features.nbytes > len(pickle.dumps(features)) > features.features.nbytes  # no room


def test_steps_in_inference_mode_and_outside_of_it_follow_each_other() -> None:
    with torch.inference_mode():
        features, key = kept(3)
        features.select(torch.tensor([1, 0, 2]))
    with torch.no_grad():
        features.append(key)
    with torch.inference_mode():
        features.append(key[:, :, :0])
        again = copy.deepcopy(features)
        again.append(key)
    expected = torch.cat([key[[1, 0, 2]], key, key], 2)
    assert_identical([again.features], [ikattn.ops.spectral_features(expected, features.w1)])
    assert len(features) == 6
    assert not features.features.is_inference()


@pytest.mark.parametrize("autocast_append", [False, True])
@pytest.mark.parametrize("autocast_attend", [False, True])
def test_autocast_changes_nothing(autocast_append: bool, autocast_attend: bool) -> None:
    features, key = kept()
    expected, query = features.attend(key[:, :, :1], key), key[:, :, :1]
    features.crop(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast_append):
        features.append(key)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast_attend):
        assert_identical([features.attend(query, key)], [expected])


def test_a_key_that_is_forgotten_rounds_no_logit() -> None:
    """Speculative decoding needs the rest to be as if the key had never been there."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    w1 = 0.1 * torch.randn(2, 8, 16)
    features, expected = ikattn.KeyFeatures(w1), ikattn.KeyFeatures(w1)
    features.append(k)
    features.append(1e4 * k[:, :, :2])
    features.crop(9)
    expected.append(k)
    assert_identical([features.attend(q, v)], [expected.attend(q, v)])
    features.crop(0)
    features.append(k)
    assert_identical([features.attend(q, v)], [expected.attend(q, v)])


def test_a_failure_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    features, key = kept(70)
    query, value = torch.randn(3, 2, 1, 8), torch.randn(3, 2, 70, 8)
    before = features.attend(query, value)
    index_select, calls = Tensor.index_select, []

    def failing(*arguments: Any) -> Tensor:
        calls.append(None)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return index_select(*arguments)

    monkeypatch.setattr(Tensor, "index_select", failing)
    with pytest.raises(torch.OutOfMemoryError):
        features.select(torch.tensor([2, 1, 0]))
    monkeypatch.undo()
    assert_identical([features.attend(query, value)], [before])
    empty = ikattn.KeyFeatures(features.w1)
    for own in (features, empty):
        monkeypatch.setattr(Tensor, "new_empty", failing)
        calls[:] = [None]
        with pytest.raises(torch.OutOfMemoryError):
            own.append(key)  # no room
        monkeypatch.undo()
    assert_identical([features.attend(query, value)], [before])
    with pytest.raises(ValueError, match="no key was appended yet"):
        empty.attend(query, value)
    empty.append(key[:1])  # of another batch
    assert len(empty) == 70


def test_a_refused_append_changes_nothing() -> None:
    features, key = kept()
    before = features.features.clone()
    for wrong in (key[:2], key.double(), key[:, :1], key[..., :7], key[0], torch.randn(3, 0, 5, 8)):
        with pytest.raises(ValueError, match="must have"):
            features.append(wrong)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        features.append(key.clone().requires_grad_())
    assert_identical([features.features], [before])


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_frequencies_in_training_are_refused(name: str) -> None:
    w = {"w1": torch.randn(2, 8, 4), "w2": torch.randn(2, 8, 4)}
    w[name].requires_grad_()
    features, key = ikattn.KeyFeatures(**w), torch.randn(3, 2, 5, 8)
    with pytest.raises(RuntimeError, match=r"KeyFeatures\.append: .*torch\.no_grad"):
        features.append(key)
    with torch.no_grad():
        features.append(key)
    with pytest.raises(RuntimeError, match=r"KeyFeatures\.attend: .*torch\.no_grad"):
        features.attend(key[:, :, :1], key)
    for copied in (copy.copy, copy.deepcopy):  # frequencies of a graph, without it
        made = {of: 2 * x for of, x in w.items()}
        other = copied(ikattn.KeyFeatures(**made))
        assert_identical([other.w1], [made["w1"]])
        with pytest.raises(RuntimeError, match="no gradient would reach"):
            other.append(key)


def test_what_is_wrong_is_named() -> None:
    w, (features, key), of = torch.randn(2, 8, 4), kept(), ikattn.KeyFeatures
    query, value = torch.randn(3, 2, 1, 8), torch.randn(3, 2, 5, 6)
    no_key, three_heads = torch.randn(3, 2, 0, 8), torch.randn(3, 3, 1, 8)
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: of(w[None]), ValueError, r"w1 must have shape \[H, d, M\].*got \[1, 2, 8, 4\]"),
        (lambda: of(w, w[:, :, :3]), ValueError, r"w2 must have the shape of w1, \[2, 8, 4\], got"),
        (lambda: of(w, w.long()), TypeError, r"w2 must be floating point, got torch\.int"),
        (lambda: of(w, p="learned"), ValueError, "p must be a finite number >= 1 .* got learned"),
        (lambda: of(w, p=torch.nan), ValueError, "p must be a finite number >= 1 or None, got nan"),
        (lambda: of(w, magnitude_scale=torch.nan), ValueError, "magnitude_scale must be finite"),
        (lambda: of(w).attend(query, no_key), ValueError, "no key was appended yet"),
        (lambda: of(w).append(key.long()), TypeError, "key must be floating point, got"),
        (lambda: features.attend(query[..., :7], value), ValueError, "B = 3 and d = 8, got"),
        (lambda: features.attend(query[:2], value), ValueError, r"d = 8, got \[2, 2, 1, 8\]"),
        (lambda: features.attend(three_heads, value), ValueError, "the heads of w1, 2"),
        (
            lambda: features.attend(query, value[:, :, :4]),
            RuntimeError,
            r"S = 5, got \[3, 2, 4, 6\]",
        ),
        (lambda: features.attend(leaf, value), RuntimeError, r"torch\.no_grad"),
        (lambda: features.crop(6), ValueError, "length must be 0 to 5, got 6"),
        # which is aligned at the top left elsewhere
        (lambda: features.attend(query, value, is_causal=True), TypeError, "is_causal"),
    ]
    leaf = query.clone().requires_grad_()
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()
    sides: dict[str, list[tuple[int, ...]]] = {
        "key_bias": [(4,), (3, 2, 4), (3, 3, 5), (1, 3, 2, 5)],
        "attn_mask": [(4,), (2, 5), (3, 2, 1, 4), (1, 3, 2, 1, 5)],
    }
    for name, shapes in sides.items():
        for shape in shapes:
            with pytest.raises(ValueError, match=f"{name} must broadcast to .*5\\], got"):
                features.attend(query, value, **{name: torch.zeros(shape)})
    types = {"query": query.int(), "value": value.int(), "key_bias": torch.ones(5) > 0}
    for name, x in (types | {"attn_mask": torch.ones(5).int()}).items():
        with pytest.raises(TypeError, match=rf"KeyFeatures\.attend: {name} must be .*, got torch"):
            features.attend(**{"query": query, "value": value} | {name: x})


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({0: torch.float16}, TypeError, "query_features must be float32 or float64, got Half"),
        ({1: torch.float64}, TypeError, "key_features must have the dtype of query_features"),
        ({2: torch.float64}, TypeError, "logits must have the dtype of query_features"),
        ({3: torch.int64}, TypeError, "value must be float64, float32, bfloat16 or float16"),
        ({1: (2, 3, 7, 10)}, RuntimeError, "key_features must have shape .* divide H = 2"),
        ({1: (2, 2, 7, 9)}, RuntimeError, "key_features must have the features of query_features"),
        ({1: (2, 3, 7, 10), 3: (2, 2, 7, 6)}, RuntimeError, "key_features must have shape"),
        ({2: (2, 2, 5, 6)}, RuntimeError, r"logits must broadcast to \[B, H, L, S\] = \[2, 2, 5"),
        ({3: (2, 2, 6, 6)}, RuntimeError, "value must have shape"),
        ({0: (2, 2, 10)}, RuntimeError, "query_features must have shape"),
        ({0: "meta"}, RuntimeError, "must be on the device of query_features"),
        ({4: 0.0}, ValueError, "eps must be finite and positive, got 0"),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_wrong_arguments_of_the_operator_are_named(change, kind, message, recorded):
    call: list[Any] = [*of_features(Sample("errors"), torch.float32), 1e-5]
    call[2] = torch.zeros(1)
    if recorded:
        call[0].requires_grad_()
    for index, to in change.items():
        if isinstance(to, tuple):
            call[index] = torch.zeros(to)
        else:
            call[index] = to if index == 4 else call[index].detach().to(to)
    if recorded and not any(isinstance(x, Tensor) and x.requires_grad for x in call):
        call[1].requires_grad_()
    with pytest.raises(kind, match=message):
        ikattn.ops.attention_from_features(*call[:4], eps=call[4])


@pytest.mark.parametrize("how", ["reference", "vmap"])
def test_wrong_arguments_are_named_however_the_operator_is_called(how: str) -> None:
    query, key, _, value = of_features(Sample("errors"), torch.float32)
    call = [query, key, torch.zeros(5, 5), value]
    operator = torch.ops.ikattn.attention_from_features_reference
    if how == "vmap":
        operator = torch.vmap(ikattn.ops.attention_from_features, in_dims=(0, None, None, None))
        call[0] = query.unsqueeze(0)
    with pytest.raises(RuntimeError, match=r"logits must broadcast to \[B, H, L, S\]"):
        operator(*call)
