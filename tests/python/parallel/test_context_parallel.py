"""Attention of a sequence whose tokens several processes share: what one process computes."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

import context_programs as programs
import ikattn
from context_programs import CALLS, LAYOUTS, SIZES, N
from ikattn.nn.over_ranks import is_over_ranks
from ikattn.parallel import context_parallel, context_parallel_attention
from ikattn.parallel._layout import Layout
from ikattn.parallel._sums import _Sharing
from processes import run_processes

# Tolerances of the largest element: float32 and bfloat16 round parts before they are merged.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(programs.run, tmp_path_factory.mktemp("context"), 4)


@pytest.fixture(scope="module")
def results(of_ranks: list[dict[str, Any]]) -> dict[Any, Any]:
    return of_ranks[0]["calls"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_ranks_compute_what_one_process_does(size, layout, name, results):
    tensors, options = programs.tensors_of(**CALLS[name])
    expected = programs.differentiated(ikattn.implicit_kernel_attention, tensors, options)
    ways = [way for way in ("quadratic", "linear") if (size, layout, name, way) in results]
    assert ways[0] == "quadratic"
    for way in ways:
        found = results[size, layout, name, way]
        assert found.keys() == expected.keys()
        for key, right in expected.items():
            assert found[key].dtype == right.dtype
            error = (found[key] - right).abs().max() / right.abs().max()
            assert error <= TOLERANCE[right.dtype], (way, key, float(error))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_come_together_again(layout: str) -> None:
    whole = torch.arange(48).view(1, 24, 2)
    for size in (1, 2, 3):
        parts = [Layout(layout, size).shard(whole, 1, rank) for rank in range(size)]
        assert torch.equal(Layout(layout, size).unshard(parts, 1), whole)
    with pytest.raises(ValueError, match=r"axis 1 must have a multiple of .* got 24; pad it"):
        Layout(layout, 5).shard(whole, 1, 0)


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_rank_computes_first_what_it_need_not_wait_for(layout, count, reverse):
    """Every group once, and before those that wait as many others as there are chunks before."""
    for size, rank in ((2, 0), (2, 1), (4, 2), (4, 3)):
        sharing = _sharing(Layout(layout, size), rank, count)
        assert sharing.first == min(count, size - 1)
        for chunk in sharing.chunks:
            order = sharing.order(chunk, reverse=reverse)
            assert sorted(order) == list(range(count))
            before = sharing.call.layout.count - 1 - chunk if reverse else chunk
            waits = [n >= sharing.first for n in order]
            assert not any(waits[: min(before, sharing.first)])
            assert waits == sorted(waits) or before < sharing.first


def _sharing(layout: Layout, rank: int, heads: int) -> _Sharing:
    ranks = types.SimpleNamespace(number=rank, size=layout.size)
    call: Any = types.SimpleNamespace(layout=layout, ranks=ranks, threads=1)
    tokens = torch.zeros(1, heads, 8, 2)
    return _Sharing(call, tokens, tokens[..., 0], tokens)


def test_zigzag_gives_every_rank_as_many_pairs() -> None:
    def pairs(layout: Layout, rank: int) -> int:
        total = 0
        for source in range(layout.size):
            for block in layout.blocks(rank, source, 8, 8, is_causal=True, apart=False):
                rows, columns = (x.stop - x.start for x in (block.queries, block.keys))
                total += rows * (rows + 1) // 2 if block.is_causal else rows * columns
        return total

    assert len({pairs(Layout("zigzag", 4), rank) for rank in range(4)}) == 1
    of_contiguous = [pairs(Layout("contiguous", 4), rank) for rank in range(4)]
    assert of_contiguous == sorted(of_contiguous)
    assert sum(of_contiguous) == 32 * 33 // 2


@pytest.fixture(scope="module")
def of_models(of_ranks: list[dict[str, Any]]) -> dict[Any, Any]:
    return of_ranks[0]["models"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_converted_encoder(is_causal: bool, layout: str, of_models: dict[Any, Any]) -> None:
    model = programs.make_encoder()
    x, padding = programs.encoder_inputs()
    options: dict[str, Any] = {"src_key_padding_mask": padding}
    if is_causal:
        mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=x.dtype)
        options = {"mask": mask, "is_causal": True}
    _compare(of_models["encoder", is_causal, layout], model, model(x, **options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_of_transformers(layout: str, of_models: dict[Any, Any]) -> None:
    pytest.importorskip("transformers")
    model = programs.make_llama()
    padding = programs.llama_padding()
    told = {"attention_mask": padding, "use_cache": False}
    output = model(programs.llama_inputs(), **told).last_hidden_state
    _compare(of_models["llama", layout], model, output, padding)


def _compare(
    found: Any, model: nn.Module, output: torch.Tensor, padding: torch.Tensor | None = None
) -> None:
    whole, gradients = found
    counts = torch.ones(output.shape[:2], dtype=torch.bool) if padding is None else padding.bool()
    torch.testing.assert_close(whole[counts], output.detach()[counts], rtol=1e-9, atol=1e-11)
    expected = programs.trained(model, output, padding)
    assert gradients.keys() == expected.keys()
    scale = max(float(x.abs().max()) for x in expected.values())
    for name, right in expected.items():
        torch.testing.assert_close(gradients[name], right, rtol=1e-8, atol=1e-10 * scale, msg=name)


def test_all_ranks_say_the_same_where_they_disagree(of_ranks: list[dict[str, Any]]) -> None:
    said = [of_rank["disagreements"] for of_rank in of_ranks]
    for name, sentence in said[0].items():
        assert [of_rank[name] for of_rank in said] == [sentence] * 4
        assert "ranks must agree on" in sentence
        assert "on rank 2" in sentence
    assert "size 2 of query, got 32 on rank 0 and 16 on rank 2" in said[0]["length"]
    assert "dtype of w1, got torch.float64 on rank 0 and torch.float32" in said[0]["dtype"]
    assert "eps, got 1.0000000000000001e-05" in said[0]["eps"]
    assert "algorithm, got None on rank 0 and linear on rank 2" in said[0]["algorithm"]


def test_a_rank_that_refuses_is_heard_by_all(of_ranks: list[dict[str, Any]]) -> None:
    heard = [of_rank["refusals"] for of_rank in of_ranks]
    own = {"function": "attn_mask must be None, got", "module": "need_weights must be False under"}
    for name, reason in own.items():
        assert reason in heard[2][name]
        assert not heard[2][name].startswith("ValueError")
        for rank in (0, 1, 3):
            assert heard[rank][name] == heard[0][name]
            assert "rank 2 refuses its part: " + heard[2][name] in heard[rank][name]


def test_ranks_draw_one_seed(of_ranks: list[dict[str, Any]]) -> None:
    tensors, _ = programs.tensors_of()
    del tensors["grad_output"]
    torch.manual_seed(0)  # as the first rank
    expected = ikattn.implicit_kernel_attention(**tensors, dropout_p=0.5)
    torch.testing.assert_close(of_ranks[0]["drawn"], expected)


@pytest.mark.parametrize("algorithm", ["quadratic", "linear"])
def test_a_rank_that_dies_is_named(algorithm: str, tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    started = [
        context.Process(target=programs.die, args=(rank, str(tmp_path), algorithm))
        for rank in range(4)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        assert process.exitcode is not None
    for rank in (0, 1, 3):
        text = (tmp_path / f"rank{rank}").read_text()
        assert f"on rank {rank}: rank 2 does not answer" in text
        assert float(text.split()[0]) < 20


def test_it_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"expected torch\.distributed to be initialised"):
        context_parallel(ikattn.MultiheadAttention(8, 2))


def test_what_cannot_be_shared_out(alone: None) -> None:
    tensors, _ = programs.tensors_of()
    del tensors["grad_output"]
    with pytest.raises(NotImplementedError, match="attn_mask must be None"):
        context_parallel_attention(**tensors, attn_mask=torch.ones(N, N))
    with pytest.raises(ValueError, match="layout must be"):
        context_parallel_attention(**tensors, layout="striped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="algorithm must be"):
        context_parallel_attention(**tensors, algorithm="ring")  # type: ignore[arg-type]
    odd = {**tensors, "query": tensors["query"][:, :, :7]}
    with pytest.raises(ValueError, match="query must have a multiple of 2 tokens"):
        context_parallel_attention(**odd)
    with pytest.raises(ValueError, match="as many keys as queries"):
        context_parallel_attention(**{**tensors, "query": odd["query"][:, :, :6]}, is_causal=True)
    short = {**tensors, "query": tensors["query"][:, :, :40]}
    with pytest.raises(ValueError, match="multiple of 32 tokens on each rank, got 40"):
        context_parallel_attention(**short, dropout_p=0.1)
    with pytest.raises(ValueError, match="takes no dropout"):
        context_parallel_attention(**tensors, dropout_p=0.1, algorithm="linear")
    by_item = {**tensors, **{name: tensors[name].expand(2, -1, -1, -1) for name in ("w1", "w2")}}
    with pytest.raises(ValueError, match="the same for all batch items, got"):
        context_parallel_attention(**by_item)
    with pytest.raises(RuntimeError, match="w1 must have shape"):
        context_parallel_attention(**{**tensors, "w1": tensors["w1"][:, :3]})


def test_autocast_lowers_tokens(alone: None) -> None:
    tensors, options = programs.tensors_of(dtype=torch.float32)
    for algorithm in ("quadratic", "linear"):

        def attend(algorithm: Any = algorithm, **arguments: Any) -> torch.Tensor:
            return context_parallel_attention(**arguments, algorithm=algorithm)

        with torch.autocast("cpu", torch.bfloat16):
            found = programs.differentiated(attend, tensors, options)
            right = programs.differentiated(ikattn.implicit_kernel_attention, tensors, options)
        assert found["output"].dtype == right["output"].dtype == torch.bfloat16
        for name, expected in right.items():
            error = (found[name] - expected).abs().max() / expected.abs().max()
            assert error <= TOLERANCE[torch.bfloat16], (algorithm, name)


def test_models_that_cannot_be_shared_out(alone: None) -> None:
    with pytest.raises(ValueError, match=r"expected a model with ikattn\.MultiheadAttention"):
        context_parallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="has another kernel than the implicit one"):
        context_parallel(nn.MultiheadAttention(8, 2))
    with pytest.raises(ValueError, match="has keys of its own"):
        context_parallel(ikattn.MultiheadAttention(8, 2, add_zero_attn=True))
    with pytest.raises(ValueError, match="depend on whole sequences"):
        context_parallel(ikattn.MultiheadAttention(8, 2, spectral="mikan"))
    module, x = ikattn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 4, 8)
    with context_parallel(module), pytest.raises(RuntimeError, match="need_weights must be False"):
        module(x, x, x)
    with context_parallel(module):
        inside, _ = module(x, x, x, need_weights=False)
    outside, weights = module(x, x, x)
    torch.testing.assert_close(inside, outside)
    assert weights is not None
    with context_parallel(module), pytest.raises(NotImplementedError, match="attn_mask"):
        module(x, x, x, need_weights=False, attn_mask=torch.zeros(4, 4, dtype=torch.bool))
    refused = pytest.raises(RuntimeError, match="is in context_parallel, where no rank has")
    with context_parallel(module), ikattn.record(module), refused:
        module(x, x, x, need_weights=False)
    nested = torch.nested.nested_tensor(list(x), layout=torch.jagged)
    with context_parallel(module), pytest.raises(RuntimeError, match="must not be nested under"):
        module(nested, nested, nested, need_weights=False)


def test_a_context_ends_whatever_happens_within(alone: None) -> None:
    module, x = ikattn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 4, 8)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = module.out_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), context_parallel(module):
        module(x, x, x, need_weights=False)
    handle.remove()
    assert not is_over_ranks()
    with (
        context_parallel(module),
        pytest.raises(RuntimeError, match="is in another context already"),
        context_parallel(nn.Sequential(module)),
    ):
        pass
    assert not is_over_ranks()
    module(x, x, x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_computed_again_within_the_context(alone, use_reentrant):
    module = ikattn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return module(x, x, x, need_weights=False)[0]

    def checkpointed() -> torch.Tensor:
        return checkpoint(forward, x, use_reentrant=use_reentrant).sum()

    with context_parallel(module):
        checkpointed().backward()
    with context_parallel(module):
        loss = checkpointed()
    with pytest.raises(RuntimeError, match="call backward within the context"):
        loss.backward()
    checkpointed().backward()  # of this process alone


def test_models_of_transformers_that_cannot_be_shared_out(alone: None) -> None:
    pytest.importorskip("transformers")
    model, ids = programs.make_llama(), torch.ones(1, 6, dtype=torch.long)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with context_parallel(model), pytest.raises(NotImplementedError, match="more than padding"):
        model(ids, position_ids=packed, use_cache=False)
    with context_parallel(model), pytest.raises(NotImplementedError, match="got a cache"):
        model(ids, past_key_values=ikattn.decoding_cache(model, "features"))
    with context_parallel(model):
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="ended without the attention of its implicit"):
            model(ids, use_cache=False)
    with pytest.raises(ValueError, match="the attention implementation 'sdpa', not"):
        context_parallel(model)
