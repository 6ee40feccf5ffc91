"""Numbers of queries and keys count each sequence's own tokens, whatever pads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close
from ikattn.maps import Contributions, Groups, Recording, TopK, TopSources
from ikattn.maps.sequences import AXES
from ikattn.recorder import record
from recorded_models import TOLERANCE, encoder, randomize, recorded
from transformers_models import build

pytestmark = pytest.mark.usefixtures("float64_by_default")

QUERIES: list[Any] = [[-1], [0, -2], slice(-2, None), slice(1, None), slice(None, None, -2)]
GROUPS = Groups({"first": [0], "last": slice(-2, None), "rest": slice(1, -2)})
LENGTHS = [6, 4, 3]


def own_rows(found: Contributions, b: int) -> dict[str, Tensor]:
    """Returns a sequence's part of each map, ratio and reduction of queries and keys, by name."""
    padding = found.query_padding
    there = slice(None) if padding is None else ~padding[b]
    rows = {n: x for n, axes in AXES.items() if "L" in axes if (x := getattr(found, n)) is not None}
    for name, each in found.reduced.items():
        rows |= {f"reduced {name}": each.values if isinstance(each, TopSources) else each}
    cut = {
        name: x[b][:, there] if "H" in AXES[name.split()[-1]] else x[b][there]
        for name, x in rows.items()
    }
    return cut | {f"ratio {n}": x[b][there] for n, x in found.mixing_ratio.items()}


def assert_as_alone(padded: Recording, alone: list[Recording]) -> None:
    for name in padded.names:
        maps = padded[name]
        for b, own in enumerate(alone):
            found, expected = own_rows(maps, b), own_rows(own[name], 0)
            assert sorted(found) == sorted(expected)
            for key, x in expected.items():
                keys = found[key]
                if "reduced" not in key and "ratio" not in key:
                    padding = maps.key_padding
                    keys = keys if padding is None else keys[..., ~padding[b]]
                assert_close(keys, x, TOLERANCE)
            if maps.query_padding is not None:
                missing = maps.query_padding[b]
                for key, axes in AXES.items():
                    if "L" in axes and getattr(maps, key) is not None:
                        assert not getattr(maps, key)[b][..., missing, :].any()


def options_of(reduce: Any, queries: Any) -> dict[str, Any]:
    return {"reduce": reduce, "queries": queries, "maps": ("summed", "weights", "mixing_ratio")}


@pytest.mark.parametrize("queries", QUERIES, ids=str)
@pytest.mark.parametrize("reduce", [None, TopK(2), GROUPS], ids=["whole", "top_k", "groups"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_llama_are_those_of_each_sequence_alone(side, reduce, queries):
    pytest.importorskip("transformers")
    model, options = build("llama"), options_of(reduce, queries)
    ids = [torch.randint(3, 30, (n,)) for n in LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(ids, True, 0, side)
    mask = (padded != 0).long()
    places = (mask.cumsum(1) - 1).clamp_min(0)
    inputs = {"input_ids": padded, "attention_mask": mask, "position_ids": places}
    alone = [recorded(model, {"input_ids": x[None]}, **options) for x in ids]
    assert_as_alone(recorded(model, inputs, **options), alone)


@pytest.mark.parametrize("queries", QUERIES, ids=str)
@pytest.mark.parametrize("reduce", [None, "diagonal", GROUPS], ids=["whole", "diagonal", "groups"])
def test_rows_of_a_padded_encoder_are_those_of_each_sequence_alone(reduce, queries):
    model, options = encoder(), {"reduce": reduce, "queries": queries}
    options["maps"] = ("summed", "with_residual", "encoder", "alti", "per_head", "mixing_ratio")
    x = torch.randn(3, 6, 16)
    padding = torch.arange(6) >= torch.tensor(LENGTHS)[:, None]
    padded = recorded(model, {"src": x, "src_key_padding_mask": padding}, **options)
    alone = [recorded(model, x[b : b + 1, :n], **options) for b, n in enumerate(LENGTHS)]
    assert_as_alone(padded, alone)


@pytest.mark.parametrize("layers", [None, "*multihead_attn"])
def test_cross_attention_counts_the_own_tokens_of_a_decoder(layers: Any) -> None:
    layer = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
    model = randomize(nn.TransformerDecoder(layer, 1)).eval()
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for queries in ([-1], slice(-4, None)):
        options = {"maps": "summed", "queries": queries, "layers": layers, "reduce": GROUPS}
        inputs = {"tgt": x, "memory": memory, "tgt_key_padding_mask": padding}
        cut = [(x[b : b + 1, :n], memory[b : b + 1]) for b, n in enumerate((5, 3))]
        alone = [recorded(model, each, **options) for each in cut]
        assert_as_alone(recorded(model, inputs, **options), alone)


@pytest.mark.parametrize("layers", [None, "decoder.*.encoder_attn"])
def test_cross_attention_of_bart_counts_the_own_tokens_of_its_decoder(layers: Any) -> None:
    pytest.importorskip("transformers")
    model, source = build("bart"), torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    target = torch.tensor([[1, 4, 3, 5], [1, 7, 9, 0]])
    inputs = {"input_ids": source, "decoder_input_ids": target}
    mask = {"decoder_attention_mask": (target != 0).long()}
    options = {"maps": "summed", "queries": [-1], "layers": layers}
    padded = recorded(model, inputs | mask, **options)
    short = {"input_ids": source[1:], "decoder_input_ids": target[1:, :3]}
    alone = recorded(model, short, **options)
    for name in (name for name in padded.names if "encoder_attn" in name):
        assert_close(padded[name].summed[1], alone[name].summed[0], TOLERANCE)


def test_steps_after_a_cache_count_their_own_tokens() -> None:
    pytest.importorskip("transformers")
    model = build("llama", head="ForCausalLM")
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    options = {"maps": "summed", "queries": slice(-2, None), "reduce": GROUPS}

    def run(x: Tensor) -> Recording:
        with torch.no_grad(), record(model, **options) as recording:
            mask = (x != 0).long()
            model.generate(x, attention_mask=mask, max_new_tokens=3, min_new_tokens=3)
        return recording

    padded, alone = run(ids), run(ids[:1, 2:])
    for call, own in zip(padded.batches, alone.batches, strict=True):
        for name in call:
            found, expected = own_rows(call[name], 0), own_rows(own[name], 0)
            assert_close(found["reduced summed"], expected["reduced summed"], TOLERANCE)


def test_rows_tell_the_numbers_that_were_asked_for_where_sequences_differ() -> None:
    model, x = encoder(), torch.randn(2, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [1]])
    for queries, rows, missing in (
        ([-1], [-1], [False]),
        (slice(-2, None), [-2, -1], [True, False]),
        (slice(1, 3), [1, 2], [True, True]),
        (slice(None), None, [False] + [True] * 5),
    ):
        inputs = {"src": x, "src_key_padding_mask": padding}
        found = recorded(model, inputs, "summed", queries=queries)["layers.0.self_attn"]
        assert (None if found.rows is None else found.rows.tolist()) == rows
        assert found.query_padding.tolist() == [[False] * len(missing), missing]


def test_reductions_of_ones_own_are_stacked_where_their_first_axis_is_the_batch() -> None:
    class Largest:
        def begin(self, about: Any) -> Any:
            return self

        def add(self, rows: Tensor, queries: range) -> None:
            self.found = rows.amax((-2, -1))

        def finish(self) -> Tensor:
            return self.found

    class Total(Largest):
        def finish(self) -> Tensor:
            return self.found.sum()

    model, x = encoder(), torch.randn(2, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [4]])

    def run(reduce: Any) -> Contributions:
        inputs = {"src": x, "src_key_padding_mask": padding}
        found = recorded(model, inputs, "summed", queries=[-1], reduce=reduce)
        return found["layers.0.self_attn"]

    assert_close(run(Largest()).reduced["summed"], run(None).summed.amax((1, 2)), TOLERANCE)
    with pytest.raises(ValueError, match=r"must return \[1, ..\].* got \[\[\], \[\]\]"):
        run(Total())


def test_a_number_that_a_sequence_lacks_is_refused_with_its_name() -> None:
    model, x = encoder(), torch.randn(2, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    for options, words in (
        ({"queries": [4]}, "the 4 tokens without padding of sequence 1 of layers.0.self_attn"),
        ({"queries": [3, -1]}, "each query once.* the 4 tokens .* of sequence 1 of layers.0"),
        ({"reduce": Groups([[5]])}, r"\[-4, 4\) for sequence 1, which has 4 keys .* of layers.0"),
        ({"reduce": Groups([[5]]), "queries": [-1]}, "for sequence 1, which has 4 keys"),
    ):
        with pytest.raises(ValueError, match=words):
            recorded(model, {"src": x, "src_key_padding_mask": padding}, "summed", **options)


def test_converted_layers_count_as_stock_ones_do() -> None:
    model, x = ikattn.convert(encoder()), torch.randn(2, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    options = {"maps": "summed", "queries": [-1], "reduce": "columns"}
    padded = recorded(model, {"src": x, "src_key_padding_mask": padding}, **options)
    alone = recorded(model, x[1:, :4], **options)
    for name in padded.names:
        found, own = (each[name].reduced["summed"] for each in (padded, alone))
        assert_close(found[1, :4], own[0], TOLERANCE)


def test_cross_attention_has_the_padding_of_the_self_attention_beside_it() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
            self.own, self.other = (
                nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2)
            )

        def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
            x = self.norms[0](x + self.own(x, x, x, key_padding_mask=padding)[0])
            return self.norms[1](x + self.other(x, memory, memory)[0])

    x, memory = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    block = Block().eval()
    recording = recorded(block, (x, memory, padding), "summed", queries=[-1])
    alone = recorded(block, (x[1:, :3], memory[1:], padding[1:, :3]), "summed")
    assert recording["other"].query_padding is not None
    last = recording["other"].summed[1]
    torch.testing.assert_close(last, alone["other"].summed[0, -1:])
