"""``python -m ikattn attribute``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ikattn
from ikattn import cli
from tiny_texts import save_tiny, tiny_model, tiny_tokenizer
from transformers_models import BART

transformers = pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")

PROMPT = "w1 w2 w3 w4"
IDS = torch.tensor([[5, 6, 7, 8]])
LABELS = {"id2label": {0: "bad", 1: "good"}}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}w0 {{ m['content'] }}{% endfor %}"
    model = tiny_model("LlamaForCausalLM").float()
    return save_tiny(tmp_path_factory.mktemp("decoder"), model, tokenizer)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("BertForSequenceClassification", **LABELS)
    return save_tiny(tmp_path_factory.mktemp("classifier"), model)


def attribute(*arguments: object) -> int:
    return cli.main(["attribute", *map(str, arguments)])


def test_a_decoders_answer(decoder, tmp_path, capsys):
    out = tmp_path / "scores.json"
    options = ("--model", decoder, "--prompt", PROMPT, "--target", "w5 w1 w6")
    assert attribute(*options, "--out", out) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("value of w5 w1 w6: ")
    assert [line.split()[0] for line in printed[:3]] == ["w1", "w2", "w3"]
    found = json.loads(out.read_text())
    assert found["tokens"] == [*PROMPT.split(), "w5", "w1", "w6"]
    assert found["target_tokens"] == ["w5", "w1", "w6"]
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder).eval()
    expected = ikattn.attribute(model, IDS, [9, 5, 10])
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
    assert attribute(*common, "--prompt", "w2 w3 w4", "--chat", "--against", "w7") == 0
    assert capsys.readouterr().out.splitlines()[0].split()[0] == "the"


def test_a_class_and_a_page(classifier, tmp_path, capsys):
    page = tmp_path / "page.html"
    common = ("--model", classifier, "--prompt", PROMPT, "--pair", "w1 w6")
    assert attribute(*common, "--target", "good", "--against", "bad", "--out", page) == 0
    assert "w2" in page.read_text()
    assert attribute(*common, "--method", "rollout:encoder", "--dtype", "float64") == 0
    assert "not of any token" not in capsys.readouterr().out.split("value")[-2]


def test_a_translation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translator = save_tiny(tmp_path, tiny_model("T5ForConditionalGeneration"))
    assert attribute("--model", translator, "--prompt", PROMPT, "--target", "w6 w7") == 0
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert printed[:7] == [*PROMPT.split(), "<s>", "w6", "w7"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "scores.txt"), r"--out must end in .html or .json"),
        (("--method", "decomp"), r"method must be"),
        (("--method", "rollout:some"), "MAP of rollout:MAP must be one of per_head, summed"),
        (("--method", "rollout:with_norm"), "mixing_ratio, alti, projection; take another map"),
        (("--against", "w7 w8"), r"--against must be one token"),
        (("--target", ""), r"target must have a token"),
        (("--out", "/no/such/folder/a.json"), r"/no/such/folder"),
    ],
)
def test_what_cannot_be_is_told(decoder, arguments, message, capsys):
    assert attribute("--model", decoder, "--prompt", PROMPT, "--target", "w7", *arguments) == 1
    assert message in capsys.readouterr().err


def test_a_model_of_text_and_images_answers_text_alone(tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    sizes |= {"intermediate_size": 32}
    text = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "pad_token_id": 0}
    eye = {**sizes, "image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config=eye)
    model = save_tiny(tmp_path, transformers.Gemma3ForConditionalGeneration(config).eval())
    assert attribute("--model", model, "--prompt", PROMPT, "--target", "w5") == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in printed[:5]] == [*PROMPT.split(), "w5"]
    loaded = transformers.Gemma3ForConditionalGeneration.from_pretrained(model).eval()
    expected = ikattn.attribute(loaded, IDS, [9]).scores[0].tolist()
    assert [float(words[1]) for words in printed[:5]] == pytest.approx(expected, abs=1e-4)


def test_a_classifier_that_is_an_encoder_decoder_keeps_its_head(tmp_path, capsys):
    torch.manual_seed(0)
    config = transformers.BartConfig(**BART | LABELS)
    model = save_tiny(tmp_path, transformers.BartForSequenceClassification(config).eval())
    assert attribute("--model", model, "--prompt", f"{PROMPT} </s>") == 0
    said = capsys.readouterr()
    assert "random" not in said.err
    loaded = transformers.BartForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor([[5, 6, 7, 8, 2]])).logits[0]
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
