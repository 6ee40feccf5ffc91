"""The callbacks of docs/guide/comparing.md log a probe, and training gives the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn

DRIFT = "ikattn/layer.1/summed/drift"


def callback_of(source_tree: Path, library: str, names: dict[str, Any]) -> Any:
    """The page's callback, for every second step."""
    text = (source_tree / "docs" / "guide" / "comparing.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (block,) = [block for block in blocks if f"import {library}" in block]
    exec(block.replace("100", "2"), names)
    return names["Watch"]()


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("is_bf16", [False, True])
def test_a_trainer_logs_drift_and_trains_to_the_same_bits(source_tree, tmp_path, is_bf16):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    def trained(watched: bool) -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
        config = transformers.BertConfig(**sizes, intermediate_size=32, vocab_size=20)
        model = transformers.BertForSequenceClassification(config)
        ids = torch.randint(20, (16, 6))
        texts = [{"input_ids": row, "labels": torch.tensor(i % 2)} for i, row in enumerate(ids)]
        options = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=5, learning_rate=0.01, bf16=is_bf16, **options
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=texts)
        if watched:
            probe = ikattn.explain.MapProbe({"input_ids": torch.tensor([[3, 4, 5]])})
            names = {"probe": probe, "trainer": trainer}
            trainer.add_callback(callback_of(source_tree, "transformers", names))
        trainer.train()
        return trainer

    watched = trained(True)
    assert_same_bits(watched.model, trained(False).model)
    found = {x["step"]: x[DRIFT] for x in watched.state.log_history if DRIFT in x}
    assert list(found) == [2, 4]
    assert found[2] == 0 < found[4]


@pytest.mark.filterwarnings("ignore")  # Lightning's, of workers and folders
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_logs_drift_and_trains_to_the_same_bits(source_tree, tmp_path, precision):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    loggers = pytest.importorskip("lightning.pytorch.loggers")

    class Regressor(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            ikattn.convert(self.encoder, num_frequencies=6, seed=0)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x).mean(1)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def trained(**options: Any) -> Any:
        model = Regressor()
        x = torch.randn(24, 5, 16, generator=torch.Generator().manual_seed(1))
        quiet = {"enable_progress_bar": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", precision=precision, **quiet, **options
        )
        trainer.fit(model, torch.utils.data.DataLoader(x, batch_size=4))
        return model

    probe = ikattn.explain.MapProbe(torch.randn(2, 5, 16))
    watch = callback_of(source_tree, "lightning", {"probe": probe})
    logger = loggers.CSVLogger(tmp_path, version=0)
    watched = trained(callbacks=[watch], logger=logger)
    assert_same_bits(watched, trained(logger=False))
    logged = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    assert DRIFT in logged[0].split(",")
    assert len(logged) == 1 + 3
