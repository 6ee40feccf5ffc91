"""Gates on what causal attention remembers, as arguments of the operators.

The law ``forgetting`` of the fuzzed calls holds outputs, gradients, types and groups of heads.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import ikattn
from agreement import assert_close
from samples import Arguments

attention = ikattn.implicit_kernel_attention


def drawn(length: int, dtype: torch.dtype = torch.float64, M: int = 8) -> tuple[Arguments, Tensor]:
    torch.manual_seed(0)
    call = {x: torch.randn(1, 2, length, 16, dtype=dtype) for x in ("query", "key", "value")}
    w1, w2 = 0.1 * torch.randn(2, 2, 16, M, dtype=dtype)
    gates = logsigmoid(torch.randn(1, 2, length, dtype=dtype) + torch.tensor([[2.0], [6.0]]))
    return {**call, "w1": w1, "w2": w2, "is_causal": True}, gates.to(dtype)


def pair_by_pair(call: Arguments, log_decay: Tensor) -> Tensor:
    """Multiplies each weight by the gates between its tokens, as the definition does."""
    gates, L = log_decay.exp(), call["query"].size(2)
    between = torch.stack(
        [torch.stack([gates[..., j + 1 : i + 1].prod(-1) for j in range(L)], -1) for i in range(L)],
        -2,
    )
    weights = between * ikattn.implicit_kernel_weights(
        *(call[x] for x in ("query", "key", "w1", "w2")), is_causal=True
    )
    return weights / weights.sum(-1, keepdim=True) @ call["value"]


@pytest.mark.parametrize("length", [1, 7, 40])
def test_weights_are_multiplied_by_the_gates_between(length: int) -> None:
    call, gates = drawn(length)
    gates[..., length // 2] = -math.inf  # the token forgets all that was before
    assert_close(attention(**call, log_decay=gates), pair_by_pair(call, gates), 1e-12)


@pytest.mark.parametrize("strength", [1.0, 300.0])  # sums near zero, and in the thousands
def test_parts_of_a_call_agree(strength: float) -> None:
    call, gates = drawn(700)
    gates *= strength
    gates[:, 0, 500] = -math.inf
    whole = attention(**call, log_decay=gates)
    value = call.pop("value")
    weights = ikattn.implicit_kernel_weights(**call, log_decay=gates)
    assert_close(weights @ value, whole, 1e-11)
    with ikattn.deterministic("batch"):
        assert_close(attention(**call, value=value, log_decay=gates), whole, 1e-11)


@pytest.mark.parametrize("strength", [1.0, 300.0])
def test_a_state_forgets(strength: float) -> None:
    call, gates = drawn(300)
    gates *= strength
    gates[:, 0, [120, 250]] = -math.inf
    bias = torch.randn(1, 1, 300, dtype=torch.float64)
    whole = attention(**call, key_bias=bias, log_decay=gates)
    query, key, value = (call[x] for x in ("query", "key", "value"))
    state = ikattn.RecurrentState(call["w1"], call["w2"])

    def tokens(part: slice) -> tuple[Tensor, ...]:
        return key[:, :, part], value[:, :, part], bias[:, :, part]

    first, last = slice(0, 100), slice(200, 300)
    parts = [state.extend(query[:, :, first], *tokens(first), log_decay=gates[:, :, first])]
    for t in range(100, 140):
        token = slice(t, t + 1)
        state.update(*tokens(token), log_decay=gates[:, :, token])
        parts.append(state.attend(query[:, :, token]))
    state.update(*tokens(slice(140, 200)), log_decay=gates[:, :, 140:200])
    parts.append(state.extend(query[:, :, last], *tokens(last), log_decay=gates[:, :, last]))
    seen = torch.arange(300)
    seen = (seen < 140) | (seen >= 200)
    assert_close(torch.cat(parts, 2), whole[:, :, seen], 1e-11)


def test_gates_of_a_wrong_shape_or_type_change_no_state() -> None:
    call, gates = drawn(4)
    state = ikattn.RecurrentState(call["w1"], call["w2"])
    with pytest.raises(ValueError, match=r"update: log_decay must broadcast to \[1, 2, 4\]"):
        state.update(call["key"], call["value"], log_decay=gates[..., :3])
    with pytest.raises(TypeError, match="extend: log_decay must be floating point"):
        state.extend(call["query"], call["key"], call["value"], log_decay=gates.long())
    assert len(state) == 0
    with pytest.raises(RuntimeError, match="no gradient would reach"):
        state.update(call["key"], call["value"], log_decay=gates.requires_grad_())
    gates = gates.detach()
    none = (x[:, :, :0] for x in (call["query"], call["key"], call["value"]))
    assert state.extend(*none, log_decay=gates[..., :0]).shape == (1, 2, 0, 16)
    state.update(call["key"], call["value"])
    other = copy.copy(state)
    other.update(call["key"], call["value"], log_decay=gates)
    with pytest.raises(ValueError, match="merge: other must be of tokens without log_decay"):
        state.merge(other)


def test_a_state_is_as_before_where_a_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    call, gates = drawn(6)
    gates[..., 4] = -math.inf
    query, key, value = (call[x] for x in ("query", "key", "value"))
    state = ikattn.RecurrentState(call["w1"], call["w2"])
    state.update(key[:, :, :2], value[:, :, :2])
    before = state.state_dict()

    def attend(self: Any, query: Tensor, *, eps: float) -> Tensor:
        if len(self) > 4:
            raise torch.OutOfMemoryError
        return query

    monkeypatch.setattr(ikattn.RecurrentState, "attend", attend)
    with pytest.raises(torch.OutOfMemoryError):
        state.extend(*(x[:, :, 2:] for x in (query, key, value)), log_decay=gates[..., 2:])
    assert len(state) == 2
    assert torch.equal(state.moments, before["moments"])


def test_float32_keeps_its_digits_over_65536_tokens() -> None:
    call, gates = drawn(1 << 16, torch.float32)
    assert float(gates.sum(-1).min()) < -6000
    found = attention(**call, log_decay=gates)
    wide = {x: y.double() if isinstance(y, Tensor) else y for x, y in call.items()}
    truth = attention(**wide, log_decay=gates.double())
    assert float((found - truth).abs().max() / truth.abs().max()) < 2e-5


def test_rows_with_small_scores_keep_their_digits() -> None:
    call, _ = drawn(400, torch.float32)
    call["w1"][:, 0] = call["w2"][:, 0] = 0.25
    call["query"][:] = call["key"][:] = call["query"][:, :, :1].clone()
    call["query"][..., 0], call["key"][..., 0] = 0.0, 1.0  # a quarter of a turn apart
    call["w2"] = call["w1"]
    wide = {x: y.double() if isinstance(y, Tensor) else y for x, y in call.items()}
    gates = torch.full((1, 2, 400), -1.0)
    truth = attention(**wide, log_decay=gates.double())
    assert_close(attention(**call, log_decay=gates).double(), truth, 1e-5)


def test_transforms() -> None:
    call, gates = drawn(30)
    query = call.pop("query")

    def of(x: Tensor, y: Tensor) -> Tensor:
        return attention(x, **call, log_decay=y)

    two = torch.stack([query, query.flip(0)]), torch.stack([gates, 2 * gates])
    assert_close(torch.func.vmap(of)(*two)[1], of(query, 2 * gates), 1e-12)
    assert_close(torch.compile(of, backend="aot_eager")(query, gates), of(query, gates), 1e-12)
    leaves = query[..., :4, :].requires_grad_(), gates[..., :4].requires_grad_()
    short = {x: y[:, :, :4] if x in ("key", "value") else y for x, y in call.items()}

    def decayed(x: Tensor, y: Tensor, strength: float) -> Tensor:
        return attention(x, **short, log_decay=strength * y)

    for strength in (1.0, 300.0):
        assert torch.autograd.gradcheck(decayed, (*leaves, strength))
        assert torch.autograd.gradgradcheck(decayed, (*leaves, strength))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": False}, "log_decay wants is_causal=True"),
        ({"log_decay": torch.zeros(3, 7)}, "log_decay must broadcast to"),
        ({"log_decay": torch.zeros(7, dtype=torch.int64)}, "log_decay must be floating point"),
        ({"eps": 0.0}, "eps must be"),
        ({"value": torch.randn(1, 2, 8, 16).double()}, "value must have shape"),
        ({"unknown": 1}, "unexpected keyword argument 'unknown'"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    call, gates = drawn(7)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        attention(**(call | {"log_decay": gates} | change))


@pytest.mark.parametrize("strength", [1.0, 300.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_before_a_bad_gate_stay_finite(strength: float, bad: float) -> None:
    call, gates = drawn(200)
    gates[..., 150] = bad
    rows = attention(**call, log_decay=strength * gates).isfinite().all(-1)
    assert torch.equal(rows, (torch.arange(200) < 150).expand_as(rows))


@pytest.mark.parametrize("length", [20, 300])
def test_a_gate_of_0_is_no_small_number(length: int) -> None:
    call, gates = drawn(length)
    half = length // 2
    gates[..., half] = -math.inf
    call["key"][..., 3, :] *= 100  # outweighs all keys after the gate
    call["value"][..., 1, :] = math.nan
    alone = {x: y[:, :, half:] if x in ("query", "key", "value") else y for x, y in call.items()}
    truth = attention(**alone, log_decay=gates[..., half:])
    assert_close(attention(**call, log_decay=gates)[:, :, half:], truth, 1e-10)
    hidden = torch.zeros(length, dtype=torch.float64)
    hidden[half : half + 2] = -math.inf
    call["value"][..., 1, :] = 0.0
    found = attention(**call, log_decay=gates, key_bias=hidden)
    assert not bool(found[:, :, half : half + 2].any())  # they see no key
    assert bool(found[:, :, half + 2 :].any())


def test_nested_tensors_have_no_gates() -> None:
    call, gates = drawn(7)
    parts = [torch.randn(n, 2, 16) for n in (3, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    options = {"is_causal": True, "log_decay": gates}
    for function, tokens in ((attention, (x, x, x)), (ikattn.implicit_kernel_weights, (x, x))):
        with pytest.raises(ValueError, match="log_decay must be None for nested"):
            function(*tokens, call["w1"].float(), **options)
