"""The experiments, run as their readers run them."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from ikattn.analysis.alignment import GoldAlignments
from programs import import_program, run_python

for library in ("tqdm", "matplotlib", "sacrebleu", "tokenizers"):
    pytest.importorskip(library, reason="the experiments: pip install 'ikattn[experiments]'")

REGRESSION = Path(__file__).resolve().parents[3] / "shared/data/regression"
ATTENTIONS = ["softmax", "rbf", "direct", "ikan", "mikan"]


def run(
    source_tree: Path, name: str, *arguments: object, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    path = source_tree / "experiments" / name
    return run_python(path, *arguments, cwd=cwd, **environment)


@pytest.fixture
def regression(source_tree: Path) -> ModuleType:
    return import_program(source_tree / "experiments/regression.py")


@pytest.fixture
def sentences(source_tree: Path) -> ModuleType:
    return import_program(source_tree / "experiments/sentences.py")


@pytest.fixture
def translation(source_tree: Path) -> ModuleType:
    return import_program(source_tree / "experiments/translation.py")


@pytest.fixture
def tables(tmp_path: Path, regression: ModuleType) -> Path:
    """A folder of data as regression.py wants it."""
    table = np.random.RandomState(0).uniform(-1, 1, (40, 3))
    for name, data_set in regression.DATA_SETS.items():
        for file in data_set.files:
            path = tmp_path / "tables" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            columns = table[:, :2] if name in ("airline", "co2") else 5 + 3 * table
            np.savetxt(path, columns, delimiter=",")
    return tmp_path / "tables"


@pytest.fixture
def texts(tmp_path: Path, sentences: ModuleType) -> Path:
    """A folder of data as sentences.py wants it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    words = ["a", "good", "bad", "film", "caf\xe9"]
    for files in sentences.DATA_SETS.values():
        for file in files:
            lines = [f"{i % 2} {' '.join(words[: 1 + i % 5])} ." for i in range(50)]
            (folder / file).write_text("\n".join(lines) + "\n", encoding="latin-1")
    return folder


NOUNS = {"hund": "dog", "kind": "child", "mann": "man", "ball": "ball", "haus": "house"}
GERMAN_TO_ENGLISH = {"ein": "a", "sieht": "sees", **NOUNS}


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
def captions(tmp_path: Path, translation: ModuleType) -> Path:
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


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_regression_runs_every_attention_and_order(
    source_tree: Path, tmp_path: Path, tables: Path
) -> None:
    options = ["--data", tables, "--datasets", "airline", "housing", "--epochs", 2]
    options += ["--repeats", 1, "--p", 1.5, "none", "learned", "--csv", "a.csv", "--plot", "a.png"]
    result = run(source_tree, "regression.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.png").stat().st_size > 10_000
    runs = rows_of(tmp_path / "a.csv")
    assert len(runs) == 2 * (1 + 4 * 3)
    assert all(0 < float(run["best_rmse"]) <= float(run["last_rmse"]) for run in runs)
    assert "selected on the test set" in result.stdout


@pytest.mark.skipif(not REGRESSION.is_dir(), reason=f"{REGRESSION} is absent")
def test_regression_runs_quickly_on_the_real_data(source_tree: Path, tmp_path: Path) -> None:
    options = ["--data", REGRESSION, "--quick", "--csv", "a.csv", "--plot", "a.png"]
    result = run(source_tree, "regression.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    runs = rows_of(tmp_path / "a.csv")
    names = {(row["data_set"], row["attention"], row["epochs"]) for row in runs}
    assert names == {(data, kind, "5") for data in ("airline", "co2") for kind in ATTENTIONS}
    assert all(0 < float(row["best_rmse"]) <= float(row["last_rmse"]) < 1 for row in runs)


def test_regression_names_the_file_that_is_missing_and_its_origin(
    source_tree: Path, tmp_path: Path
) -> None:
    result = run(source_tree, "regression.py", "--data", "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert f"{Path('nowhere/airline_passengers/train.csv')} is missing" in result.stderr
    assert "part of github.com/MushroomHunting" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--p", "0.5"], "at least 1, 'none' or 'learned', got '0.5'"),
        (["--seed", "-1"], "--seed must be from 0 to 2^32 - 1, got -1"),
        (["--csv", "no/a.csv"], "there is no directory no"),
        (["--csv", "."], ". is a directory"),
        pytest.param(
            ["--csv", "/proc/a.csv"],
            "cannot write /proc/a.csv",
            marks=pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc"),
        ),
        (["--plot", "a.txt"], "--plot must end in one of"),
        (["--cost", "--plot", "a.png"], "--cost has no plot"),
    ],
)
def test_regression_rejects_options_before_it_computes(
    regression: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["regression.py", "--data", ".", *options])
    with pytest.raises(SystemExit):
        regression.parse_options()
    assert message in capsys.readouterr().err


def test_a_run_that_has_ended_is_kept_when_the_next_is_interrupted(
    regression: ModuleType,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended: list[int] = []

    def train_epoch(*_: object) -> None:
        ended.append(len(ended))
        if len(ended) > 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("regression_protocol.train_epoch", train_epoch)
    options = ["--data", tables, "--datasets", "airline", "--attention", "softmax"]
    options += ["--epochs", 2, "--csv", tmp_path / "a.csv"]
    monkeypatch.setattr(sys, "argv", ["regression.py", *map(str, options)])
    with pytest.raises(SystemExit) as stopped:
        regression.run_program(regression.main)
    assert stopped.value.code == 130
    assert "interrupted; runs that had ended are in --csv" in capsys.readouterr().err
    assert [row["repeat"] for row in rows_of(tmp_path / "a.csv")] == ["0", "1"]


def test_a_table_of_what_is_no_number_is_named(regression: ModuleType, tables: Path) -> None:
    path = tables / "airline_passengers/train.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "0.5,nan", *lines[2:]]))
    with pytest.raises(ValueError, match=r"train\.csv, row 3: expected finite numbers"):
        regression.load(tables, "airline")
    (tables / "housing/data.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"data\.csv\.gz: "):
        regression.load(tables, "housing")


def test_tables_are_scaled(regression: ModuleType, tables: Path) -> None:
    x, y = regression.load(tables, "housing")
    assert x.shape == (40, 2)
    for column in (*x.T, *y.T):
        assert column.min() == -1
        assert column.max() == 1


def test_concrete_is_inputs_and_a_value_in_two_files(regression: ModuleType, tables: Path) -> None:
    table = np.random.RandomState(1).uniform(0, 500, (30, 9))  # 8 inputs and the strength
    np.savetxt(tables / "concrete" / "train.csv", table[:20], delimiter=",")
    np.savetxt(tables / "concrete" / "test.csv", table[20:], delimiter=",")
    x, y = regression.load(tables, "concrete")
    low, high = table.min(0), table.max(0)
    expected = 2 * (table - low) / (high - low) - 1
    np.testing.assert_allclose(x, expected[:, :8], atol=1e-5)
    np.testing.assert_allclose(y, expected[:, 8:], atol=1e-5)
    np.savetxt(tables / "concrete" / "test.csv", table[20:, :5], delimiter=",")
    with pytest.raises(ValueError, match=r"concrete.test\.csv must have 9 columns"):
        regression.load(tables, "concrete")


def test_regression_tests_on_a_tenth_that_differs_between_repeats(regression: ModuleType) -> None:
    splits = regression.draw_splits(144, seed=1000)
    (train, test), (_, other) = next(splits), next(splits)
    assert (len(train), len(test)) == (129, 15)
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(144))
    assert not torch.equal(test, other)


@pytest.mark.parametrize("p", ["2", "3", "none"])
def test_the_eager_formulation_is_the_same_attention(regression: ModuleType, p: str) -> None:
    torch.manual_seed(0)
    eager = regression.Regressor(1, regression.Setting("co2", "eager", p))
    fused = regression.Regressor(1, regression.Setting("co2", "direct", p))
    fused.load_state_dict(eager.state_dict())
    x = torch.linspace(-1, 1, 50).unsqueeze(-1)
    torch.testing.assert_close(eager(x), fused(x), rtol=1e-4, atol=1e-5)


def test_cost_is_measured_in_processes_of_their_own(
    source_tree: Path, tmp_path: Path, tables: Path
) -> None:
    options = ["--data", tables, "--datasets", "parkinsons", "--cost", "--csv", "a.csv"]
    result = run(source_tree, "regression.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = result.stdout.splitlines()[1:]
    assert [row.split()[1].rstrip(",") for row in rows] == ["direct", "mikan", "eager"]
    assert all(row.endswith("MiB") for row in rows), result.stdout
    costs = rows_of(tmp_path / "a.csv")
    assert [cost["attention"] for cost in costs] == ["direct", "mikan", "eager"]
    assert all(float(cost["seconds_per_epoch"]) > 0 for cost in costs)


def test_sentences_run_every_attention(source_tree: Path, tmp_path: Path, texts: Path) -> None:
    options = ["--data", texts, "--quick", "--p", "2", "learned", "--csv", "a.csv"]
    result = run(source_tree, "sentences.py", *options, "--plot", "a.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.png").stat().st_size > 10_000
    runs = rows_of(tmp_path / "a.csv")
    assert len(runs) == 4 * (1 + 4 * 2)
    assert all(0 <= float(run["test_accuracy"]) <= 1 for run in runs)


def test_sentences_name_the_file_that_is_missing_and_its_origin(
    source_tree: Path, tmp_path: Path
) -> None:
    result = run(source_tree, "sentences.py", "--data", "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert f"{Path('nowhere/rt-polarity.all')} is missing" in result.stderr
    assert "part of github.com/harvardnlp/sent-conv-torch" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_set_too_small_to_split_is_named(sentences: ModuleType, texts: Path) -> None:
    (texts / "subj.all").write_text("0 a film\n1 good\n")
    with pytest.raises(ValueError, match=r"subj\.all: expected at least 10 sentences, got 2"):
        sentences.read(texts, "subj.all")


def test_a_line_without_a_label_is_named(sentences: ModuleType, texts: Path) -> None:
    (texts / "subj.all").write_text("0 a film\ngood film\n", encoding="latin-1")
    with pytest.raises(ValueError, match=r"subj\.all, line 2: expected a label first, got 'good'"):
        sentences.read(texts, "subj.all")


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_training_validation_and_test_sets_are_disjoint(sentences: ModuleType, parts: int) -> None:
    files = [[sentences.Sentence(0, [f"{part}.{i}"]) for i in range(100)] for part in range(parts)]
    for seed in range(2):
        splits = sentences.split(files, seed)
        words = [{sentence.words[0] for sentence in split} for split in splits]
        assert sum(map(len, words)) == len(set.union(*words)) == 100 * parts
        assert all(words)
    if parts > 1:
        assert splits.test == files[-1]


def test_padding_does_not_change_what_a_sentence_is(sentences: ModuleType) -> None:
    torch.manual_seed(0)
    model = sentences.Classifier(20, 3, "mikan", "2").eval()
    words = torch.tensor([[3, 5, 7]])
    longer = torch.cat([words, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(words), model(longer))


def test_translation_runs_every_attention(
    source_tree: Path, tmp_path: Path, captions: Path, aligned: Path
) -> None:
    options = ["--data", captions, "--quick", "--p", "none", "--csv", "a.csv"]
    options += ["--plot", "a.png", "--align", aligned, "--align-csv", "b.csv"]
    result = run(source_tree, "translation.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.png").stat().st_size > 10_000
    runs = rows_of(tmp_path / "a.csv")
    assert [row["attention"] for row in runs] == ATTENTIONS
    assert all(float(row["validation_perplexity"]) > 1 for row in runs)
    assert all(0 <= float(row["test_bleu"]) <= 100 for row in runs)
    alignments = rows_of(tmp_path / "b.csv")
    assert len(alignments) == 4 * len(runs)  # weights and norms, AWI and AWO
    assert all(0 <= float(row["error_rate"]) <= 1 for row in alignments)
    assert "10 aligned pairs: of their words the training set has 100 % (source)" in result.stdout
    assert "linking along the diagonal has the error rate 0.0 %" in result.stdout


def test_translation_learns_a_dictionary(
    translation: ModuleType, captions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel_text.BATCH_TOKENS", 100)
    corpus = translation.read_corpus(captions, "test_2016_flickr")
    fitted = translation.fit(corpus, "direct", "2", seed=0, epochs=10)
    assert fitted.validation_perplexity < 1.3  # 1.7 is what is reached without the source
    assert translation.bleu(fitted.model, corpus.tokenizer, corpus.test) > 80


def test_models_that_were_kept_are_measured_without_training(
    source_tree: Path, tmp_path: Path, captions: Path
) -> None:
    options = ["--data", captions, "--quick", "--attention", "mikan", "--models", "kept"]
    for file in ("a.csv", "b.csv"):
        result = run(source_tree, "translation.py", *options, "--csv", file, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert rows_of(tmp_path / "a.csv") == rows_of(tmp_path / "b.csv")  # its seconds too
    longer = [*options[:2], "--epochs", 2, *options[3:]]
    result = run(source_tree, "translation.py", *longer, cwd=tmp_path)
    assert result.returncode == 1
    assert "mikan.2.0.pt was trained with other epochs" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_cannot_be_a_folder_of_models_is_named(
    source_tree: Path, tmp_path: Path, captions: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/direct.2.0.pt").write_text("no model")
    for models, message in (("file", "File exists"), ("kept", "2.0.pt is no model that was kept")):
        options = ["--data", captions, "--quick", "--attention", "direct", "--models", models]
        result = run(source_tree, "translation.py", *options, cwd=tmp_path)
        assert result.returncode == 1
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_a_run_that_diverges_leaves_the_others(
    translation: ModuleType,
    captions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit = translation.fit

    def sometimes(corpus: object, attention: str, *others: object) -> object:
        if attention == "rbf":
            raise FloatingPointError("rbf: the loss is nan")
        return fit(corpus, attention, *others)

    monkeypatch.setattr(translation, "fit", sometimes)
    options = ["--data", captions, "--quick", "--attention", "rbf", "direct"]
    options += ["--csv", tmp_path / "a.csv"]
    monkeypatch.setattr(sys, "argv", ["translation.py", *map(str, options)])
    with pytest.raises(SystemExit, match="1 runs diverged"):
        translation.main()
    assert "left out: rbf: the loss is nan" in capsys.readouterr().out
    assert [row["attention"] for row in rows_of(tmp_path / "a.csv")] == ["direct"]


def test_translation_names_the_file_that_is_missing_and_its_origin(
    source_tree: Path, tmp_path: Path, captions: Path
) -> None:
    for data, align, missing, origin in (
        ("nowhere", "nowhere", "nowhere/train.lc.norm.tok.de", "github.com/multi30k/dataset"),
        (captions, "nowhere", "nowhere/test.de", "github.com/mt-upc"),
    ):
        options = ["--data", data, "--align", align]
        result = run(source_tree, "translation.py", *options, cwd=tmp_path)
        assert result.returncode == 1
        assert f"{Path(missing)} is missing: it is part of {origin}" in result.stderr
        assert "Traceback" not in result.stderr


def test_translation_says_what_to_install(source_tree: Path, tmp_path: Path) -> None:
    broken = "raise ModuleNotFoundError(name='sacrebleu')"
    (tmp_path / "sacrebleu.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    result = run(source_tree, "translation.py", "--help", cwd=tmp_path, PYTHONPATH=path)
    assert result.returncode == 1
    assert "needs sacrebleu: pip install 'ikattn[experiments]'" in result.stderr


def test_sentences_without_a_translation_are_an_error(
    translation: ModuleType, captions: Path
) -> None:
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
def test_no_decoder_sees_the_words_it_predicts(
    translation: ModuleType, attention: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_padding_does_not_change_a_translation(translation: ModuleType, attention: str) -> None:
    torch.manual_seed(0)
    model = translation.Translator(20, attention, "2").eval()
    source, target = torch.tensor([[4, 5, 6, 2]]), torch.tensor([[1, 7, 8]])
    longer = torch.cat([source, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(source, target), model(longer, target))


def test_the_layer_that_aligns_is_chosen_on_the_other_pairs(translation: ModuleType) -> None:
    right, wrong = {(0, 0)}, {(1, 0)}
    gold = GoldAlignments([right] * 4, [right] * 4)
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


def test_alignment_reads_the_row_that_predicts_a_word_or_takes_it_in(
    translation: ModuleType, captions: Path, aligned: Path
) -> None:
    corpus = translation.read_corpus(captions, "test_2016_flickr")
    pairs = translation.read_aligned_pairs(aligned).pairs
    found = translation.align(Diagonal(), corpus.tokenizer, pairs)
    words = range(5)
    for kind in ("weights", "norms"):
        assert found[kind, "AWO", 1] == [{(word, word) for word in words}] * len(pairs)
        # one row later, to the source word after, and after the last word to the sentence's end
        assert found[kind, "AWI", 1] == [{(word + 1, word) for word in words[:-1]}] * len(pairs)


def test_batches_hold_every_pair_once_and_no_more_than_their_budget(
    translation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel_text.BATCH_TOKENS", 1000)
    lengths = np.random.RandomState(0).randint(2, 60, 500)
    pairs = [translation.Numbers([9] * n, [9] * (n // 2 + 1)) for n in lengths]
    batches = list(translation.batches(pairs, translation.by_length(pairs, range(500))))
    assert sorted(i for batch in batches for i in batch) == list(range(500))
    padded = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
    assert max(padded) <= 1000
    assert sum(lengths) > 0.8 * sum(padded)
    assert math.isclose(translation.rate(translation.WARM_UP), 1)


@pytest.mark.parametrize("name", ["initial_width.py", "evaluation_noise.py"])
def test_the_comparisons_run(source_tree: Path, tmp_path: Path, name: str) -> None:
    sizes = ["--heads", "1", "--head-dims", "8"] if name == "initial_width.py" else []
    result = run(source_tree, name, "--quick", *sizes, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "nan" not in result.stdout


@pytest.fixture
def everything(source_tree: Path, tmp_path: Path) -> ModuleType:
    """The program that runs all experiments; ``tmp_path / "data"`` holds what it looks for."""
    program = import_program(source_tree / "experiments/everything.py")
    for number, marker in enumerate((*program.MARKERS.values(), "alignment.talp")):
        (tmp_path / f"data/{number}").mkdir(parents=True)
        (tmp_path / f"data/{number}" / marker).touch()
    return program


def test_everything_is_called_with_options_that_there_are(
    source_tree: Path, tmp_path: Path, everything: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options are parsed alone; each program's own --quick runs in a test of its own."""
    (tmp_path / "out").mkdir()
    names = [planned.name for planned in everything.PLAN]
    assert len(set(names)) == len(names)
    for planned in (*everything.PLAN, *everything.QUICK):
        command = everything.command_of(planned, tmp_path / "data", tmp_path / "out")
        monkeypatch.setattr("sys.argv", command[1:])
        options = import_program(Path(command[1])).parse_options()
        marker = everything.MARKERS[planned.program]
        assert (options.data / marker).exists()


def test_everything_keeps_what_has_been_run(
    tmp_path: Path,
    everything: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs = {"good": "print('a result')", "bad": "raise SystemExit(3)"}
    monkeypatch.setattr(
        everything, "command_of", lambda run, data, out: [sys.executable, "-c", programs[run.name]]
    )
    good, bad = (everything.Run(name, "regression", ()) for name in programs)
    assert everything.execute(good, tmp_path, tmp_path)
    result, took = (tmp_path / "good.log").read_text().splitlines()
    assert result == "a result"
    assert took.endswith("0.0 of a core")
    assert everything.execute(good, tmp_path, tmp_path)
    assert "kept" in capsys.readouterr().out
    assert not everything.execute(bad, tmp_path, tmp_path)
    assert "failed" in capsys.readouterr().out
    assert not (tmp_path / "bad.log").exists()


def test_everything_follows_links_and_survives_a_bad_log(
    tmp_path: Path, everything: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links/there").symlink_to(tmp_path / "data")
    assert everything.folder_of(tmp_path / "links", "alignment.talp").is_dir()
    (tmp_path / "a.log.partial").mkdir()
    assert not everything.attempt(everything.Run("a", "regression", ()), tmp_path, tmp_path)
    assert "a.log.partial" in capsys.readouterr().out


def test_everything_names_the_data_that_are_missing(source_tree: Path, tmp_path: Path) -> None:
    result = run(source_tree, "everything.py", "--data", tmp_path, "--out", "out", cwd=tmp_path)
    assert result.returncode == 2
    assert f"{tmp_path} holds no train.lc.norm.tok.de" in result.stderr
    assert not (tmp_path / "out").exists()
