"""The programs of two processes in the tests of transformers' tensor parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ikattn
from ikattn.integrations.transformers import decoding_cache, from_pretrained
from ikattn.parallel import tensor_parallel_plan
from ikattn.spectral import Generator
from processes import messages_of, whole

LLAMA = transformers.AutoModelForCausalLM
TOKENS = torch.tensor([[1, 5, 7, 9, 3], [2, 2, 8, 4, 6]])
KERNELS = {"direct": {}, "ikan": {"spectral": "ikan"}, "stationary": {"stationary": True}}


def make_model(key_heads: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_heads}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).double()


def save_models(folder: Path) -> None:
    """The checkpoints that the processes load."""
    for name, options in KERNELS.items():
        model = ikattn.convert(make_model(), num_frequencies=6, seed=1, **options)
        model.save_pretrained(folder / name)
    ikattn.convert(make_model(1), num_frequencies=6).save_pretrained(folder / "one key")
    make_model().save_pretrained(folder / "softmax")


def evaluate(model: Any) -> dict[str, Tensor]:
    """Logits, gradients, and tokens that are generated with and without kept features."""
    torch.manual_seed(3)
    output = model.train()(TOKENS, labels=TOKENS)
    loss = output.loss
    if any(isinstance(module, Generator) for module in model.modules()):
        loss = loss + ikattn.regularization_loss(model) / 10
    loss.backward()
    found = {"logits": output.logits.detach(), "loss": loss.detach()}
    found |= {f"gradient of {name}": whole(w.grad) for name, w in model.named_parameters()}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found["tokens"] = model.eval().generate(TOKENS, **options)
    kept = model.generate(TOKENS, past_key_values=decoding_cache(model, "features"), **options)
    assert torch.equal(kept, found["tokens"])
    return found


def run(folder: Path) -> dict[str, Any]:
    """All of it in one start of processes, which takes most of the time."""
    warnings.simplefilter("ignore")  # of transformers, which renames the argument
    plan: dict[str, Any] = {"tp_plan": "auto", "tp_size": 2}
    found: dict[str, Any] = {}
    for name in KERNELS:
        model = from_pretrained(LLAMA, folder / name, **plan)
        found[name] = evaluate(model)
        if name == "direct":
            found["local"] = model.model.layers[0].self_attn.spectral.w1.to_local().detach()
            model.save_pretrained(folder / "again")
    found["changed when loaded"] = _change_loaded(folder, plan)
    found["by torch"] = evaluate(_shared_by_torch(folder))
    found["bert"] = evaluate_bert(_share_bert(use_mikan(make_bert())))
    found["dropout"] = _drop(folder, plan)
    found["errors"] = _errors(folder, plan)
    return found


def _change_loaded(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Ranks that draw different frequencies take the first one's."""
    model = LLAMA.from_pretrained(folder / "softmax", **plan)
    torch.manual_seed(10 + dist.get_rank())
    ikattn.convert(model, num_frequencies=6)
    state = {name: whole(w.detach()) for name, w in model.named_parameters()}
    return {"state": state, "logits": model(TOKENS).logits.detach()}


def _shared_by_torch(folder: Path, projections: str = "qkv") -> nn.Module:
    model: nn.Module = from_pretrained(LLAMA, folder / "direct")
    plan = tensor_parallel_plan(model)
    for name in projections:
        plan[f"model.layers.*.self_attn.{name}_proj"] = ColwiseParallel()
    plan["model.layers.*.self_attn.o_proj"] = RowwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def make_bert() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 20}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **dropout, num_attention_heads=4)
    return transformers.BertModel(config, add_pooling_layer=False).double()


def use_mikan(model: Any) -> Any:
    return ikattn.convert(model, num_frequencies=6, seed=1, spectral="mikan")


def evaluate_bert(model: Any) -> dict[str, Tensor]:
    """The output, and gradients, where keys are averaged without padding."""
    torch.manual_seed(3)
    output = model(TOKENS, attention_mask=torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]))[0]
    loss = (output * torch.linspace(0, 1, 32)).sum() + ikattn.regularization_loss(model) / 10
    loss.backward()
    found = {f"gradient of {name}": whole(w.grad) for name, w in model.named_parameters()}
    return {"output": output.detach(), "loss": loss.detach()} | found


def _share_bert(model: nn.Module) -> nn.Module:
    plan = tensor_parallel_plan(model)
    for name in ("query", "key", "value"):
        plan[f"encoder.layer.*.attention.self.{name}"] = ColwiseParallel()
    plan["encoder.layer.*.attention.output.dense"] = RowwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def _drop(folder: Path, plan: dict[str, Any]) -> Tensor:
    """Weights of this rank's heads, [B, H / 2, L, L], where dropout is all that differs."""
    model = from_pretrained(LLAMA, folder / "direct", **plan).train()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(2)
    tokens = torch.arange(128).view(2, 64) % 20
    weights: Tensor = model(tokens, output_attentions=True).attentions[0].detach()
    return weights


def _errors(folder: Path, plan: dict[str, Any]) -> dict[str, str]:
    """The message of each call that must be refused, without a hang."""
    own = transformers.LlamaConfig.base_model_tp_plan
    override = {f"model.{name}": style for name, style in own.items()}
    override |= {"model.layers.*.self_attn.spectral": "replicated_with_grad_allreduce"}
    config = transformers.distributed.DistributedConfig(tp_plan=override, tp_size=2)
    calls: dict[str, Callable[[], Any]] = {
        "whole kernels": lambda: from_pretrained(
            LLAMA, folder / "direct", distributed_config=config
        )(TOKENS),
        "whole generators": lambda: from_pretrained(
            LLAMA, folder / "ikan", distributed_config=config
        )(TOKENS),
        "key heads": lambda: from_pretrained(LLAMA, folder / "one key", **plan),
        "keys of all": lambda: _shared_by_torch(folder, "q")(TOKENS),
        "wrapped": lambda: ikattn.convert(fully_shard(make_model())),
        "without kernels": lambda: LLAMA.from_pretrained(folder / "direct", **plan)(TOKENS),
    }
    return messages_of(calls)
