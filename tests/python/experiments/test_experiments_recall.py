"""experiments/recall.py, run as its readers run it, and the models it compares."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiment_programs import load, ran, rows_of
from recall_protocol import KEYS, Setting, Stage, Training, draw, draw_batch, random_recall
from sequence_models import Kernel, SequenceModel, state_size

KERNELS = [
    Kernel("softmax"),
    Kernel("implicit", 4),
    Kernel("implicit", 4, "none", width=0),
    Kernel("implicit", 4, "1.5"),
    Kernel("rbf"),
    Kernel("elu"),
    Kernel("elu", features=10),
    Kernel("taylor"),
    Kernel("taylor", features=6),
]
SIZES = {"vocabulary": 11, "outputs": 5, "size": 16, "heads": 2}
recall = load("recall")


@pytest.mark.full
def test_every_attention_runs(tmp_path: Path) -> None:
    ran("recall", "--quick", "--csv", "a.csv", "--plot", "a.png", cwd=tmp_path)
    runs = rows_of(tmp_path / "a.csv")
    assert {row["attention"] for row in runs} == set(recall.ATTENTIONS)
    assert {row["moment"] for row in runs} == {"validation", "equal steps", "equal time"}
    of_steps = [row for row in runs if row["moment"] == "equal steps"]
    assert {(row["length"], row["pairs"]) for row in of_steps} == {
        (str(length), str(pairs))
        for length in (64, 128)
        for pairs in (4, 8, 16, 32)
        if 4 * pairs <= length
    }


def test_options_that_are_several_are_all_run_and_told(tmp_path, monkeypatch, capsys):
    options = "--quick --attention implicit-8 taylor --stages 1 --rates 1e-3 1e-2 --widths 0 2"
    options += f" --kernel-rates 0 1 --csv {tmp_path / 'a.csv'}"
    monkeypatch.setattr(sys, "argv", ["recall.py", *options.split()])
    monkeypatch.setattr(recall, "QUICK", (Stage((64,), 64, 1),))
    recall.main()
    told = capsys.readouterr().out
    assert told.count("rate 0.001, width 2, kernels x 0 ") == 1
    rows = rows_of(tmp_path / "a.csv")
    tried = [row for row in rows if row["moment"] == "validation"]
    assert len(tried) == len({tuple(row.values())[:5] for row in tried}) == 2 * 2 * 2 + 2
    assert told.count("validation") == len(tried)
    chosen = [row for row in rows if row["moment"] != "validation"]
    assert {row["moment"] for row in chosen} == {"equal steps"}  # no softmax, no time of its
    assert len({tuple(row.values())[:5] for row in chosen}) == 2
    for name in ("implicit-8", "taylor"):
        own = (row for row in tried if row["attention"] == name)
        best = max(own, key=lambda row: float(row["accuracy"]))
        assert tuple(best.values())[:5] in {tuple(row.values())[:5] for row in chosen}


def test_every_query_has_one_answer() -> None:
    examples = draw(5, 64, 16, torch.Generator().manual_seed(0))
    for tokens, places, answers in zip(*(part.tolist() for part in examples), strict=True):
        keys, values = tokens[0:32:2], tokens[1:32:2]
        assert len(set(keys)) == 16
        assert max(keys) < KEYS <= min(values)
        pairs = dict(zip(keys, values, strict=True))
        assert sorted(tokens[place] for place in places) == sorted(keys)
        assert [pairs[tokens[place]] - KEYS for place in places] == answers
        elsewhere = set(range(32, 64)) - set(places)
        assert not {tokens[place] for place in elsewhere} & set(keys)


def test_a_kernel_that_has_learned_nothing_has_room_by_its_entries() -> None:
    found = [random_recall(m, 64, 3.0, repeats=2) for m in (2, 8, 32)]
    assert found[0] < 0.5 < 0.8 < found[1] < found[2] == 1


def test_a_model_learns_to_recall() -> None:
    setting = Setting("implicit-8", Kernel("implicit", 8, "none"), 64, 3e-3, 0.1, 0)
    training, generator = Training(setting), torch.Generator().manual_seed(0)
    batch = draw_batch(Stage((64,), 256, 0), generator)
    losses = [training.step(batch) for _ in range(30)]
    assert losses[0] > 0.9 * math.log(256)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("positions", ["none", "learned", "rotary"])
def test_hidden_tokens_change_nothing_and_the_future_is_not_seen(kernel, positions):
    torch.manual_seed(0)
    tokens = torch.randint(11, (2, 9))
    hidden = torch.arange(9).ge(6).expand(2, -1)
    for causal in (False, True):
        options = {"positions": positions, "longest": 9, "convolution": True}
        model = SequenceModel(**SIZES, kernel=kernel, causal=causal, **options)
        found = model(tokens, hidden)[:, :6]
        torch.testing.assert_close(found, model(tokens[:, :6]), rtol=1e-4, atol=1e-5)
        if causal:
            torch.testing.assert_close(found, model(tokens)[:, :6], rtol=1e-4, atol=1e-5)


def test_a_pooled_model_averages_the_tokens_that_are_there() -> None:
    model = SequenceModel(**SIZES, kernel=Kernel("softmax"), pooled=True, dropout=0.1).eval()
    tokens, hidden = torch.randint(11, (2, 9)), torch.arange(9).ge(6).expand(2, -1)
    torch.testing.assert_close(model(tokens, hidden), model(tokens[:, :6]))


def attention_of(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the attention of a model of queries, keys and values [B, H, N, d]."""
    block = SequenceModel(**SIZES, kernel=kernel).blocks[0]
    output: Tensor = block.attention._attend(q, k, v, None)
    return output


def test_linear_attentions_and_rbf_are_what_their_names_say() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    x = q @ k.mT / math.sqrt(8)
    elu = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    distances = torch.cdist(q, k).square() / (2 * math.sqrt(8))
    weights = {"taylor": 1 + x + x * x / 2, "elu": elu, "rbf": (-distances).exp()}
    for kind, weight in weights.items():
        found = attention_of(Kernel(kind, features=8), q, k, v)  # type: ignore[arg-type]
        expected = weight / weight.sum(-1, keepdim=True) @ v
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_states_are_counted() -> None:
    assert state_size(Kernel("softmax"), 64, 100) == 100 * 128
    assert state_size(Kernel("rbf"), 64, 100) == 100 * 128
    assert state_size(Kernel("elu"), 64, 100) == 64 * 65
    assert state_size(Kernel("taylor"), 64, 100) == (1 + 16 + 16 * 17 // 2) * 65
    assert state_size(Kernel("taylor", features=31), 64, 100) == 32 * 33 // 2 * 65
    assert state_size(Kernel("implicit", 16), 64, 100) == (32 * 33 // 2 + 1) * 65


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="size must be a multiple of heads, 3, got 16"):
        SequenceModel(**{**SIZES, "heads": 3}, kernel=Kernel("elu"))
    with pytest.raises(ValueError, match="rotary positions need an even size, got 7"):
        SequenceModel(**SIZES, kernel=Kernel("taylor", features=7), positions="rotary")
    with pytest.raises(ValueError, match=r"kernel\.kind must be one of .*, got 'dot'"):
        SequenceModel(**SIZES, kernel=Kernel("dot"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"positions must be one of .*, got 'sine'"):
        SequenceModel(**SIZES, kernel=Kernel("elu"), positions="sine")  # type: ignore[arg-type]
    model = SequenceModel(**SIZES, kernel=Kernel("elu"), positions="learned", longest=4)
    with pytest.raises(ValueError, match="tokens must be at most 4 long, got 5"):
        model(torch.zeros(1, 5, dtype=torch.long))
