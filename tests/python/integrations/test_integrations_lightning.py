"""Lightning trains, checkpoints and resumes converted models, in bfloat16 too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ikattn
from agreement import assert_close

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

BATCHES, N, L, E, H, M = 6, 8, 5, 16, 4, 6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message="Checkpoint directory")
        yield


class Classifier(lightning.LightningModule):
    """Tells whether the first feature's mean is positive."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(E, H, 32, dropout=dropout, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.encoder = ikattn.convert(encoder, num_frequencies=M, seed=seed)
        self.head = nn.Linear(E, 2)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * N, L, E, generator=generator)
    return DataLoader(TensorDataset(x, (x.mean(1)[:, 0] > 0).long()), batch_size=N)


def fit(model: Any, folder: Path, resume: Path | None = None, **options: Any) -> Any:
    options = {"accelerator": "cpu", "devices": 1, "logger": False} | options
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(default_root_dir=folder, **options)
    trainer.fit(model, batches(), ckpt_path=resume)
    return trainer


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = Classifier()
    before = {name: w.clone() for name, w in whole.state_dict().items()}
    fit(whole, tmp_path, max_epochs=2, enable_checkpointing=False)
    assert all((w != before[name]).any() for name, w in whole.state_dict().items())

    path = tmp_path / "half.ckpt"
    fit(Classifier(), tmp_path, max_epochs=1).save_checkpoint(path)
    resumed = Classifier(seed=1)
    fit(resumed, tmp_path, resume=path, max_epochs=2, enable_checkpointing=False)
    assert len(resumed.losses) == BATCHES  # of the second epoch
    for name, w in whole.state_dict().items():
        assert_close(resumed.state_dict()[name], w, 1e-6, name)


def test_a_checkpoint_loads_into_a_new_model(tmp_path: Path) -> None:
    model = Classifier(dropout=0.2)
    path = tmp_path / "model.ckpt"
    fit(model, tmp_path, max_steps=2).save_checkpoint(path)
    loaded = Classifier.load_from_checkpoint(path, seed=7)
    assert loaded.hparams["dropout"] == 0.2
    x = torch.randn(2, L, E)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), model.eval()(x))


@pytest.mark.parametrize(
    ("precision", "kept", "least"),
    [("bf16-mixed", torch.float32, 0.7), ("bf16-true", torch.bfloat16, 0.8)],
)
def test_bfloat16_trains(tmp_path: Path, precision: Any, kept: torch.dtype, least: float) -> None:
    model = Classifier()
    attention = model.encoder.layers[0].self_attn
    seen: list[torch.dtype] = []
    attention.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    before = attention.spectral.w1.detach().clone()
    fit(model, tmp_path, max_epochs=8, precision=precision, enable_checkpointing=False)
    assert set(seen) == {torch.bfloat16}
    assert {w.dtype for w in model.parameters()} == {kept}
    assert (attention.spectral.w1 != before).any()
    assert sum(model.losses[-BATCHES:]) < least * sum(model.losses[:BATCHES])
