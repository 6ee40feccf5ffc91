"""Callbacks that log a probe: right steps and names, and training with the same bits as without."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from ikattn.explain import MapProbe

ENTROPY = "ikattn/layer.1/summed/entropy"
DRIFT = "ikattn/layer.1/summed/drift"


def drifts(history: list[dict[str, float]]) -> dict[float, float]:
    return {entry["step"]: entry[DRIFT] for entry in history if DRIFT in entry}


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


# --- transformers


def trained_bert(folder: Path, every: Any = ..., lora: Any = None, **options: Any) -> Any:
    """A trainer at its end; with ``every``, one that was watched."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from ikattn.integrations.transformers.callback import ProbeCallback

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=32, vocab_size=20)  # with dropout
    model = transformers.BertForSequenceClassification(config)
    if lora is not None:
        import peft

        model = peft.get_peft_model(model, lora)
    texts = [
        {"input_ids": torch.randint(20, (6,)), "labels": torch.tensor(i % 2)} for i in range(16)
    ]
    options = {"max_steps": 5, "logging_steps": 2, "learning_rate": 0.01} | options
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=texts, eval_dataset=texts)
    if every is not ...:
        inputs = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 0]])}
        inputs["attention_mask"] = (inputs["input_ids"] != 0).long()
        trainer.add_callback(ProbeCallback(trainer, MapProbe(inputs), every=every))
    trainer.train()
    return trainer


@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}])
def test_a_trainer_logs_drift_and_trains_to_the_same_bits(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    watched = trained_bert(tmp_path, every=2, **options)
    alone = trained_bert(tmp_path, **options)
    assert_same_bits(watched.model, alone.model)
    found = drifts(watched.state.log_history)
    assert list(found) == [0, 2, 4]
    assert found[0] == 0 < found[2] < found[4]
    losses = [[x["loss"] for x in t.state.log_history if "loss" in x] for t in (watched, alone)]
    assert losses[0] == losses[1] != []


@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_with_lora_logs_drift_and_trains_to_the_same_bits(
    tmp_path: Path, bf16: bool
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(target_modules=["query", "value", "dense"], init_lora_weights=False)
    watched, alone = (trained_bert(tmp_path, **x, lora=lora, bf16=bf16) for x in ({"every": 2}, {}))
    assert_same_bits(watched.model, alone.model)
    found = drifts(watched.state.log_history)
    assert list(found) == [0, 2, 4]
    assert found[0] == 0 < found[2] < found[4]


def test_a_trainer_logs_after_each_evaluation(tmp_path: Path) -> None:
    trainer = trained_bert(tmp_path, every=None, eval_strategy="steps", eval_steps=3, max_steps=6)
    assert list(drifts(trainer.state.log_history)) == [0, 3, 6]


def test_other_processes_of_a_trainer_do_not_probe() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from ikattn.integrations.transformers.callback import ProbeCallback

    def probe(model: nn.Module) -> dict[str, float]:
        raise AssertionError("probed")

    callback = ProbeCallback(SimpleNamespace(), probe)  # type: ignore[arg-type]
    callback.on_train_begin(None, SimpleNamespace(is_world_process_zero=False), None, model=None)


# --- Lightning

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from ikattn.integrations.lightning import ProbeCallback  # noqa: E402


class Regressor(lightning.LightningModule):
    """With dropout, a regulariser of generated frequencies, and a norm that counts."""

    def __init__(self, *, softmax: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        if not softmax:
            ikattn.convert(self.encoder, num_frequencies=6, seed=0, spectral="mikan")
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.encoder(x).mean(1))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch).square().mean() + ikattn.regularization_loss(self) / 100

    def validation_step(self, batch: Tensor, index: int) -> None:
        self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore")  # Lightning's, of workers and folders
def fit(folder: Path, *callbacks: Any, **options: Any) -> Regressor:
    model = Regressor(softmax=options.get("precision") == "bf16-true")
    x = torch.randn(24, 5, 16, generator=torch.Generator().manual_seed(1))
    batches = torch.utils.data.DataLoader(x, batch_size=4)
    options = {"max_epochs": 1, "accelerator": "cpu", "logger": False} | options
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = False
    trainer = lightning.Trainer(
        default_root_dir=folder, callbacks=list(callbacks), **options, **quiet
    )
    trainer.fit(model, batches, batches)
    return model


def probe() -> MapProbe:
    return MapProbe(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightning_logs_drift_and_trains_to_the_same_bits(tmp_path: Path, precision: Any) -> None:
    callback = ProbeCallback(probe(), every=2)
    logger = CSVLogger(tmp_path, version=0)
    watched = fit(tmp_path, callback, logger=logger, precision=precision)
    assert_same_bits(watched, fit(tmp_path, precision=precision))
    steps = [step for step, _ in callback.history]
    values = [found[DRIFT] for _, found in callback.history]
    assert steps == [0, 2, 4, 6]
    assert values[0] == 0 < values[1] < values[3]
    logged = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    assert DRIFT in logged[0].split(",")
    assert len(logged) == 1 + 4  # though log_every_n_steps is 50


@pytest.mark.filterwarnings("ignore")
def test_one_of_two_lightning_processes_probes(tmp_path: Path) -> None:
    processes = {"strategy": "ddp_fork", "devices": 2}
    logger = CSVLogger(tmp_path, version=0)
    watched = fit(tmp_path, ProbeCallback(probe(), every=1), logger=logger, **processes)
    assert_same_bits(watched, fit(tmp_path, **processes))
    logged = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    assert len(logged) == 1 + 4  # each process has half of six batches


@pytest.mark.filterwarnings("ignore")
def test_lightning_counts_steps_of_the_optimiser(tmp_path: Path) -> None:
    callback = ProbeCallback(probe(), every=1)
    fit(tmp_path, callback, accumulate_grad_batches=3)
    assert [step for step, _ in callback.history] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_after_each_validation(tmp_path: Path) -> None:
    callback = ProbeCallback(probe(), every=None)
    fit(tmp_path, callback, max_epochs=2, val_check_interval=3)
    assert [step for step, _ in callback.history] == [0, 3, 6, 9, 12]
    assert pickle.loads(pickle.dumps(callback)).history == callback.history


def test_every_must_be_a_step_or_more() -> None:
    with pytest.raises(ValueError, match="every must be 1 or more steps, got 0"):
        ProbeCallback(probe(), every=0)
