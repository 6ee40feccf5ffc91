"""``python -m ikattn attribute``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ikattn
from ikattn import cli

transformers = pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")
tokenizers = pytest.importorskip("tokenizers", reason="pip install 'ikattn[analyze]'")

WORDS = ["[PAD]", "[UNK]", "</s>", "the", "animal", "did", "not", "cross", "street", "good", "bad"]
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
PROMPT = "the animal did not"


def save(folder: Path, model: Any, template: str | None = None) -> Path:
    places = {word: place for place, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(places, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="</s>", pad_token="[PAD]"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=32, vocab_size=len(WORDS), pad_token_id=0, eos_token_id=2
    )
    template = "{% for m in messages %}the {{ m['content'] }}{% endfor %}"
    folder = tmp_path_factory.mktemp("decoder")
    return save(folder, transformers.LlamaForCausalLM(config), template)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SIZES, intermediate_size=32, vocab_size=len(WORDS), id2label={0: "bad", 1: "good"}
    )
    folder = tmp_path_factory.mktemp("classifier")
    return save(folder, transformers.BertForSequenceClassification(config))


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16, num_heads=2, d_kv=8, num_layers=2, d_ff=32, vocab_size=len(WORDS),
        decoder_start_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("translator")
    return save(folder, transformers.T5ForConditionalGeneration(config))


def attribute(*arguments: object) -> int:
    return cli.main(["attribute", *map(str, arguments)])


def test_a_decoders_answer(decoder, tmp_path, capsys):
    out = tmp_path / "scores.json"
    options = ("--model", decoder, "--prompt", PROMPT, "--target", "cross the street")
    assert attribute(*options, "--out", out) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("value of cross the street: ")
    assert [line.split()[0] for line in printed[:3]] == ["the", "animal", "did"]
    found = json.loads(out.read_text())
    assert found["tokens"] == [*PROMPT.split(), "cross", "the", "street"]
    assert found["target_tokens"] == ["cross", "the", "street"]
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder).eval()
    expected = ikattn.attribute(model, torch.tensor([[3, 4, 5, 6]]), [7, 3, 8])
    torch.testing.assert_close(torch.tensor([found["scores"]]), expected.scores)
    assert sum(found["scores"]) + found["bias"] == pytest.approx(found["value"], abs=1e-4)


def test_what_the_model_says_itself_and_chat(decoder, capsys):
    common = ("--model", decoder, "--new-tokens", 3)
    assert attribute(*common, "--prompt", PROMPT, "--method", "alti_logit") == 0
    plain = capsys.readouterr().out.splitlines()
    assert plain[0].startswith("the model answers: ")
    answer = plain[0].split()[3:]
    assert plain[5] == "of the answer itself, for its later tokens:"
    assert [line.split()[0] for line in plain[6 : 6 + len(answer)]] == answer
    assert plain[-2].startswith("not of any token")
    assert attribute(*common, "--prompt", "animal did not", "--chat", "--against", "good") == 0
    assert capsys.readouterr().out.splitlines()[0].split()[0] == "the"


def test_a_class_and_a_page(classifier, tmp_path, capsys):
    page = tmp_path / "page.html"
    common = ("--model", classifier, "--prompt", PROMPT, "--pair", "the street")
    assert attribute(*common, "--target", "good", "--against", "bad", "--out", page) == 0
    assert "animal" in page.read_text()
    assert attribute(*common, "--method", "rollout:encoder", "--dtype", "float64") == 0
    assert "not of any token" not in capsys.readouterr().out.split("value")[-2]


def test_a_translation(translator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", translator, "--prompt", PROMPT, "--target", "street good")
    assert attribute(*options) == 0
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert printed[:7] == [*PROMPT.split(), "[PAD]", "street", "good"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "scores.txt"), r"--out must end in .html or .json"),
        (("--method", "decomp"), r"method must be"),
        (("--method", "rollout:some"), "MAP of rollout:MAP must be one of per_head, summed"),
        (("--method", "rollout:with_norm"), "mixing_ratio, alti, projection; take another map"),
        (("--against", "good bad"), r"--against must be one token"),
        (("--target", ""), r"target must have a token"),
        (("--out", "/no/such/folder/a.json"), r"/no/such/folder"),
    ],
)
def test_what_cannot_be_is_told(decoder, arguments, message, capsys):
    assert attribute("--model", decoder, "--prompt", PROMPT, "--target", "good", *arguments) == 1
    assert message in capsys.readouterr().err


def test_a_model_of_text_and_images_answers_text_alone(tmp_path, capsys):
    torch.manual_seed(0)
    text = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    eye = {**SIZES, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(
        text_config={**text, "vocab_size": len(WORDS), "pad_token_id": 0}, vision_config=eye
    )
    model = save(tmp_path, transformers.Gemma3ForConditionalGeneration(config).eval())
    assert attribute("--model", model, "--prompt", PROMPT, "--target", "cross") == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in printed[:5]] == [*PROMPT.split(), "cross"]
    loaded = transformers.Gemma3ForConditionalGeneration.from_pretrained(model).eval()
    expected = ikattn.attribute(loaded, torch.tensor([[3, 4, 5, 6]]), [7]).scores[0].tolist()
    assert [float(words[1]) for words in printed[:5]] == pytest.approx(expected, abs=1e-4)


def test_a_classifier_that_is_an_encoder_decoder_keeps_its_head(tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    sizes |= {"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        **sizes, vocab_size=len(WORDS), pad_token_id=0, eos_token_id=2, decoder_start_token_id=2,
        id2label={0: "bad", 1: "good"},
    )  # fmt: skip
    model = save(tmp_path, transformers.BartForSequenceClassification(config).eval())
    assert attribute("--model", model, "--prompt", f"{PROMPT} </s>") == 0
    said = capsys.readouterr()
    assert "random" not in said.err
    loaded = transformers.BartForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor([[3, 4, 5, 6, 2]])).logits[0]
    answer = config.id2label[int(logits.argmax())]
    first, *_, last = said.out.splitlines()
    assert first == f"the model answers: {answer}"
    assert last == f"value of {answer}: {float(logits.max()):.4f}"


def test_models_and_classes_that_are_not_there(classifier, tmp_path, capsys):
    assert attribute("--model", tmp_path / "none", "--prompt", PROMPT) == 1
    assert "cannot load the model" in capsys.readouterr().err
    assert attribute("--model", classifier, "--prompt", PROMPT, "--target", "fine") == 1
    assert "a class must be a number or one of bad, good" in capsys.readouterr().err
    assert attribute("--model", classifier, "--prompt", PROMPT, "--chat") == 1
    assert "needs a tokenizer with a chat template" in capsys.readouterr().err
