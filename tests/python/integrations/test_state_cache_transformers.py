"""Decoding of tiny transformers models with a cache of one size."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close
from ikattn.integrations.transformers import decoding_cache
from transformers_models import GENERATORS, build, convert
from transformers_models import IMPLICIT_TOLERANCE as TOLERANCE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.usefixtures("float64_by_default")

DECODERS = ["gpt2", "llama"]
PADDED = torch.tensor([[5, 6, 7, 8], [0, 0, 13, 14]])  # on the left


def decoder(family: str = "llama") -> Any:
    return convert(build(family, head=GENERATORS[family]))


def in_parts(model: Any, tokens: Tensor, cache: Any, cuts: list[int]) -> Tensor:
    steps = []
    for part in tokens.tensor_split(cuts, 1):
        steps.append(model(input_ids=part, past_key_values=cache).logits)
    return torch.cat(steps, 1)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("cuts", [[2, 3], [1], [4], []])
def test_a_cache_of_states_changes_no_number(family: str, cuts: list[int]) -> None:
    model, tokens = decoder(family), torch.tensor([[1, 4, 3, 5, 9], [1, 7, 9, 6, 8]])
    with torch.no_grad():
        found = in_parts(model, tokens, decoding_cache(model, "state"), cuts)
        assert_close(found, model(input_ids=tokens).logits, TOLERANCE)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_takes_the_same_tokens(family: str, beams: int) -> None:
    model = decoder(family)
    inputs = {"input_ids": PADDED, "attention_mask": (PADDED != 0).long()}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": beams}
    expected = model.generate(**inputs, **options)
    assert torch.equal(
        model.generate(**inputs, **options, past_key_values=decoding_cache(model, "state")),
        expected,
    )


def test_its_size_does_not_grow() -> None:
    model = decoder()
    cache, sizes = decoding_cache(model, "state"), []
    with torch.no_grad():
        for tokens in torch.randint(3, 30, (1, 12)).tensor_split([4, 5, 6], 1):
            model(input_ids=tokens, past_key_values=cache)
            sizes.append(cache.nbytes)
            assert all(layer.keys is None and layer.handed is None for layer in cache.layers)
    assert set(sizes) == {sum(layer.state.nbytes for layer in cache.layers)}
    assert cache.get_seq_length() == 12
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_prompt_is_shared_by_more_sequences() -> None:
    model, tokens = decoder(), torch.tensor([[1, 4, 3, 5, 9]])
    with torch.no_grad():
        full = model(input_ids=tokens).logits
        cache = decoding_cache(model, "state")
        model(input_ids=tokens[:, :3], past_key_values=cache)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([2, 0]))
        both = in_parts(model, tokens[:, 3:].expand(2, -1), cache, [1])
    assert_close(both, full[:, 3:].expand(2, -1, -1), TOLERANCE)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
)
def test_copies_and_pickles_go_on_by_themselves(copied: Any) -> None:
    model, tokens = decoder(), torch.tensor([[1, 4, 3, 5, 9]])
    with torch.no_grad():
        full = model(input_ids=tokens).logits
        cache = decoding_cache(model, "state")
        model(input_ids=tokens[:, :3], past_key_values=cache)
        other = copied(cache)
        for used in (cache, other):
            found = in_parts(model, tokens[:, 3:], used, [1])
            assert_close(found, full[:, 3:], TOLERANCE)
            assert used.nbytes == cache.nbytes
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match=r"do not reach|never entered its state"):
            in_parts(model, tokens, other, [1])


def test_frequencies_of_a_generator_have_a_state_while_they_stay() -> None:
    model = ikattn.convert(build("llama", head="ForCausalLM"), spectral="ikan", seed=0)
    tokens = torch.tensor([[1, 4, 3, 5, 9]])
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        assert_close(
            in_parts(model, tokens, decoding_cache(model, "state"), [2, 3]), expected, TOLERANCE
        )
        for layer in model.model.layers:
            layer.self_attn.spectral.spectral.evaluation = "random"
        with pytest.raises(NotImplementedError, match="other frequencies than those that Llama"):
            in_parts(model, tokens, decoding_cache(model, "state"), [2, 3])


def test_models_without_a_state_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="DynamicSlidingWindowLayer"):
        decoding_cache(decoder("mistral"), "state")
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        decoding_cache(decoder("bart"), "state")
    with pytest.raises(NotImplementedError, match="which needs all keys"):
        decoding_cache(build("llama", head="ForCausalLM"), "state")
    bare = build("llama", head="ForCausalLM")
    bare.set_attn_implementation("ikattn_implicit")
    with pytest.raises(NotImplementedError, match=r"layers\.0\.self_attn has no frequencies"):
        decoding_cache(bare, "state")


def test_calls_that_a_state_cannot_answer_are_refused() -> None:
    model, tokens = decoder(), torch.tensor([[1, 4, 3, 5, 9]])
    cache = decoding_cache(model, "state")
    with pytest.raises(NotImplementedError, match="has gradients"):  # a gradient would be lost
        model(input_ids=tokens, past_key_values=cache)
    with torch.no_grad():
        cache = decoding_cache(model, "state")
        model(input_ids=tokens, past_key_values=cache)
        with pytest.raises(NotImplementedError, match="a state forgets no token"):
            cache.crop(-1)
        one = torch.tensor([[3]])
        hidden = torch.tensor([[0, 1, 1, 1, 1, 1]])
        with pytest.raises(NotImplementedError, match="that it showed when they came"):
            model(input_ids=one, past_key_values=copy.deepcopy(cache), attention_mask=hidden)
        blocks = torch.ones(1, 1, 2, 7, dtype=torch.bool)  # sees the future
        both = torch.tensor([[3, 4]])
        with pytest.raises(NotImplementedError, match="differs by query"):
            model(input_ids=both, past_key_values=copy.deepcopy(cache), attention_mask=blocks)
        with pytest.raises(NotImplementedError, match="has output_attentions"):
            model(input_ids=one, past_key_values=copy.deepcopy(cache), output_attentions=True)
        for weight in model.parameters():
            weight.mul_(1.5)
        with pytest.raises(NotImplementedError, match="with other frequencies"):
            model(input_ids=one, past_key_values=cache)


def test_the_faster_cache_is_chosen_where_there_is_one() -> None:
    def layer(model: Any, tokens: int) -> str:
        return type(decoding_cache(model, tokens=tokens).layers[0]).__name__

    assert layer(decoder(), 199) == "FeatureLayer"
    assert layer(decoder(), 200) == "StateLayer"  # 2 (2 M)^2 with M = 5
    assert layer(decoder("mistral"), 10_000) != "StateLayer"


def test_another_attention_implementation_is_found_out() -> None:
    model, tokens = decoder(), torch.tensor([[1, 4, 3]])
    cache = decoding_cache(model, "state")
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache)
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="tokens do not reach the attention function"):
            model(input_ids=tokens[:, :1], past_key_values=cache)


def test_assisted_generation_is_refused() -> None:
    model = decoder()
    with pytest.raises((ValueError, NotImplementedError)):
        model.generate(
            PADDED[:1],
            assistant_model=decoder(),
            past_key_values=decoding_cache(model, "state"),
            max_new_tokens=4,
            do_sample=False,
        )


def test_masks_of_packed_sequences_are_refused_and_end_the_cache() -> None:
    model, tokens = decoder(), torch.tensor([[1, 4, 3, 5, 9, 2]])
    number = torch.tensor([0, 0, 0, 1, 1, 1])
    mask = (number[:, None] == number)[None, None].tril()
    cache = decoding_cache(model, "state")
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="otherwise than a causal one does"):
            model(input_ids=tokens, attention_mask=mask, past_key_values=cache)
        with pytest.raises(RuntimeError, match="begin again with a new cache"):
            model(input_ids=tokens, past_key_values=cache)
