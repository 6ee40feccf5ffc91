"""Opacus trains converted models: the gradient of each sample is the one it has alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close
from ikattn.integrations.opacus import prepare, restore

opacus = pytest.importorskip("opacus", reason="opacus is not installed")
from opacus.validators import ModuleValidator  # noqa: E402

N, L, E, H = 5, 4, 12, 2
TOLERANCE = 1e-11  # all of it in float64

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without bias": {"bias": False},
    "other sizes of key and value": {"kdim": 7, "vdim": 8},
    "appended keys": {"add_bias_kv": True, "add_zero_attn": True},
    "stationary": {"stationary": True, "p": None},
    "dot": {"kernel": "dot"},
    "rbf": {"kernel": "rbf", "p": 3.0},
    "sequence first": {"batch_first": False},
}

pytestmark = [
    pytest.mark.usefixtures("float64_by_default"),
    # Opacus hooks modules, such as ours and embeddings, whose inputs have no gradient
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


class Attention(nn.Module):
    """Cross-attention that passes masks by keyword, as most code does."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"num_frequencies": 5, "batch_first": True} | options
        self.attention = ikattn.MultiheadAttention(E, H, **options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.5, 0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        causal = torch.ones(query.size(-2), key.size(-2)).triu(1).bool()
        if not self.attention.batch_first:
            causal = torch.ones(query.size(0), key.size(0)).triu(1).bool()
        output, weights = self.attention(
            query, key, value, key_padding_mask=padding, attn_mask=causal, need_weights=True
        )
        assert weights is not None
        return output


def inputs_of(model: Attention) -> list[Tensor]:
    module, S = model.attention, L + 2
    padding = torch.arange(S).expand(N, S) >= torch.tensor([6, 5, 3, 1, 6])[:, None]
    sizes = ((L, E), (S, module.kdim), (S, module.vdim))
    inputs = [torch.randn(N, *size) for size in sizes]
    if not module.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    return [*inputs, padding]


def one_by_one(
    model: nn.Module, loss: Callable[..., Tensor], samples: list[list[Tensor]]
) -> dict[str, Tensor]:
    """The gradients of each sample alone, [N, *shape]."""
    parameters = {name: w for name, w in model.named_parameters() if w.requires_grad}
    found = [torch.autograd.grad(loss(*sample), list(parameters.values())) for sample in samples]
    return {
        name: torch.stack(gradients)
        for name, gradients in zip(parameters, zip(*found, strict=True), strict=True)
    }


def of_samples(model: nn.Module) -> dict[str, Tensor]:
    """Opacus' gradients of each sample, by the names that parameters have in a state dict."""
    by_parameter = {w: name for name, w in model.state_dict(keep_vars=True).items()}
    return {by_parameter[w]: w.grad_sample for w in model.parameters() if w.requires_grad}


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_of_samples_are_those_of_a_loop(options: str) -> None:
    model = Attention(**OPTIONS[options])
    *inputs, padding = inputs_of(model)
    batch_axis = 0 if model.attention.batch_first else 1

    def loss(*sample: Tensor) -> Tensor:
        return model(*sample).pow(2).sum()

    split = [x.split(1, batch_axis) for x in inputs]
    samples = [list(sample) for sample in zip(*split, padding.split(1), strict=True)]
    expected = one_by_one(model, loss, samples)

    prepare(model, batch_first=model.attention.batch_first)
    hooked = opacus.GradSampleModule(
        model, batch_first=model.attention.batch_first, loss_reduction="sum"
    )
    hooked(*inputs, padding).pow(2).sum().backward()
    found = of_samples(model)
    assert found.keys() == expected.keys()
    for name in expected:
        assert expected[name].any()
        assert_close(found[name], expected[name], TOLERANCE, name)
    for parameter in model.parameters():
        assert_close(parameter.grad, parameter.grad_sample.sum(0), TOLERANCE)


def test_models_of_transformers_have_them_too() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import ikattn

    sizes = {"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 2, "vocab_size": 20}
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
    config = transformers.BertConfig(**sizes, **options, intermediate_size=16)
    model = ikattn.convert(transformers.BertModel(config), num_frequencies=4).train()
    model.embeddings.requires_grad_(False)  # positions are no batch, which Opacus does not support
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]])

    def loss(tokens: Tensor, module: nn.Module = model) -> Tensor:
        found = module(tokens, attention_mask=(tokens != 0).long())
        return found.pooler_output.pow(2).sum()

    expected = one_by_one(model, loss, [[row] for row in tokens.split(1)])
    hooked = opacus.GradSampleModule(prepare(model), loss_reduction="sum")
    loss(tokens, hooked).backward()
    found = of_samples(model)
    assert found.keys() == expected.keys()
    assert sum("spectral" in name for name in found) == 4
    for name in expected:
        assert_close(found[name], expected[name], TOLERANCE, name)
    restore(model)
    with torch.no_grad():
        assert type(model.encoder.layer[0].attention.self.spectral).__name__ == "ImplicitKernel"
        model(tokens)


def test_preparing_changes_no_output_no_parameter_and_no_checkpoint() -> None:
    model = Attention(add_bias_kv=True)
    inputs, plain = inputs_of(model), copy.deepcopy(model)
    parameters = list(model.parameters())
    expected = model(*inputs)
    prepare(model)
    assert ikattn.MultiheadAttention in type(model.attention).__mro__
    assert_close(model(*inputs), expected, TOLERANCE)
    assert torch.equal(model.eval()(*inputs), expected)
    assert {*model.parameters()} == {*parameters}
    state = plain.state_dict()
    assert sorted(model.state_dict()) == sorted(state)
    model.load_state_dict({name: w + 1 for name, w in state.items()})
    assert all(torch.equal(w, state[name] + 1) for name, w in model.state_dict().items())

    restore(model)
    assert type(model.attention) is ikattn.MultiheadAttention
    assert [*map(id, model.parameters())] == [*map(id, parameters)]
    assert [*model.state_dict()] == [*state]
    assert not any("per_sample" in name for name, _ in model.named_modules())


def test_preparing_twice_is_preparing_once() -> None:
    model = prepare(Attention())
    names = [name for name, _ in prepare(model).named_parameters()]
    assert len(names) == len(set(names)) == 6
    restore(model)
    assert type(model.attention.spectral) is ikattn.spectral.Direct


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_dp_sgd_trains_a_converted_model(clipping: str) -> None:
    torch.set_default_dtype(torch.float32)  # of Opacus' noise
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.1, batch_first=True)
    model = nn.Sequential(ikattn.convert(nn.TransformerEncoder(layer, 1), seed=0), nn.Linear(E, 2))
    assert ModuleValidator.is_valid(prepare(model).train())
    x = torch.randn(64, L, E)
    y = (x.mean(1)[:, 0] > 0).long()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    before = copy.deepcopy(model.state_dict())
    private, optimiser, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        data_loader=data,
        noise_multiplier=0.3,
        max_grad_norm=[1.0] * len(list(model.parameters())) if clipping == "per_layer" else 1.0,
        clipping=clipping,
    )

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(private(x).mean(1), y)

    with torch.no_grad():
        first = loss(x, y).item()
    for _ in range(12):
        for batch in loader:
            optimiser.zero_grad()
            loss(*batch).backward()
            optimiser.step()
    with torch.no_grad():
        last = loss(x, y).item()
    assert last < 0.8 * first
    changed = {name for name, w in model.state_dict().items() if (w != before[name]).any()}
    assert changed == before.keys()
    assert all("grad_sample" not in name for name in changed)


def test_ghost_clipping_gives_the_clipped_sum_of_the_gradients_of_samples() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        ikattn.convert(layer, num_frequencies=4), nn.Flatten(), nn.Linear(L * E, 2)
    )
    x, y, largest = torch.randn(N, L, E), torch.arange(N) % 2, 0.1
    entropy = nn.CrossEntropyLoss()
    samples = [list(sample) for sample in zip(x.split(1), y.split(1), strict=True)]
    alone = one_by_one(model, lambda x, y: entropy(model(x), y), samples)
    sizes = torch.stack([g.flatten(1).square().sum(1) for g in alone.values()]).sum(0).sqrt()
    factors = (largest / (sizes + 1e-6)).clamp_max(1)
    assert (factors < 1).any()

    private, optimiser, criterion, _ = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=prepare(model),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), N),
        criterion=entropy,
        noise_multiplier=0.0,
        max_grad_norm=largest,
        grad_sample_mode="ghost",
        poisson_sampling=False,
    )
    optimiser.zero_grad()
    criterion(private(x), y).backward()
    for name, parameter in model.state_dict(keep_vars=True).items():
        expected = torch.einsum("n,n...->...", factors, alone[name])
        assert_close(parameter.grad, expected, 1e-7, name)


# --- Errors


def test_a_module_with_the_batch_elsewhere_is_an_error() -> None:
    model = Attention(batch_first=False)
    with pytest.raises(ValueError, match="expected attention with batch_first=True"):
        prepare(model)
    assert type(model.attention) is ikattn.MultiheadAttention


def test_frequencies_that_are_generated_are_refused_by_name() -> None:
    class Generated(nn.Module):
        def forward(self, *_: Any) -> Any: ...

    class Changed(ikattn.spectral.Direct):
        def forward(self, *_: Any) -> Any: ...

    for source in (Generated(), Changed(H, E // H, 4)):
        model = Attention(spectral=source)
        with pytest.raises(
            ValueError, match=rf"spectral\.Direct, got spectral = {type(source).__name__}"
        ):
            prepare(model)
        assert type(model.attention) is ikattn.MultiheadAttention


def test_unbatched_input_is_refused() -> None:
    model = prepare(Attention())
    x = torch.randn(L, E)
    with pytest.raises(ValueError, match="expected a batch"):
        model.attention(x, x, x)
