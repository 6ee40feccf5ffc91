"""Decoding in constant memory."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, assert_identical
from drawing import normals

reference = ikattn.reference.implicit_kernel_attention
SUMS = [torch.float64, torch.float32]


def drawn(
    length: int = 40, groups: int = 4, heads: int | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """query, key, value, w1, w2: B = 2, H = 4, d = 8, d_v = 6, M = 5."""
    draw = normals(length)
    tokens = draw(2, 4, length, 8), draw(2, groups, length, 8), draw(2, groups, length, 6)
    w1, w2 = (0.1 * draw(heads or 4, 8, 5) for _ in range(2))
    return tuple(x.to(dtype) for x in (*tokens, w1, w2))


def token_by_token(
    state: ikattn.RecurrentState, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    outputs = []
    for t in range(key.size(2)):
        token = slice(t, t + 1)
        state.update(key[:, :, token], value[:, :, token])
        outputs.append(state.attend(query[:, :, token], **options))
    return torch.cat(outputs, 2)


@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_magnitudes_that_grow_by_1000_are_rescaled(sums: torch.dtype) -> None:
    query, key, value, w1, w2 = drawn(length=50, dtype=torch.float32)
    # g from below 1 to above 1000, where exp(g) is no float32, and back
    growth = torch.cat([torch.linspace(1, 60, 25), torch.linspace(60, 1, 25)])
    key = key * growth[:, None]
    state = ikattn.RecurrentState(w1, w2, dtype=sums)
    found = token_by_token(state, query, key, value)
    assert (state.reference > 1000).all()
    exact = reference(*(x.double() for x in (query, key, value, w1, w2)), is_causal=True)
    assert_close(found, exact, 1e-6 if sums == torch.float64 else 1e-2)


def test_memory_does_not_grow() -> None:
    _, key, value, w1, w2 = drawn()
    state = ikattn.RecurrentState(w1, w2)
    assert state.nbytes == 0
    state.update(key[:, :, :1], value[:, :, :1])
    first = state.nbytes
    assert first == 2 * 4 * (56 * 7 + 1) * 8
    state.update(key, value)
    assert state.nbytes == first


def test_it_moves_to_a_device_and_is_pickled_under_its_public_name() -> None:
    query, key, value, w1, w2 = drawn()
    state = ikattn.RecurrentState(w1, w2)
    state.update(key, value)
    assert state.to("meta") is state
    assert all(x.is_meta for x in (state.moments, state.reference, state.w1))
    assert state.attend(query.to("meta")).shape == (2, 4, 40, 6)
    assert ikattn.RecurrentState.__module__ == "ikattn.ops.recurrent_state"


def test_autocast_and_inference_mode_do_not_change_it() -> None:
    query, key, value, w1, w2 = drawn(dtype=torch.float32)
    plain = token_by_token(ikattn.RecurrentState(w1, w2), query, key, value)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        state = ikattn.RecurrentState(w1, w2)
        found = token_by_token(state, query, key, value)
    assert_identical([found], [plain])
    state.update(key, value)  # outside of inference mode


# --- Wrong arguments ------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    query, key, value, w1, w2 = drawn()
    state = ikattn.RecurrentState(w1, w2)
    with pytest.raises(ValueError, match="no key came yet"):
        state.attend(query)
    state.update(key, value)
    before = state.state_dict()
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((key[:1], value[:1]), "batch size, heads and type of the keys before"),
        ((key[:, :2], value[:, :2]), "batch size, heads and type"),
        ((key[..., :4], value), r"\[B, G, new, d\] with d = 8"),
        ((key, value[..., :3]), "value must have shape"),
        ((key, value[:, :, :3]), "value must have shape"),
        ((key, value, torch.zeros(3)), "key_bias must broadcast to"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            state.update(*arguments)
    with pytest.raises(TypeError, match="key_bias must be floating point"):
        state.update(key, value, torch.ones(40, dtype=torch.bool))
    with pytest.raises(ValueError, match="query must have the heads"):
        state.attend(query[:, :3])
    with pytest.raises(ValueError, match="as many tokens"):
        state.extend(query[:, :, :3], key, value)
    with pytest.raises(RuntimeError, match="no gradient would reach"):
        state.update(key.clone().requires_grad_(), value)
    after = state.state_dict()
    assert_identical(
        [before["moments"], before["reference"]], [after["moments"], after["reference"]]
    )
    assert before["length"] == after["length"]


def test_other_kernels_are_refused() -> None:
    _, key, value, w1, w2 = drawn()
    states = [
        ikattn.RecurrentState(w1, w2),
        ikattn.RecurrentState(w1, w1),
        ikattn.RecurrentState(w1),
        ikattn.RecurrentState(w1, w2, p=1.0),
    ]
    for state in states:
        state.update(key, value)
    for other in states[1:]:
        with pytest.raises(ValueError, match="same frequencies, p and magnitude_scale"):
            states[0].merge(other)
    narrow = ikattn.RecurrentState(w1[..., :3])
    with pytest.raises(ValueError, match="K = 4 and E = 22"):
        narrow.load_state_dict(states[0].state_dict())
    with pytest.raises(ValueError, match="frequencies of each batch item"):
        ikattn.RecurrentState(w1.expand(2, 4, 8, 5))
    with pytest.raises(ValueError, match="dtype must be float32 or float64"):
        ikattn.RecurrentState(w1, dtype=torch.bfloat16)
    saved = states[0].state_dict()
    with pytest.raises(ValueError, match="groups must divide the heads of w1, 4, got 0"):
        states[0].load_state_dict({**saved, "groups": 0})
    with pytest.raises(ValueError, match=r"reference \[B, K\] in float64, got"):
        states[0].load_state_dict({**saved, "reference": saved["reference"].float()})
    float32 = ikattn.RecurrentState(w1, w2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"sums in torch\.float32, got torch\.float64"):
        float32.merge(states[0])
    float32.update(key.float(), value.float())
    with pytest.raises(ValueError, match=r"eps must be at least 1e-06 .* dtype=torch.float64"):
        float32.attend(key.float(), eps=1e-8)  # which its rounding would drown


def filled(**options: Any) -> tuple[ikattn.RecurrentState, tuple[Tensor, ...]]:
    _query, key, value, w1, w2 = tokens = drawn(10)
    state = ikattn.RecurrentState(w1, w2, **options)
    state.update(key, value)
    return state, tokens


def test_states_go_on_outside_of_the_inference_mode_they_were_copied_in() -> None:
    state, (query, key, value, w1, w2) = filled()
    loaded, merged = ikattn.RecurrentState(w1, w2), ikattn.RecurrentState(w1, w2)
    with torch.inference_mode():
        kept = state.state_dict()
        merged.merge(state)
        copies = [copied(state) for copied in (copy.copy, copy.deepcopy)]
        copies.append(pickle.loads(pickle.dumps(state)))
    loaded.load_state_dict(kept)
    state.update(key, value)
    for other in (loaded, merged, *copies):
        other.update(key, value)
        assert_identical(other.attend(query), state.attend(query))


@pytest.mark.parametrize("length", [1, 3])
def test_extend_checks_all_before_it_adds_a_key(length: int) -> None:
    state, (query, key, value, *_) = filled()
    query, key, value = (x[:, :, :length] for x in (query, key, value))
    before = state.moments.clone()
    with pytest.raises(RuntimeError, match="no gradient would reach"):
        state.extend(query.clone().requires_grad_(), key, value)
    with pytest.raises(TypeError, match="query must be floating point"):
        state.extend(query.long(), key, value)
    assert len(state) == 10
    assert_identical(state.moments, before)
    fresh = ikattn.RecurrentState(state.w1, state.w2, dtype=torch.float32)
    with pytest.raises(ValueError, match="eps must be at least"):
        fresh.extend(query.float(), key.float(), value.float(), eps=1e-9)


def test_extend_computes_in_the_widest_type() -> None:
    query, key, value, w1, w2 = drawn(20)
    key, value = key.float(), 1e7 * value
    steps, whole = (ikattn.RecurrentState(w1, w2) for _ in range(2))
    expected = torch.cat(
        [steps.extend(*(x[:, :, t : t + 1] for x in (query, key, value))) for t in range(20)], 2
    )
    assert_close(whole.extend(query, key, value), expected, 1e-11)
