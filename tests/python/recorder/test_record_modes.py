"""Recordings leave the modes and the graph of a model alone, and give its maps in each of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from hand_written_blocks import Block

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block()).eval()


class LowRank(nn.Module):
    """An out-projection with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class OwnProduct(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def hooked() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.register_forward_hook(lambda module, args, out: 2 * out)
    return layer


def summed(model: nn.Module, call: Callable[[], Any]) -> list[Tensor]:
    with ikattn.record(model, "summed") as recording:
        call()
    assert len(recording.batches) == 1
    maps = [recording[name].summed for name in recording.names]
    return [each for each in maps if each is not None]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [encoder, blocks])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_maps_are_the_same_in_every_grad_mode(make: Any, mode: Any) -> None:
    model = make()
    expected = summed(model, lambda: model(X))
    with mode():
        found = summed(model, lambda: model(X))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [LowRank, lambda: OwnProduct(16, 16), hooked, None])
def test_autocast_gives_the_maps_of_its_type(dtype: torch.dtype, out: Any) -> None:
    model = blocks()
    if out is not None:
        for block in model:
            block.attn.proj = out()
    expected = summed(model, lambda: model(X))
    with torch.autocast("cpu", dtype):
        found = summed(model, lambda: model(X))
    for one, two in zip(found, expected, strict=True):
        assert (one - two).abs().max() < 0.03 * two.max()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("detach", [True, False])
def test_a_checkpointed_and_padded_step_has_the_gradients_of_the_plain_one(
    use_reentrant: bool, detach: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=40)
    model = transformers.LlamaForCausalLM(config).train()
    options = {"use_reentrant": use_reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, attention_mask=(ids > 0).long(), labels=ids, use_cache=False)
        loss.loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = step()
    with ikattn.record(model, "summed", detach=detach) as recording:
        found = step()
    torch.testing.assert_close(found, expected)
    assert len(recording.batches) == 1


@pytest.mark.parametrize("make", [encoder, blocks])
def test_a_transform_of_torch_func_is_named(make: Any) -> None:
    model = make()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (X,)).sum()

    own = dict(model.named_parameters())
    for call in (lambda: torch.func.grad(loss)(own), lambda: torch.vmap(model)(X[None])):
        with ikattn.record(model), pytest.raises(NotImplementedError, match=r"torch\.func"):
            call()
    summed(model, lambda: model(X))  # and nothing of them is left behind


@pytest.mark.parametrize("make", [encoder, blocks])
@pytest.mark.parametrize("warm", [False, True])
def test_a_compiled_model_is_recorded_by_its_original(make: Any, warm: bool) -> None:
    torch._dynamo.reset()
    model = make()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        if warm:
            compiled(X)
        expected = summed(model, lambda: model(X))
        for recorded in (model, compiled):
            found = summed(recorded, lambda: compiled(X))
            torch.testing.assert_close(found, expected)
        found = summed(model, lambda: torch.compile(model, backend="eager")(X))
        torch.testing.assert_close(found, expected)


def test_the_first_compilation_of_a_process_within_the_block_is_refused() -> None:
    code = (
        "import torch, ikattn\n"
        "model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, 8)).eval()\n"
        "with ikattn.record(model):\n"
        "    torch.compile(model, backend='eager')(torch.randn(2, 3, 8))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "call torch.compile before the block" in done.stderr


def test_compiled_code_is_off_until_the_last_of_overlapping_recordings_ends() -> None:
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    assert compiled(X)
    first, second = encoder(), encoder()
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with ikattn.record(second):
            inside.set()
            over.wait(20)

    thread = threading.Thread(target=other)
    with ikattn.record(first):
        thread.start()
        assert inside.wait(20)
    assert not compiled(X)
    over.set()
    thread.join()
    assert compiled(X)


def test_an_interrupt_leaves_no_mode_behind() -> None:
    model = blocks()

    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    handle = model[1].attn.proj.register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt), ikattn.record(model):
        model(X)
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.is_grad_enabled()
    handle.remove()
    summed(model, lambda: model(X))


def test_nested_recordings_leave_no_mode_behind() -> None:
    model = blocks()
    with ikattn.record(model) as outer:
        with ikattn.record(model) as inner:
            model(X)
            assert not torch.overrides._get_current_function_mode_stack()
        model(X)
    assert (len(outer.batches), len(inner.batches)) == (2, 1)
    assert not torch.overrides._get_current_function_mode_stack()
