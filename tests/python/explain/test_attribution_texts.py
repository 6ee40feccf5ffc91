"""Attribution of texts and conversations, and scores of words and lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ikattn
from ikattn.explain import Attribution
from tiny_texts import tiny_model, tiny_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEMPLATE = (
    "{% for turn in messages %}{{ 'w30 ' if turn.role == 'user' else 'w31 ' }}{{ turn.content }}"
    "{{ ' w32 ' }}{% endfor %}{% if add_generation_prompt %}{{ 'w31 ' }}{% endif %}"
)
QUESTION = {"role": "user", "content": "w1 w2 w3"}
ANSWER = {"role": "assistant", "content": "w4 w5"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def decoder() -> Any:
    return tiny_model("GPT2LMHeadModel")


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_text_and_its_continuation_are_their_tokens(decoder: Any, tokenizer: Any) -> None:
    found = ikattn.attribute(decoder, "w1 w2 w3", "w4 w5", tokenizer=tokenizer)
    own = torch.tensor([ids(tokenizer, "w1 w2 w3")])
    expected = ikattn.attribute(decoder, own, ids(tokenizer, "w4 w5"))
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.tokens == [["w1", "w2", "w3", "w4", "w5"]]
    assert found.target_tokens == [["w4", "w5"]]
    next_one = ikattn.attribute(decoder, "w1 w2 w3", tokenizer=tokenizer)
    torch.testing.assert_close(next_one.scores, ikattn.attribute(decoder, own).scores)


def test_the_last_turn_of_a_conversation_is_the_answer(decoder: Any, tokenizer: Any) -> None:
    whole = torch.tensor([ids(tokenizer, "w30 w1 w2 w3 w32 w31 w4 w5")])
    expected = ikattn.attribute(decoder, whole, slice(6, None))
    for target in (None, "answer"):
        found = ikattn.attribute(decoder, [QUESTION, ANSWER], target, tokenizer=tokenizer)
        torch.testing.assert_close(found.scores, expected.scores)
        assert found.target_tokens == [["w4", "w5"]]
    open_one = ikattn.attribute(decoder, [QUESTION], "w4 w5", tokenizer=tokenizer)
    torch.testing.assert_close(open_one.scores, expected.scores)


def test_a_translation_begins_with_the_decoders_first_token(tokenizer: Any) -> None:
    model = tiny_model("T5ForConditionalGeneration")
    found = ikattn.attribute(model, "w1 w2 w3", "w4 w5", tokenizer=tokenizer)
    inputs = {
        "input_ids": torch.tensor([ids(tokenizer, "w1 w2 w3")]),
        "decoder_input_ids": torch.tensor([[1]]),
    }
    expected = ikattn.attribute(model, inputs, ids(tokenizer, "w4 w5"))
    torch.testing.assert_close(found.scores, expected.scores)
    torch.testing.assert_close(found.prefix_scores, expected.prefix_scores)


def test_a_class_is_told_by_its_label(tokenizer: Any) -> None:
    labels = {"bad": 0, "so so": 1, "good": 2}
    model = tiny_model(
        "BertForSequenceClassification",
        label2id=labels,
        id2label={i: name for name, i in labels.items()},
    )
    found = ikattn.attribute(model, "w1 w2 w3", "good", tokenizer=tokenizer)
    expected = ikattn.attribute(model, torch.tensor([ids(tokenizer, "w1 w2 w3")]), 2)
    torch.testing.assert_close(found.value, expected.value)
    assert found.target_tokens == [["good"]]
    with pytest.raises(ValueError, match=r"a label .* 'bad', 'so so', 'good', got 'best'"):
        ikattn.attribute(model, "w1 w2 w3", "best", tokenizer=tokenizer)


def test_texts_need_a_tokenizer_and_conversations_a_template(decoder: Any) -> None:
    with pytest.raises(ValueError, match="inputs that are text need tokenizer="):
        ikattn.attribute(decoder, "w1")
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        ikattn.attribute(decoder, [QUESTION], tokenizer=tiny_tokenizer())


def test_a_template_that_rewrites_earlier_turns_is_refused(decoder: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }} ".replace("{{", "w{{") + TEMPLATE
    with pytest.raises(ValueError, match="writes the turns before the answer otherwise"):
        ikattn.attribute(decoder, [QUESTION, ANSWER], tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        ("", None, "inputs must hold a token, got ''"),
        ("w1", "", "target must have a token, got ''"),
        (["w1 w2", "w3"], None, "a text, arguments by name, or, for a decoder, turns"),
        ([5, 6], None, "inputs must be a text"),
        ([ANSWER], None, "begin before the assistant's"),
        ([QUESTION, {"role": "assistant", "content": ""}], None, "the assistant's turn must have"),
        ("w1", ["w3"], r"a list as target must hold token ids, got \['w3'\]"),
    ],
)
def test_what_is_no_text_and_no_conversation_is_named(decoder, tokenizer, inputs, target, message):
    with pytest.raises(ValueError, match=message):
        ikattn.attribute(decoder, inputs, target, tokenizer=tokenizer)


def test_what_is_taken_off_may_be_text(decoder: Any, tokenizer: Any) -> None:
    found = ikattn.attribute(decoder, "w1 w2", "w4", against="w7", tokenizer=tokenizer)
    own = torch.tensor([ids(tokenizer, "w1 w2")])
    expected = ikattn.attribute(decoder, own, ids(tokenizer, "w4"), against=11)
    torch.testing.assert_close(found.scores, expected.scores)
    with pytest.raises(ValueError, match=r"against must be one token.* got 'w7 w8', which has 2"):
        ikattn.attribute(decoder, "w1", "w4", against="w7 w8", tokenizer=tokenizer)


def test_types_of_tokens_go_on_with_the_answer(decoder: Any, tokenizer: Any) -> None:
    own = torch.tensor([ids(tokenizer, "w1 w2 w3")])
    inputs = {"input_ids": own, "token_type_ids": torch.tensor([[4, 4, 5]])}
    found = ikattn.attribute(decoder, inputs, [9, 8])
    whole = {
        "input_ids": torch.cat([own, torch.tensor([[9, 8]])], 1),
        "token_type_ids": torch.tensor([[4, 4, 5, 5, 5]]),
    }
    expected = ikattn.attribute(decoder, whole, slice(3, 5))
    torch.testing.assert_close(found.scores, expected.scores)


# --- Words and lines


def of_tokens(*tokens: str) -> Attribution:
    scores = 2.0 ** torch.arange(len(tokens)).unsqueeze(0)
    return Attribution(scores, scores.sum(-1) + 1, torch.ones(1), tokens=[list(tokens)])


@pytest.mark.parametrize(
    ("tokens", "words", "sums"),
    [
        (("[CLS]", "im", "##plicit", "map", "[SEP]"), ["[CLS]", "implicit", "map", "[SEP]"],
         [1, 6, 8, 16]),
        (("▁a", "b", "▁c", "</s>"), ["ab", "c", "</s>"], [3, 4, 8]),
        (("hello", "Ġ", "\\xf0", "\\x9f\\x98\\x80", "Ġworld"), ["hello", "😀", "world"],
         [1, 14, 16]),
        (("x", "Ġ=", "Ġ1", "\n", "y"), ["x", "=", "1", "\n", "y"], [1, 2, 4, 8, 16]),
    ],
)  # fmt: skip
def test_words_are_told_by_the_marks_of_tokens(tokens, words, sums):
    found = of_tokens(*tokens).by_words()
    assert found.tokens == [words]
    assert found.scores.tolist() == [sums]
    assert float(found.bias) == 1


def test_byte_level_texts_without_a_space_are_told_by_their_tokenizer() -> None:
    found = of_tokens("un", "believ", "able")
    assert found.by_words().tokens == [["un", "believ", "able"]]
    found.byte_level = True
    assert found.by_words().tokens == [["unbelievable"]]
    assert found.by_lines().tokens == [["unbelievable"]]


def test_lines_end_with_the_token_that_ends_them() -> None:
    found = of_tokens("a", "Ġb", "\n\n", "Ġc", "Ċ", "d")
    found = found.by_lines()
    assert found.scores.tolist() == [[7, 0, 24, 32]]  # the second line is empty
    assert found.tokens == [["a b\n\n", "", "c\n", "d"]]
    torch.testing.assert_close(found.scores.sum(-1) + found.bias, found.value)
    with pytest.raises(ValueError, match="by_lines: tokens must have names"):
        Attribution(torch.ones(1, 2), torch.ones(1), torch.zeros(1)).by_lines()


def test_lines_of_targets_apart_stay_apart() -> None:
    found = Attribution(torch.ones(1, 3, 4), torch.full((1, 3), 4.0), torch.zeros(1, 3))
    found.tokens = [["a", "\n", "b", "c"]]
    assert found.by_lines().scores.tolist() == [[[2, 2]] * 3]
