"""``python -m ikattn``: whatever goes wrong is one sentence, and no traceback."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ikattn import cli
from ikattn.cli import command
from tiny_texts import save_tiny, tiny_model

transformers = pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")
tokenizers = pytest.importorskip("tokenizers", reason="pip install 'ikattn[analyze]'")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("decoder"), tiny_model("GPT2LMHeadModel"))


def told(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 1) -> str:
    """Returns the one line that a failing command says, without the progress that it wrote over."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == status
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    said = [line for line in lines if line and "line/s" not in line]
    assert len(said) == 1, said
    return said[0]


def analysis(model: Path, out: Path, *options: object) -> tuple[object, ...]:
    text = () if {"--text", "--file"} & set(options) else ("--text", "w1 w2 w3")
    return ("analyze", "--model", model, "--format", "npz", "--out", out, *text, *options)


# --- Exceptions of any kind


class Panic(BaseException):
    """An error like those of libraries in Rust, which are no Exception."""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError(28, "No space left on device", "maps.npz"), 1, "maps.npz: No space left on dev"),
        (ValueError("record: layer 0\nhas no map"), 1, "ikattn info: layer 0"),
        (RuntimeError("Errors in loading:\n  size mismatch"), 1, "in loading: size mismatch"),
        (KeyError("heads"), 1, "KeyError: 'heads'; --debug shows where"),
        (MemoryError(), 1, "MemoryError; --debug shows where"),
        (Panic("called on None"), 1, "Panic: called on None; --debug shows where"),
        (ModuleNotFoundError("a picture needs matplotlib: pip install x"), 1, "pip install x"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyboardInterrupt("interrupted after 3 of 5 lines"), 130, "after 3 of 5 lines"),
    ],
)
def test_an_exception_is_one_sentence_or_a_traceback(error, status, message, monkeypatch, capsys):
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(command, "info", fail)
    assert message in told(capsys, "info", status=status)
    assert cli.main(["info", "--debug"]) == status
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last)")
    assert message in said


def test_a_warning_is_told_once_whatever_the_filters(monkeypatch, capsys):
    def warn(*_: object) -> int:
        for _ in range(3):
            warnings.warn("two layers gave no map\nand more", command.Notice, stacklevel=1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
        return 0

    monkeypatch.setattr(command, "info", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert told(capsys, "info", status=0) == "ikattn info: two layers gave no map"


# --- Streams


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (closed_pipe, "the program that reads the output has closed it"),
        (lambda: os.open("/dev/full", os.O_WRONLY), "No space left on device"),
    ],
)
def test_output_that_nobody_takes_is_told(stream, message, monkeypatch, capsys):
    with io.TextIOWrapper(os.fdopen(stream(), "wb"), encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert message in told(capsys, "info")


def test_streams_that_are_closed_are_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["info"]) == 0


def test_letters_that_a_stream_lacks_are_escaped(tmp_path, monkeypatch):
    words = tokenizers.models.WordLevel(
        {"?": 0, "a": 1, "🙂": 2, "grün": 3, "zwei\nZeilen": 4}, "?"
    )
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")
    model = save_tiny(tmp_path / "model", tiny_model("GPT2LMHeadModel"), tokenizer)
    out = io.BytesIO()
    with io.TextIOWrapper(out, encoding="latin-1") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        prompt = ["--prompt", "a 🙂 grün zwei\nZeilen", "--target", "a"]
        assert cli.main(["attribute", "--model", str(model), *prompt]) == 0
        shown = [line.split()[0] for line in out.getvalue().decode("latin-1").splitlines()]
    assert shown[:5] == ["a", "\\U0001f642", "grün", "zwei\\nZeilen", "a"]


# --- Texts


@pytest.mark.parametrize("option", ["--prompt", "--target", "--against", "--pair"])
def test_options_that_are_no_text_are_named(decoder, option, capsys):
    arguments = {"--prompt": "w1 w2", option: b"gr\xfc\xdfe".decode("utf-8", "surrogateescape")}
    given = [part for pair in arguments.items() for part in pair]
    said = told(capsys, "attribute", "--model", decoder, *given)
    assert f"{option} must be text in UTF-8" in said


def test_results_may_have_any_bytes_as_their_path(tmp_path: Path, decoder: Path) -> None:
    out = tmp_path / os.fsdecode(b"r\xe9sultats")
    assert cli.main([*map(str, analysis(decoder, out, "--format", "html,npz,json"))]) == 0
    assert (out / "index.html").is_file()


# --- Models and tokenizers


def test_folders_that_hold_no_whole_model_are_told(tmp_path, decoder, capsys):
    def changed(**options: Any) -> Callable[[Path], object]:
        def change(folder: Path) -> None:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | options))

        return change

    breaks: list[Callable[[Path], object]] = [
        lambda folder: os.truncate(folder / "model.safetensors", 1000),
        lambda folder: (folder / "model.safetensors").write_bytes(os.urandom(5000)),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\0{"),
        lambda folder: (folder / "config.json").write_text("[1]"),
        lambda folder: (folder / "tokenizer.json").write_text('{"a": 1}'),
        lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
        changed(model_type="of another world"),
        changed(n_embd=24),
        changed(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
    ]
    for number, damage in enumerate(breaks):
        folder = shutil.copytree(decoder, tmp_path / str(number))
        damage(folder)
        assert "cannot load the model" in told(capsys, *analysis(folder, tmp_path / "out"))
        asked = ("attribute", "--model", folder, "--prompt", "w1")
        assert "cannot load the model" in told(capsys, *asked)


def test_a_model_of_images_is_told_what_it_reads(tmp_path, capsys):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=32, image_size=8, patch_size=4)
    for kind in ("ViTModel", "ViTForImageClassification"):
        getattr(transformers, kind)(config).save_pretrained(tmp_path / "vit")
        for words in (
            analysis(tmp_path / "vit", tmp_path / "out"),
            ("attribute", "--model", tmp_path / "vit", "--prompt", "w1"),
        ):
            assert "reads pixel_values, and this command gives it text" in told(capsys, *words)


def test_a_model_that_needs_an_image_beside_the_text_is_told(tmp_path, capsys):
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2}
    image = {**text, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(
        text_config={**text, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=image,
    )
    model = save_tiny(tmp_path / "clip", transformers.CLIPModel(config))
    said = told(capsys, *analysis(model, tmp_path / "out"))
    assert "(clip), called with 4 token ids and nothing else: " in said


def test_a_tokenizer_needs_no_special_tokens(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(40)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    model = save_tiny(tmp_path / "model", tiny_model("GPT2LMHeadModel"), tokenizer)
    texts = ("--text", "w1 w2 w3", "--text", "w5", "--text", "")
    assert cli.main([*map(str, analysis(model, tmp_path / "out", *texts))]) == 0
    entries = (tmp_path / "out" / "lines.jsonl").read_text().splitlines()
    assert [json.loads(x)["tokens"] for x in entries] == [["w1", "w2", "w3"], ["w5"], []]


def test_a_tokenizer_of_another_model_is_told(tmp_path, capsys):
    model = save_tiny(tmp_path / "model", tiny_model("GPT2LMHeadModel", vocab_size=20))
    message = "'w30' the number 34, and the model has a table of 20 tokens"
    assert message in told(capsys, *analysis(model, tmp_path / "out", "--text", "w1 w30 w3"))
    assert message in told(capsys, "attribute", "--model", model, "--prompt", "w1 w30")
    asked = ("attribute", "--model", model, "--prompt", "w1", "--target", "w30")
    assert message in told(capsys, *asked)


def test_a_model_without_a_tokenizer_is_told(tmp_path, capsys):
    tiny_model("BertModel").save_pretrained(tmp_path / "model")
    said = told(capsys, *analysis(tmp_path / "model", tmp_path / "out"))
    assert "cannot load the model" in said
    assert "tokenizer" in said


def test_weights_that_are_missing_are_named_once(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    masked = save_tiny(tmp_path / "masked", tiny_model("BertForMaskedLM"))
    cli.main([*map(str, analysis(masked, tmp_path / "whole"))])
    assert "no weights" not in capsys.readouterr().err  # but a pooler's, which maps do not read
    weights = load_file(masked / "model.safetensors")
    lost = "bert.encoder.layer.1.attention.self.query.bias"
    kept = {name: x for name, x in weights.items() if name != lost}
    save_file(kept, masked / "model.safetensors", metadata={"format": "pt"})
    said = told(capsys, *analysis(masked, tmp_path / "out"), status=0)
    assert said.endswith(
        "no weights for encoder.layer.1.attention.self.query.bias: they are random"
    )


def test_prompts_and_answers_are_as_long_as_there_are_positions(decoder, capsys):
    asked = ("attribute", "--model", decoder, "--prompt")
    assert "has 40 tokens, and the model has positions for 32" in told(capsys, *asked, "w1 " * 40)
    said = told(capsys, *asked, "w1 " * 30, "--target", "w1 w2 w3")
    assert "the answer has 3 tokens, and the model has positions for 2 after the prompt" in said
    assert cli.main([*map(str, asked), "w1 " * 30, "--new-tokens", "50"]) == 0
