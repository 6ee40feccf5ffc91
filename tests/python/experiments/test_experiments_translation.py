"""experiments/translation.py, run as its readers run it."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiment_programs import ATTENTIONS, load, ran, refusal, rows_of, run
from ikattn.explain import Alignments

NOUNS = {"hund": "dog", "kind": "child", "mann": "man", "ball": "ball", "haus": "house"}
GERMAN_TO_ENGLISH = {"ein": "a", "sieht": "sees", **NOUNS}


translation = load("translation")


def write_pairs(path: Path, ending: str, count: int, seed: int) -> list[list[str]]:
    """Writes sentences that are translated word by word; returns the German ones."""
    generator = np.random.RandomState(seed)
    sources = []
    for _ in range(count):
        first, second = map(str, generator.choice(list(NOUNS), 2))
        sources.append(["ein", first, "sieht", "ein", second])
    targets = [[GERMAN_TO_ENGLISH[word] for word in source] for source in sources]
    for language, sentences in (("de", sources), ("en", targets)):
        text = "".join(f"{' '.join(words)}\n" for words in sentences)
        path.with_name(f"{path.name}{ending}.{language}").write_text(text, encoding="utf-8")
    return sources


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """A folder of data as translation.py wants it."""
    folder = tmp_path / "captions"
    folder.mkdir()
    for seed, name in enumerate(("train", "val", *translation.TEST_SETS)):
        write_pairs(folder / name, ".lc.norm.tok", 240 if name == "train" else 12, seed)
    return folder


@pytest.fixture
def aligned(tmp_path: Path) -> Path:
    """A folder of aligned pairs as translation.py wants it: word i is linked to word i."""
    folder = tmp_path / "aligned"
    folder.mkdir()
    sources = write_pairs(folder / "test", "", 10, 9)
    links = [" ".join(f"{i}-{i}" for i in range(1, 1 + len(words))) for words in sources]
    (folder / "alignment.talp").write_text("\n".join(links) + "\n")
    return folder


@pytest.mark.full
def test_translation_runs_every_attention(tmp_path: Path, captions: Path, aligned: Path) -> None:
    options = ["--data", captions, "--quick", "--p", "none", "--csv", "a.csv"]
    options += ["--plot", "a.png", "--align", aligned, "--align-csv", "b.csv"]
    told = ran("translation", *options, cwd=tmp_path)
    runs = rows_of(tmp_path / "a.csv")
    assert [row["attention"] for row in runs] == ATTENTIONS
    assert all(float(row["validation_perplexity"]) > 1 for row in runs)
    assert all(0 <= float(row["test_bleu"]) <= 100 for row in runs)
    alignments = rows_of(tmp_path / "b.csv")
    assert len(alignments) == 4 * len(runs)  # weights and norms, AWI and AWO
    assert all(0 <= float(row["error_rate"]) <= 1 for row in alignments)
    assert "10 aligned pairs: of their words the training set has 100 % (source)" in told
    assert "linking along the diagonal has the error rate 0.0 %" in told


@pytest.mark.full
def test_translation_learns_a_dictionary(captions, monkeypatch):
    monkeypatch.setattr("parallel_text.BATCH_TOKENS", 100)
    corpus = translation.read_corpus(captions, "test_2016_flickr")
    fitted = translation.fit(corpus, "direct", "2", seed=0, epochs=10)
    assert fitted.validation_perplexity < 1.3  # 1.7 is what is reached without the source
    assert translation.bleu(fitted.model, corpus.tokenizer, corpus.test) > 80


@pytest.mark.full
def test_models_that_were_kept_are_measured_without_training(tmp_path, captions):
    options = ["--data", captions, "--quick", "--attention", "mikan", "--models", "kept"]
    for file in ("a.csv", "b.csv"):
        ran("translation", *options, "--csv", file, cwd=tmp_path)
    assert rows_of(tmp_path / "a.csv") == rows_of(tmp_path / "b.csv")  # its seconds too
    longer = [*options[:2], "--epochs", 2, *options[3:]]
    told = refusal("translation", *longer, cwd=tmp_path)
    assert "mikan.2.0.pt was trained with other epochs" in told


def test_translation_says_what_to_install(tmp_path: Path) -> None:
    broken = "raise ModuleNotFoundError(name='sacrebleu')"
    (tmp_path / "sacrebleu.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    result = run("translation", "--help", cwd=tmp_path, PYTHONPATH=path)
    assert result.returncode == 1
    assert "needs sacrebleu: pip install 'ikattn[experiments]'" in result.stderr


def test_sentences_without_a_translation_are_an_error(captions: Path) -> None:
    path = captions / "val.lc.norm.tok.en"
    path.write_text(path.read_text() + "a dog\n")
    with pytest.raises(ValueError, match="must have as many lines, got 12 and 13"):
        translation.read_corpus(captions, "test_2016_flickr")
    path.write_text("a dog\n\n")
    with pytest.raises(ValueError, match="line 2: expected a sentence, got none"):
        translation.read_corpus(captions, "test_2016_flickr")
    path.write_bytes("caf\xe9\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"val\.lc\.norm\.tok\.en: 'utf-8' codec"):
        translation.read_corpus(captions, "test_2016_flickr")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_decoder_sees_the_words_it_predicts(attention, training, monkeypatch):
    monkeypatch.setattr(translation, "DROPOUT", 0.0)
    torch.manual_seed(0)
    model = translation.Translator(20, attention, "2").train(training)
    source, target = torch.randint(4, 20, (2, 6)), torch.randint(4, 20, (2, 7))
    other = torch.cat([target[:, :4], torch.randint(4, 20, (2, 3))], dim=1)
    hidden = []
    for words in (target, other):
        torch.manual_seed(1)
        hidden.append(model(source, words))
    torch.testing.assert_close(hidden[0][:, :4], hidden[1][:, :4])
    assert (hidden[0][:, 4:] - hidden[1][:, 4:]).abs().max() > 0.1


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_does_not_change_a_translation(attention: str) -> None:
    torch.manual_seed(0)
    model = translation.Translator(20, attention, "2").eval()
    source, target = torch.tensor([[4, 5, 6, 2]]), torch.tensor([[1, 7, 8]])
    longer = torch.cat([source, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(source, target), model(longer, target))


def test_the_layer_that_aligns_is_chosen_on_the_other_pairs() -> None:
    right, wrong = {(0, 0)}, {(1, 0)}
    gold = Alignments([right] * 4, [right] * 4)
    layers = {1: [right, wrong] * 2, 2: [wrong, right] * 2}
    found = {("norms", "AWO", layer): links for layer, links in layers.items()}
    (row,) = translation.measure_alignment(found, gold, ("softmax", "-", 0))
    assert (row.layer, row.chosen_on, row.error_rate) == (1, 0.0, 1.0)


class Diagonal(torch.nn.Module):
    """Cross-attention from every row of the decoder to the source token of the same number."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.multihead_attn = torch.nn.MultiheadAttention(16, 1, batch_first=True)
        with torch.no_grad():
            self.decoder.multihead_attn.in_proj_weight.copy_(torch.eye(16).repeat(3, 1))
            self.decoder.multihead_attn.out_proj.weight.copy_(torch.eye(16))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        q, k = (10 * torch.eye(16)[: x.size(1)].repeat(len(x), 1, 1) for x in (target, source))
        return self.decoder.multihead_attn(q, k, k)[0]


def test_alignment_reads_the_row_that_predicts_a_word_or_takes_it_in(captions, aligned):
    corpus = translation.read_corpus(captions, "test_2016_flickr")
    pairs = translation.read_aligned_pairs(aligned).pairs
    found = translation.align(Diagonal(), corpus.tokenizer, pairs)
    words = range(5)
    for kind in ("weights", "norms"):
        assert found[kind, "AWO", 1] == [{(word, word) for word in words}] * len(pairs)
        # one row later, to the source word after, and after the last word to the sentence's end
        assert found[kind, "AWI", 1] == [{(word + 1, word) for word in words[:-1]}] * len(pairs)


def test_batches_hold_every_pair_once_and_no_more_than_their_budget(monkeypatch):
    monkeypatch.setattr("parallel_text.BATCH_TOKENS", 1000)
    lengths = np.random.RandomState(0).randint(2, 60, 500)
    pairs = [translation.Numbers([9] * n, [9] * (n // 2 + 1)) for n in lengths]
    batches = list(translation.batches(pairs, translation.by_length(pairs, range(500))))
    assert sorted(i for batch in batches for i in batch) == list(range(500))
    padded = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
    assert max(padded) <= 1000
    assert sum(lengths) > 0.8 * sum(padded)
    assert math.isclose(translation.rate(translation.WARM_UP), 1)
