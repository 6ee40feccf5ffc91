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


def test_a_decoders_answer(
    decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_what_the_model_says_itself_and_chat(
    decoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--model", decoder, "--new-tokens", 3)
    assert attribute(*common, "--prompt", PROMPT, "--method", "alti_logit") == 0
    plain = capsys.readouterr().out
    assert "not of any token" in plain
    assert attribute(*common, "--prompt", "animal did not", "--chat", "--against", "good") == 0
    assert capsys.readouterr().out.splitlines()[0].split()[0] == "the"


def test_a_class_and_a_page(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        (("--against", "good bad"), r"--against must be one token"),
        (("--target", ""), r"target must have a token"),
        (("--out", "/no/such/folder/a.json"), r"/no/such/folder"),
    ],
)
def test_what_cannot_be_is_told(
    decoder: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attribute("--model", decoder, "--prompt", PROMPT, "--target", "good", *arguments) == 1
    assert message in capsys.readouterr().err


def test_models_and_classes_that_are_not_there(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attribute("--model", tmp_path / "none", "--prompt", PROMPT) == 1
    assert "cannot load the model" in capsys.readouterr().err
    assert attribute("--model", classifier, "--prompt", PROMPT, "--target", "fine") == 1
    assert "a class must be a number or one of bad, good" in capsys.readouterr().err
    assert attribute("--model", classifier, "--prompt", PROMPT, "--chat") == 1
    assert "needs a tokenizer with a chat template" in capsys.readouterr().err
