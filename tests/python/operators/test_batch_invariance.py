"""A row's bits do not depend on its batch: what holds always, and what deterministic("batch") adds.

The seven properties, with the test that has each: batch size and position in the batch
(``batch_items_alone`` of tests/fuzz/laws.py), padding neighbours (``..._padding``), chunked prefill
and steps (``..._chunk``), prefix sharing (``..._prefix``), split keys (``..._threads``), number of
ranks (``..._heads``, and batches shared out, which is the first).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_identical, direction, gradients
from programs import run_checked
from samples import DTYPES, Arguments, Sample, name_of, of_weights
from tiers import each_call

attention = ikattn.implicit_kernel_attention
reference = ikattn.reference.implicit_kernel_attention
TOKENS = ["query", "key", "value"]

# Each would be of other kernels, or forms, were it shorter or longer.
CALLS = (
    Sample("some tokens", B=3, L=100, S=100, M=9),
    Sample("of sixteen bits", B=2, L=70, S=70, d=16, d_v=16, M=16),
    Sample("long enough for linear time", B=2, H=1, L=520, S=520, M=4),
    Sample("beyond a part", B=2, H=1, L=1100, S=1100, M=8),
    Sample("spread magnitudes", B=2, L=100, S=100, magnitude_scale=20.0),
    Sample("grouped heads", B=2, H=4, G=2, L=90, S=90, frequencies="G"),
    Sample("hardly any eps, wide", B=2, L=70, S=70, d=70, d_v=70, M=40, eps=1e-12),
    Sample("few keys", B=3, L=7, S=7),
)


@pytest.fixture
def batch() -> Iterator[None]:
    with ikattn.deterministic("batch"):
        yield


def results(arguments: Arguments, incoming: Tensor) -> list[Tensor]:
    """The output, and the gradients of tokens."""
    found = gradients(attention, arguments, TOKENS, incoming)
    with torch.no_grad():
        return [attention(**arguments), *found.values()]


def part_of(arguments: Arguments, items: slice, rows: slice, keys: slice) -> Arguments:
    """Some batch items, their queries in ``rows`` and their keys in ``keys``."""
    query, key, value = (arguments[name] for name in TOKENS)
    return arguments | {
        "query": query[items, :, rows],
        "key": key[items, :, keys],
        "value": value[items, :, keys],
    }


WHOLE = slice(None)


@pytest.mark.usefixtures("batch")
@each_call(CALLS, few=(), dtype=DTYPES)
def test_some_heads_give_what_they_give_among_all_heads(sample: Sample, dtype: torch.dtype) -> None:
    """Ranks of tensor parallelism have some heads."""
    arguments = sample.arguments(dtype)
    groups = arguments["key"].shape[1]
    expected, each = attention(**arguments), sample.H // groups
    for group in range(groups):
        heads = slice(group * each, (group + 1) * each)
        of_frequencies = heads if arguments["w1"].shape[0] == sample.H else slice(group, group + 1)
        own = arguments | {
            "query": arguments["query"][:, heads],
            "key": arguments["key"][:, group : group + 1],
            "value": arguments["value"][:, group : group + 1],
            "w1": arguments["w1"][of_frequencies],
            "w2": arguments["w2"][of_frequencies],
        }
        assert_identical([attention(**own)], [expected[:, heads]])


def padded(arguments: Arguments, length: int, way: str) -> Arguments:
    """The tokens after the first ``length`` are hidden in one of the ways, and hold anything."""
    size, dtype = arguments["key"].shape[2], arguments["key"].dtype
    is_hidden = torch.arange(size) >= length
    call = dict(arguments)
    for name in ("key", "value"):
        call[name] = torch.where(is_hidden[:, None], 1000 * arguments[name] + 7, arguments[name])
    sides = {
        "key_bias": {"key_bias": torch.zeros(size, dtype=dtype)},
        "bool mask": {"attn_mask": ~is_hidden},
        "float mask": {"attn_mask": torch.zeros(size, dtype=dtype)},
    }[way]
    for side in sides.values():
        if side.is_floating_point():
            side.masked_fill_(is_hidden, -torch.inf)
    return call | sides


# Sums of moments are of the whole call; the page on batch invariance says what then holds.
in_any_time_but_linear = pytest.mark.skipif(
    os.environ.get("IKATTN_LINEAR_TIME") == "always", reason="every call takes linear time"
)


@in_any_time_but_linear
@pytest.mark.operators
@pytest.mark.usefixtures("batch")
@each_call(
    CALLS,
    few=(),
    dtype=DTYPES,
    is_causal=[True, False],
    way=["key_bias", "bool mask", "float mask"],
)
def test_rows_give_what_they_give_without_padding(sample, dtype, is_causal, way):
    arguments = replace(sample, is_causal=is_causal).arguments(dtype)
    incoming = direction(attention(**arguments))
    for length in {sample.L // 8, sample.L - 5} - {0}:
        own = slice(0, length)
        of_own = incoming.clone()
        of_own[:, :, length:] = 0
        found = results(padded(arguments, length, way), of_own)
        expected = results(part_of(arguments, WHOLE, own, own), incoming[:, :, own])
        assert_identical([x[:, :, own] for x in found], expected)


@in_any_time_but_linear
@pytest.mark.operators
@pytest.mark.usefixtures("batch")
@each_call(CALLS, few=(), dtype=DTYPES)
def test_a_chunk_of_a_prefill_gives_its_rows(sample: Sample, dtype: torch.dtype) -> None:
    """Down to a chunk of one, a step, which needs no mask."""
    arguments = replace(sample, is_causal=True).arguments(dtype)
    expected = attention(**arguments)
    for first, length in ((0, 1), (5, 1), (3, 4), (60, 33), (sample.L - 1, 1), (sample.L - 40, 40)):
        if first < 0 or (end := first + length) > sample.L:
            continue
        chunk = part_of(arguments, WHOLE, slice(first, end), slice(0, end)) | {"is_causal": False}
        if length > 1:
            chunk["attn_mask"] = torch.ones(length, end, dtype=torch.bool).tril(end - length)
        assert_identical([attention(**chunk)], [expected[:, :, first:end]])


@pytest.mark.usefixtures("batch")
@each_call(CALLS, few=(), dtype=DTYPES)
def test_a_prefix_gives_the_same_whatever_follows_it(sample: Sample, dtype: torch.dtype) -> None:
    arguments = replace(sample, is_causal=True).arguments(dtype)
    own = slice(0, sample.L // 2)
    expected = attention(**part_of(arguments, WHOLE, own, own))
    for scale in (1, 30):  # other magnitudes, too
        call = dict(arguments)
        call["key"] = arguments["key"].clone()
        call["key"][:, :, own.stop :] *= scale
        assert_identical([attention(**call)[:, :, own]], [expected])


@pytest.mark.usefixtures("batch", "threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_few_queries_give_the_same_for_threads_that_share_their_keys(dtype: torch.dtype) -> None:
    arguments = Sample("split keys", B=1, H=1, L=40, S=4200).arguments(dtype)
    incoming = direction(attention(**arguments))
    expected = results(arguments, incoming)
    for number in (2, 3):
        torch.set_num_threads(number)
        assert_identical(results(arguments, incoming), expected)
        step = attention(**part_of(arguments, WHOLE, slice(7, 8), WHOLE))
        assert_identical([step], [expected[0][:, :, 7:8]])
        torch.set_num_threads(1)


@pytest.mark.usefixtures("batch")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_weights_give_the_same_bits_too(dtype: torch.dtype) -> None:
    arguments = Sample("weights", B=2, L=90, S=90, is_causal=True).arguments(dtype)
    expected = ikattn.implicit_kernel_weights(**of_weights(arguments))
    for first, end in ((0, 20), (70, 71)):
        rows = part_of(arguments, slice(1, 2), slice(first, end), slice(0, end))
        rows["is_causal"] = first == 0
        found = ikattn.implicit_kernel_weights(**of_weights(rows))
        assert_identical([found], [expected[1:2, :, first:end, :end]])


@pytest.mark.usefixtures("batch")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_kept_features_give_the_same_in_chunks_steps_and_batches(dtype: torch.dtype) -> None:
    sample = Sample("kept", B=2, H=4, G=2, L=1100, S=1100, M=6, magnitude_scale=2.0)
    query, key, value, w1, w2 = (sample.arguments(dtype)[n] for n in (*TOKENS, "w1", "w2"))
    key = key * torch.linspace(0.5, 1.5, sample.S, dtype=dtype)[:, None]  # the last are largest
    scale = {"magnitude_scale": sample.magnitude_scale}

    def outputs(b: slice, sizes: list[int], last: int) -> Tensor:
        features = ikattn.KeyFeatures(w1, w2, **scale)
        found, end = [], 0
        for size in sizes:
            begin, end = end, end + size
            features.append(key[b, :, begin:end])
            if end <= 1100 - last:
                continue
            asked = query[b, :, begin:end]
            found.append(features.attend(asked, value[b, :, :end], causal_lower_right=True))
        return torch.cat(found, 2)

    expected = outputs(WHOLE, [1060, 40], last=40)
    assert_identical([outputs(WHOLE, [1060, 7, 1, 32], last=40)], [expected])
    assert_identical([outputs(slice(1, 2), [1060] + [1] * 40, last=40)], [expected[1:2]])


def level() -> str:
    return str(torch.ops.ikattn.deterministic())


def test_contexts_give_back_what_was_before() -> None:
    assert level() == "run"
    with ikattn.deterministic("batch"):
        with ikattn.deterministic("run"):
            assert level() == "run"
        assert level() == "batch"
        assert "deterministic    batch" in ikattn.info()
    with pytest.raises(KeyError), ikattn.deterministic("batch"):
        raise KeyError
    with (
        pytest.raises(ValueError, match="level must be 'run' or 'batch', got 'row'"),
        ikattn.deterministic("row"),  # type: ignore[arg-type]
    ):
        pass
    with pytest.raises(RuntimeError, match="level must be run or batch, got "):
        torch.ops.ikattn.set_deterministic("")
    assert level() == "run"


def test_which_kernels_tells_what_it_keeps_a_call_from() -> None:
    arguments = CALLS[2].arguments(torch.float32)
    assert ikattn.which_kernels(**arguments).forward.algorithm == "linear"
    with ikattn.deterministic("batch"):
        found = ikattn.which_kernels(**arguments).forward
    assert found.algorithm == "quadratic"
    without_vectors = "neither AVX2"
    assert found.reason is not None
    assert without_vectors in found.reason or found.reason.startswith('deterministic = "batch"')


@pytest.mark.compiles
def test_a_compiled_function_follows_the_setting_and_does_not_change_it() -> None:
    arguments = CALLS[2].arguments(torch.float32)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    outputs = [compiled(**arguments)]
    with ikattn.deterministic("batch"):
        outputs += [compiled(**arguments), attention(**arguments)]
    assert_identical([outputs[1]], [outputs[2]])
    assert not torch.equal(outputs[0], outputs[1])

    def inside(x: Tensor) -> Tensor:
        with ikattn.deterministic("batch"):
            return x + 1

    with pytest.raises(Exception, match="enter it around the compiled function"):
        torch.compile(inside, backend="eager", fullgraph=True)(torch.ones(3))
    assert level() == "run"


# In a process that takes linear time wherever it can: of any length, and rows keep their bits.
LINEAR = """
import torch, ikattn
attention = ikattn.implicit_kernel_attention
for is_causal in (False, True):
    q, k, v = (torch.randn(3, 2, 400, 8) for _ in range(3))
    w = 0.1 * torch.randn(2, 8, 4)
    whole = attention(q, k, v, w, is_causal=is_causal)
    assert ikattn.which_kernels(q, k, v, w, is_causal=is_causal).forward.algorithm == "linear"
    assert torch.equal(attention(q[1:2], k[1:2], v[1:2], w, is_causal=is_causal), whole[1:2])
    for length in (5, 100, 390):
        hidden = torch.zeros(400).index_fill(0, torch.arange(length, 400), -torch.inf)
        padded = attention(q, k, v, w, key_bias=hidden, is_causal=is_causal)
        alone = attention(*(x[:, :, :length] for x in (q, k, v)), w, is_causal=is_causal)
        assert torch.equal(padded[:, :, :length], alone), (is_causal, length)
    if not is_causal:
        assert torch.equal(attention(q[:, :, 9:10], k, v, w), whole[:, :, 9:10])
"""


def test_linear_time_may_be_had_for_every_length(tmp_path: Path) -> None:
    settings = {"IKATTN_DETERMINISTIC": "batch", "IKATTN_LINEAR_TIME": "always"}
    run_checked(sys.executable, "-c", LINEAR, cwd=tmp_path, OMP_NUM_THREADS="1", **settings)
