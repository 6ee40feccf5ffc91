"""Attention of packed sequences: what each would give alone, for every option; jagged tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from drawing import normals
from ikattn.ops import dropout_keep_mask, place_dropout_seed

H, D, D_V, M = 4, 8, 6, 5
# Lengths of queries and of keys: runs of equal ones, empty ones, and more than a block.
LENGTHS = {
    "equal": ([5, 5, 5], [5, 5, 5]),
    "mixed": ([5, 5, 70, 1, 0, 5, 16], [5, 5, 70, 1, 0, 5, 16]),
    "crossed": ([3, 3, 0, 65, 4], [7, 7, 4, 130, 0]),
    "one": ([9], [9]),
    "few": ([2, 1], [2, 3]),
    "none": ([], []),
}

Arguments = dict[str, Any]
BEGINS_OF_FEW = torch.tensor([0, 2, 3], dtype=torch.int32)


def begins(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)], dtype=dtype)


def draw(
    name: str, dtype: torch.dtype = torch.float64, *, groups: int = H, by_sequence: bool = False
) -> Arguments:
    of_queries, of_keys = LENGTHS[name]
    normal = normals(len(name), dtype)
    T_q, T_k = sum(of_queries), sum(of_keys)
    axes = (len(of_queries),) if by_sequence else ()
    return {
        "q": normal(T_q, H, D),
        "k": normal(T_k, groups, D),
        "v": normal(T_k, groups, D_V),
        "w1": 0.1 * normal(*axes, H, D, M),
        "w2": 0.1 * normal(*axes, H, D, M),
        "cu_seqlens_q": begins(of_queries),
        "cu_seqlens_k": begins(of_keys, torch.int64),
    }


def one_by_one(arguments: Arguments) -> Tensor:
    """Calls the dense operator once a sequence."""
    options = dict(arguments)
    q, k, v, w1, w2 = (options.pop(name) for name in ("q", "k", "v", "w1", "w2"))
    ends_q, ends_k = options.pop("cu_seqlens_q").tolist(), options.pop("cu_seqlens_k").tolist()
    causal, bias = options.pop("causal", False), options.pop("key_bias", None)
    seed = options.pop("dropout_seed", None)
    outputs = [q.new_zeros(0, H, v.size(2))]
    for n in range(len(ends_q) - 1):
        of_q, of_k = slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])
        L, S = (x.stop - x.start for x in (of_q, of_k))
        mask = None
        if causal:
            mask = torch.arange(S) <= torch.arange(L)[:, None] + (S - L)
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q[of_q], k[of_k], v[of_k])]
        of_w = [w if w is None or w.dim() == 3 else w[n : n + 1] for w in (w1, w2)]
        output = ikattn.implicit_kernel_attention(
            *heads,
            *of_w,
            key_bias=None if bias is None else bias.expand(-1, k.size(0))[None, :, of_k],
            attn_mask=mask,
            enable_gqa=True,
            dropout_seed=None if seed is None else place_dropout_seed(seed, heads=H, batch=n),
            **options,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def gradients(call: Any, arguments: Arguments) -> list[Tensor]:
    names = [
        name
        for name in ("q", "k", "v", "w1", "w2", "key_bias")
        if isinstance(arguments.get(name), Tensor)
    ]
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    output = call({**arguments, **leaves})
    weights = torch.linspace(-1, 1, max(output.numel(), 1), dtype=output.dtype)[: output.numel()]
    return [output, *torch.autograd.grad(output, list(leaves.values()), weights.view(output.shape))]


OPTIONS: dict[str, Arguments] = {
    "plain": {},
    "causal": {"causal": True},
    "order and scale": {"p": 3.0, "eps": 1e-3, "magnitude_scale": 0.2},
    "no magnitude": {"p": None},
    "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor([5, 2])},
}


@pytest.mark.parametrize("lengths", [name for name in LENGTHS if name != "none"])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_sequence_is_as_it_would_be_alone(lengths, option):
    arguments = {**draw(lengths), **OPTIONS[option]}
    found = gradients(lambda x: ikattn.implicit_kernel_attention_varlen(**x), arguments)
    for one, other in zip(found, gradients(one_by_one, arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_no_sequence_at_all():
    arguments = draw("none")
    output, *rest = gradients(lambda x: ikattn.implicit_kernel_attention_varlen(**x), arguments)
    assert output.shape == (0, H, D_V)
    assert [x.shape for x in rest] == [
        arguments[name].shape for name in ("q", "k", "v", "w1", "w2")
    ]
    assert not any(x.any() for x in rest)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias_heads", [1, "G", H])
def test_grouped_heads_and_biases_of_keys(groups, bias_heads):
    arguments = draw("crossed", groups=groups)
    rows = groups if bias_heads == "G" else bias_heads
    arguments["key_bias"] = torch.randn(rows, arguments["k"].size(0), dtype=torch.float64)
    arguments["key_bias"][..., 3] = -torch.inf
    found = gradients(lambda x: ikattn.implicit_kernel_attention_varlen(**x), arguments)
    for one, other in zip(found, gradients(one_by_one, arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("w2", ["non-stationary", "stationary"])
def test_frequencies_of_each_sequence(w2):
    arguments = draw("mixed", by_sequence=True)
    if w2 == "stationary":
        arguments["w2"] = None
    found = gradients(lambda x: ikattn.implicit_kernel_attention_varlen(**x), arguments)
    for one, other in zip(found, gradients(one_by_one, arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_layouts_of_one_projection_cost_no_copy_and_change_nothing():
    packed = torch.randn(14, 3, H, D, dtype=torch.float64)
    q, k, v = packed.unbind(1)
    w1 = 0.1 * torch.randn(H, D, M, dtype=torch.float64)
    ends = begins([7, 7])
    strided = ikattn.implicit_kernel_attention_varlen(q, k, v, w1, None, ends, ends)
    copied = (x.contiguous() for x in (q, k, v))
    assert torch.equal(
        strided, ikattn.implicit_kernel_attention_varlen(*copied, w1, None, ends, ends)
    )
    assert strided.is_contiguous()


def test_dropout_is_that_of_the_padded_call():
    seed = torch.tensor([3, 4])
    whole = dropout_keep_mask(seed, (3, 4, 40, 70), 0.3)
    part = place_dropout_seed(seed, heads=4, batch=1, head=2, query=16, key=32)
    keep = dropout_keep_mask(part, (2, 2, 24, 38), 0.3)
    assert torch.equal(keep, whole[1:, 2:, 16:, 32:])
    with pytest.raises(ValueError, match="query must be a multiple of 16"):
        place_dropout_seed(seed, heads=4, query=8)
    with pytest.raises(ValueError, match="head must be below heads, 4, got 4"):
        place_dropout_seed(seed, heads=4, head=4)
    with pytest.raises(ValueError, match="an int64 tensor of shape"):
        place_dropout_seed(part, heads=4)
    with pytest.raises(ValueError, match="head must not be negative"):
        place_dropout_seed(seed, heads=4, head=-1)
    with pytest.raises(ValueError, match="multiples of 16"):
        dropout_keep_mask(torch.tensor([3, 4, 0, 0, 4, 8, 0]), (1, 4, 8, 8), 0.3)


def test_gradients_of_gradients_and_transforms():
    arguments = {name: x[:, :1, :3] for name, x in draw("few").items() if name in "qkv"}
    arguments["w1"] = 0.1 * torch.randn(1, 3, 2, dtype=torch.float64)
    arguments["w2"] = 0.1 * torch.randn(1, 3, 2, dtype=torch.float64)
    arguments |= {name: x for name, x in draw("few").items() if name.startswith("cu")}
    ends = {name: arguments.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    inputs = tuple(x.requires_grad_() for x in arguments.values())

    def attend(*tensors: Tensor) -> Tensor:
        return ikattn.implicit_kernel_attention_varlen(*tensors, *ends.values())

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs, atol=1e-4)
    plain = tuple(x.detach() for x in inputs)
    tangent = torch.ones_like(plain[0])
    _, forward = torch.func.jvp(lambda q: attend(q, *plain[1:]), (plain[0],), (tangent,))
    step = 1e-6
    ahead, behind = (attend(plain[0] + s * tangent, *plain[1:]) for s in (step, -step))
    torch.testing.assert_close(forward, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-7)
    stacked = torch.stack([plain[0], 2 * plain[0]])
    ends_of_each = torch.stack([BEGINS_OF_FEW, BEGINS_OF_FEW])
    with pytest.raises(RuntimeError, match=r"the same for all calls that torch\.vmap makes one of"):
        torch.vmap(
            lambda of_q: ikattn.implicit_kernel_attention_varlen(*plain, of_q, ends["cu_seqlens_k"])
        )(ends_of_each)
    rows = torch.vmap(lambda q: attend(q, *plain[1:]))(stacked)
    torch.testing.assert_close(rows[1], attend(2 * plain[0], *plain[1:]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("option", ["plain", "causal", "dropout"])
def test_opcheck(option):
    arguments = draw("mixed")
    options = dict(OPTIONS[option])
    positional = tuple(
        x.requires_grad_() if x.is_floating_point() else x for x in arguments.values()
    )
    options["is_causal"] = options.pop("causal", False)
    torch.library.opcheck(
        torch.ops.ikattn.implicit_kernel_attention_varlen.default, positional, options
    )


def test_compiled_whole_with_other_lengths_at_every_call():
    compiled = torch.compile(
        ikattn.implicit_kernel_attention_varlen, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for name in ("mixed", "crossed", "equal"):
        arguments = draw(name)
        found = gradients(lambda x: compiled(**x), arguments)
        expected = gradients(lambda x: ikattn.implicit_kernel_attention_varlen(**x), arguments)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_autocast_lowers_tokens():
    arguments = draw("equal", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert ikattn.implicit_kernel_attention_varlen(**arguments).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"cu_seqlens_q": [1, 5, 10, 15]}, ValueError, "cu_seqlens_q must begin with 0, got 1"),
        ({"cu_seqlens_k": [0, 9, 5, 15]}, ValueError, "cu_seqlens_k must ascend, got 9 before 5"),
        ({"cu_seqlens_k": [0, 5, 10, 14]}, ValueError, "must end with 15, the tokens of key, got"),
        ({"cu_seqlens_k": [0, 15]}, RuntimeError, "cu_seqlens_k must have the shape of"),
        ({"cu_seqlens_q": [[0, 15]]}, RuntimeError, r"cu_seqlens_q must have shape \[N \+ 1\]"),
        ({"cu_seqlens_q": [0.0, 15.0]}, TypeError, "cu_seqlens_q must be int32 or int64"),
        ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q must be at least .* 5, got 4"),
        ({"max_seqlen_k": 4}, ValueError, "max_seqlen_k must be at least .* 5, got 4"),
        ({"q": torch.zeros(15, H * D)}, RuntimeError, r"query must have shape \[T_q, H, d\]"),
        ({"k": torch.zeros(15, 3, D)}, RuntimeError, "key must have the heads of query, 4"),
        ({"v": torch.zeros(14, H, D)}, RuntimeError, "value must have the tokens and heads of"),
        ({"v": torch.zeros(15, H, D).half()}, TypeError, "value must have the dtype of query"),
        ({"w1": torch.zeros(H, D + 1, M)}, RuntimeError, "w1 must have shape"),
        ({"key_bias": torch.zeros(15, H)}, RuntimeError, "key_bias must broadcast to"),
        ({"p": 0.5}, ValueError, "p must be"),
        ({"dropout_p": 1.0, "dropout_seed": torch.zeros(2).long()}, ValueError, "dropout_p must"),
        ({"dropout_p": 0.1, "dropout_seed": torch.zeros(7).long()}, RuntimeError, r"shape \[2\]"),
    ],
)
def test_wrong_arguments_are_told(change, error, says):
    arguments = draw("equal", torch.float32)
    for name, given in change.items():
        if name.startswith("cu"):
            given = torch.tensor(given)
        arguments[name] = given
    with pytest.raises(error, match=says):
        ikattn.implicit_kernel_attention_varlen(**arguments)


def jagged(arguments: Arguments, requires_grad: bool = False) -> tuple[Tensor, ...]:
    ends = [arguments[f"cu_seqlens_{of}"].long() for of in "qk"]
    packed = [arguments[name].clone().requires_grad_(requires_grad) for name in "qkv"]
    shared = (ends[0], ends[1], ends[1])
    return tuple(
        torch.nested.nested_tensor_from_jagged(x, offsets=of).transpose(1, 2)
        for x, of in zip(packed, shared, strict=True)
    ), packed


@pytest.mark.parametrize("lengths", ["mixed", "crossed"])
def test_jagged_tensors(lengths):
    arguments = draw(lengths)
    nested, packed = jagged(arguments, requires_grad=True)
    w1, w2 = arguments["w1"], arguments["w2"]
    output = ikattn.implicit_kernel_attention(*nested, w1, w2)
    expected = ikattn.implicit_kernel_attention_varlen(**arguments)
    assert torch.equal(output.transpose(1, 2).values(), expected)
    assert output.shape[:2] == nested[0].shape[:2]
    output.transpose(1, 2).values().sum().backward()
    assert all(x.grad is not None for x in packed)
    if lengths == "mixed":
        causal = ikattn.implicit_kernel_attention(*nested, w1, w2, is_causal=True)
        both = ikattn.implicit_kernel_attention_varlen(**arguments, causal=True)
        assert torch.equal(causal.transpose(1, 2).values(), both)
        assert causal.size(2) == nested[0].size(2)  # the same symbol: they may be added
    else:
        with pytest.raises(ValueError, match="the same lengths"):
            ikattn.implicit_kernel_attention(*nested, w1, w2, is_causal=True)


def test_what_nested_tensors_cannot():
    arguments = draw("equal")
    (q, k, v), _ = jagged(arguments)
    w1 = arguments["w1"]
    padded = torch.nested.to_padded_tensor(k.transpose(1, 2), 0.0).transpose(1, 2)
    with pytest.raises(TypeError, match=r"key must be nested, too, of layout torch\.jagged"):
        ikattn.implicit_kernel_attention(q, padded, padded, w1)
    strided = torch.nested.nested_tensor(list(padded))
    with pytest.raises(TypeError, match=r"got torch\.strided"):
        ikattn.implicit_kernel_attention(strided, strided, strided, w1)
    with pytest.raises(ValueError, match="take no key_bias"):
        ikattn.implicit_kernel_attention(q, k, v, w1, key_bias=torch.zeros(1))
    by_token = (x.transpose(1, 2) for x in (q, k, v))
    with pytest.raises(ValueError, match="tokens on axis 2"):
        ikattn.implicit_kernel_attention(*by_token, w1)
