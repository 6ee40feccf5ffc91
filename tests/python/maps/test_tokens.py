"""Tokens as people read them, also of calls that go on from a cache; words of subwords."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import ikattn
from agreement import assert_close
from ikattn.explain import alti_plus, token_types, words_of_subwords
from ikattn.maps.sequences import sequences
from ikattn.maps.tokens import is_special, readable_tokens
from ikattn.recorder import record
from recorded_models import recorded
from tiny_texts import tiny_model, tiny_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXT = "Grüße aus Köln 你好 🙂"


@pytest.fixture(scope="module")
def byte_level() -> Any:
    """A tokenizer of the kind of GPT-2's, trained on one sentence."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=1,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=byte_level.alphabet(),
    )
    tokenizer.train_from_iterator(["Grüße aus Köln"] * 9, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>"
    )


def test_byte_level_tokens_are_the_texts_own_letters(byte_level: Any) -> None:
    ids = byte_level(TEXT)["input_ids"]
    tokens = readable_tokens(byte_level, [*ids, byte_level.eos_token_id])
    assert tokens[:3] == ["Grüße", "Ġaus", "ĠKöln"]
    assert tokens[-1] == "<|endoftext|>"
    whole = "".join(tokens[:-1]).replace("Ġ", " ")
    assert whole.encode().decode("unicode_escape", errors="ignore")  # bytes of split letters
    assert r"\xe4" in whole  # a letter of three tokens


def test_other_tokens_stay_what_they_are() -> None:
    class Pieces:
        all_special_tokens = ("</s>",)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["▁Gr", "Ã¼", "</s>"][i] for i in ids]

    assert readable_tokens(Pieces(), [0, 1, 2]) == ["▁Gr", "Ã¼", "</s>"]


def test_a_tokenizer_tells_which_tokens_are_special() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["?", "<s>", ">>fra<<", "<div>", "the", "cat", "endoftext"]
    model = tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "?")
    own = tokenizers.Tokenizer(model)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="?", bos_token="<s>", eos_token="endoftext",
        additional_special_tokens=[">>fra<<"],
    )  # fmt: skip
    tokens = readable_tokens(tokenizer, range(7))
    assert tokens == words
    assert [is_special(token) for token in tokens] == [False, True, True, False, False, False, True]
    assert words_of_subwords(["▁?", "<div>", *tokens[1:3]]) == [0, None, None, None]
    assert token_types(tokens)[:4] == ["punctuation", "special", "special", "word"]
    same = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="<s>", eos_token="<s>", pad_token="?"
    )  # the token of unknown words ends texts, too
    assert [is_special(token) for token in readable_tokens(same, [0, 1, 4])] == [True, True, False]
    assert pickle.loads(pickle.dumps(tokens))[2].is_special


@pytest.fixture(scope="module")
def generated(byte_level: Any) -> tuple[Any, torch.Tensor]:
    """A recording of ``generate``, and all the ids of its sequence."""
    model = tiny_model("GPT2LMHeadModel", vocab_size=400)
    ids = torch.tensor([byte_level("Grüße aus Köln")["input_ids"]])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with record(model, maps=None) as recording:
        whole = model.generate(ids, **options)
    return recording, whole


MAPS = ("value_norms", "summed", "with_residual", "encoder")


@pytest.mark.parametrize("eos", [None, 35])
def test_sequences_of_a_beam_search_are_followed_through_the_beams(eos: int | None) -> None:
    model = tiny_model("GPT2LMHeadModel")
    with torch.no_grad():
        model.transformer.wte.weight[35] *= 3  # a token that ends some beams early
    prompt = torch.tensor([[5, 17, 3, 9], [8, 2, 30, 11]])
    options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "pad_token_id": 0}
    with record(model, maps=MAPS) as recording:
        found = model.generate(
            prompt,
            max_new_tokens=5,
            eos_token_id=eos,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    beams = found.beam_indices
    assert (beams != torch.arange(6)[::3].repeat_interleave(2)[:, None]).any()
    assert bool((beams < 0).any()) == (eos is not None)
    joined = recording.joined(beams)
    with pytest.raises(ValueError, match=r"changed their places between calls.*beam_indices"):
        recording.joined()
    for n, sequence in enumerate(found.sequences):
        made = int((beams[n] >= 0).sum())
        whole = sequence[None, : prompt.size(1) + made - 1]
        at_once = recorded(model, whole, MAPS)
        L = whole.size(1)
        for name in at_once.names:
            for map_ in MAPS:
                expected = getattr(at_once[name], map_)[0]
                own = getattr(joined[name], map_)[n]
                own = own[..., :L] if map_ == "value_norms" else own[..., :L, :L]
                assert_close(own, expected, 1e-9, map_)
            padding = joined[name].query_padding
            if padding is not None:
                assert not padding[n, :L].any()
                assert padding[n, L:].all()
    with pytest.raises(ValueError, match=r"beam_indices must be \[N, steps\], got \[4, 0\]"):
        recording.joined(beams[:, :0])


def test_beams_of_several_texts_of_an_encoder_decoder_and_of_a_search_that_went_on() -> None:
    model = tiny_model("T5ForConditionalGeneration")
    ids = torch.tensor([[5, 6, 7, 8, 2], [5, 6, 9, 2, 0]])
    options = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    with record(model, maps=("summed", "value_norms")) as recording:
        found = model.generate(
            ids, attention_mask=(ids != 0).long(), max_new_tokens=5, eos_token_id=None, **options
        )
    (joined,) = recording.joined(found.beam_indices).batches
    L = found.sequences.size(1) - 1
    at_once = recorded(
        model,
        {
            "input_ids": ids,
            "attention_mask": (ids != 0).long(),
            "decoder_input_ids": found.sequences[:, :-1],
        },
        "summed",
    )
    for name, maps in joined.items():
        rows = slice(None) if name.startswith("encoder") else slice(L)
        assert_close(maps.summed[:, rows], at_once[name].summed, 1e-9, name)
    assert joined.input_ids.equal(ids)
    assert joined.target_ids[:, :L].equal(found.sequences[:, :-1])
    recording.joined(found.beam_indices[:, :2])  # whose best sequence ended earlier


def test_a_translation_that_was_generated_is_one_call_of_encoder_and_decoder(tmp_path):
    model = tiny_model("T5ForConditionalGeneration")
    ids = torch.tensor([[5, 6, 7, 8]])
    with record(model, maps=("alti", "value_norms")) as recording:
        made = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    joined = recording.joined()
    at_once = recorded(model, {"input_ids": ids, "decoder_input_ids": made[:, :-1]}, "alti")
    for found, expected in zip(alti_plus(joined), alti_plus(at_once), strict=True):
        assert_close(found, expected, 1e-9)
    joined.to_html(tmp_path / "page.html", tokens=tiny_tokenizer())
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for row in (ids, made[:, :-1]):
        names = tiny_tokenizer().convert_ids_to_tokens(row[0])
        assert all(f'"{name}"' in page for name in names if name.startswith("w"))


def test_ids_of_calls_that_go_on_stand_one_after_the_other() -> None:
    model = tiny_model("GPT2LMHeadModel")
    with torch.no_grad(), record(model) as recording:
        cache = model(torch.tensor([[5]]), use_cache=True).past_key_values
        model(torch.tensor([[8, 9, 10]]), past_key_values=cache)
    assert recording.joined().batches[0].input_ids.tolist() == [[5, 8, 9, 10]]


def test_places_that_cannot_be_seen_are_warned_of() -> None:
    model, ids = tiny_model("GPT2LMHeadModel"), torch.tensor([[5, 6], [7, 8]])
    with torch.no_grad(), record(model, maps=("summed",)) as recording:
        cache = model(ids, use_cache=True).past_key_values
        model(ids, past_key_values=cache)
    with pytest.warns(UserWarning, match="2 sequences without the map 'value_norms'"):
        recording.joined()


def test_left_padding_of_a_prompt_is_none_of_the_joined_map() -> None:
    model = tiny_model("GPT2LMHeadModel")
    ids, mask = torch.tensor([[0, 0, 17, 3]]), torch.tensor([[0, 0, 1, 1]])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with record(model, maps=MAPS) as recording:
        whole = model.generate(ids, attention_mask=mask, **options)
    joined = recording.joined()
    at_once = recorded(model, whole[:, 2:-1], MAPS)
    for name in joined.names:
        for map_ in MAPS:
            own = getattr(joined[name], map_)
            own = own[..., 2:] if map_ == "value_norms" else own[..., 2:, 2:]
            assert_close(own, getattr(at_once[name], map_), 1e-9, map_)
        assert joined[name].key_padding.tolist() == [[True, True, False, False, False, False]]


def test_a_tokenizer_names_the_tokens_of_every_call(generated, byte_level, tmp_path):
    recording, whole = generated
    all_of_them = readable_tokens(byte_level, whole[0].tolist())
    labels = [
        one.labels(recording.layers[recording.names[0]]) for one in sequences(recording, byte_level)
    ]
    n = whole.size(1) - 3
    assert labels[0] == (all_of_them[:n], all_of_them[:n])
    assert labels[1] == (all_of_them[n : n + 1], all_of_them[: n + 1])
    assert labels[2] == (all_of_them[n + 1 : n + 2], all_of_them[: n + 2])
    recording.joined().to_html(tmp_path / "page.html", tokens=byte_level)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "K\\u00f6ln" in page
    recording.plot(tmp_path / "one.svg", tokens=byte_level, batch=1)
    assert "Köln" in (tmp_path / "one.svg").read_text(encoding="utf-8")


def test_tokens_of_a_cached_step_may_be_its_own_or_all(generated: Any) -> None:
    recording, whole = generated
    layer, n = recording.layers[recording.names[0]], whole.size(1)
    names = [f"t{i}" for i in range(n)]
    of_all = [one.labels(layer) for one in sequences(recording, names)]
    assert of_all[2] == ([f"t{n - 2}"], names[: n - 1])
    own = [names[: n - 3], names[n - 3 : n - 2], names[n - 2 : n - 1]]
    of_step = [one.labels(layer) for one in sequences(recording, own)]
    assert of_step[1] == (own[1], [f"prefix {i + 1}" for i in range(n - 3)] + own[1])
    with pytest.raises(ValueError, match=r"must be .*, one for each of the queries"):
        [one.labels(layer) for one in sequences(recording, [names[:1]] * 3)]


def test_a_tokenizer_cannot_name_what_was_no_ids(byte_level: Any, tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    recording = recorded(layer, torch.randn(1, 3, 16), "summed")
    with pytest.raises(ValueError, match="calls that were made with input_ids"):
        recording.to_html(tmp_path / "page.html", tokens=byte_level)


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (["mir@@", "rors", "the"], {}, [0, 0, 1]),
        (["[CLS]", "im", "##plicit", "kernel", "[SEP]"], {}, [None, 0, 0, 1, None]),
        (["eng_Latn", "▁Hello", "</s>"], {}, [None, 0, None]),
        (["▁Hel", "lo", "</s>", "en_XX"], {}, [0, 0, None, None]),
        (["Hello", "Ġthere", "<|endoftext|>"], {"begin": "Ġ"}, [0, 1, None]),
        (["▁a", "▁b", "<me>"], {}, [0, 1, None]),
        (["▁a", "b", "END"], {"special": ["END"]}, [0, 0, None]),
        (["one"], {}, [0]),
        (["▁a", "b", "▁", "c", "</s>"], {}, [0, 0, 1, 1, None]),
        (["a", "b", "Ġc"], {"begin": "Ġ"}, [0, 0, 1]),
        (["<s>", "x", "▁y", "<pad>"], {}, [None, 0, 1, None]),
        ([], {}, []),
    ],
)
def test_words_of_subwords(tokens, options, expected):
    assert words_of_subwords(tokens, **options) == expected


@pytest.mark.parametrize("options", [{}, {"begin": "▁"}])
def test_words_without_marks_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"words_of_subwords: no token bears .*'im', 'kernel'"):
        words_of_subwords(["im", "kernel", "</s>"], **options)


def test_importance_of_a_span_is_the_mean_of_its_tokens() -> None:
    maps = [torch.rand(2, 5, 5, dtype=torch.float64).softmax(-1) for _ in range(2)]
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 4] = True
    options: dict[str, Any] = {"residual": 0.5, "query_padding": padding}
    single = [ikattn.maps.token_importance(maps, i, **options) for i in (2, 3)]
    found = ikattn.maps.token_importance(maps, slice(2, 4), **options)
    assert_close(found, (single[0] + single[1]) / 2, 1e-12)
    with pytest.raises(ValueError, match=r"a span with a token, got slice.4, 9.* of sequence 1"):
        ikattn.maps.token_importance(maps, slice(4, 9), **options)
    with pytest.raises(TypeError, match="token_importance: position must be an int, a slice"):
        ikattn.maps.token_importance(maps, "last", **options)  # type: ignore[arg-type]
