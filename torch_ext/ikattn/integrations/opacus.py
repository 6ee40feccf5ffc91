"""Opacus: differentially private training of models with implicit-kernel attention.

Opacus computes the gradient of every sample in hooks on modules, and its hooks see neither keyword
arguments nor parameters that a module shares among several operations. So ``prepare`` hands the
parameters of an attention module to small modules of one parameter each, ``PerSample``, which
return a copy of it for every sample, without memory of its own; the gradient that comes back has
one entry for each sample, and that is what Opacus asks for. The operator takes frequencies with a
batch axis, so the attention is computed as ever.

Sizes: N batch, L queries, S keys, E model size, H heads, d = E / H head size, M frequencies.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ikattn._optional import optional
from ikattn.nn.functional import ExtraKeys
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.nn.projection import Projection
from ikattn.spectral import Direct

__all__ = ["prepare", "restore"]

Model = TypeVar("Model", bound=nn.Module)


def prepare(model: Model, *, batch_first: bool = True) -> Model:
    """Makes a model with implicit-kernel attention one that Opacus can train; returns the model.

    Call it after ``ikattn.convert`` and before ``PrivacyEngine.make_private``. The parameters stay
    the same objects, outputs the same numbers and names in a state dict the same names. What Opacus
    itself does not support, ``opacus.validators.ModuleValidator`` tells.

    Args:
        model: Any module.
        batch_first: As for ``PrivacyEngine.make_private``: tensors are [N, L, E].

    Raises:
        ValueError: An attention module has another ``batch_first``, or other parameters than
            projections and frequencies of ``ikattn.spectral.Direct``; nothing has changed then.
        ImportError: Opacus is missing.

    Example:
        >>> import pytest, torch, ikattn
        >>> opacus = pytest.importorskip("opacus")
        >>> from ikattn.integrations.opacus import prepare
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> model = opacus.GradSampleModule(prepare(ikattn.convert(model)))
        >>> model(torch.randn(3, 5, 16)).sum().backward()
        >>> model.self_attn.spectral.w1.grad_sample.shape  # N, H * d * M
        torch.Size([3, 512])
    """
    grad_sample = optional("opacus.grad_sample", "prepare", "'ikattn[opacus]'")
    samplers = grad_sample.GradSampleModule.GRAD_SAMPLERS
    if PerSample not in samplers:
        grad_sample.register_grad_sampler(PerSample)(_gradient_of_each)
    if NonDynamicallyQuantizableLinear not in samplers:  # the class of out_proj: a Linear
        grad_sample.register_grad_sampler(NonDynamicallyQuantizableLinear)(samplers[nn.Linear])
    attention = [m for m in model.modules() if type(m) is MultiheadAttention]
    sources = [m for m in model.modules() if _is_plain(m)]
    for module in attention:
        if module.batch_first != batch_first:
            raise ValueError(
                f"prepare: expected attention with batch_first={batch_first}, as for the other "
                f"modules that Opacus hooks, got {module}"
            )
        for name, child in module.named_children():
            if name != "out_proj" and not _is_plain(child):
                raise ValueError(
                    "prepare: expected no parameters but projections and frequencies of "
                    f"ikattn.spectral.Direct, got {name} = {type(child).__name__}"
                )
    for source in sources:
        _move_parameters(source, PrivateDirect, batch_first)
    for module in attention:
        _move_parameters(module, PrivateMultiheadAttention, batch_first)
    return model


def restore(model: Model) -> Model:
    """Undoes ``prepare`` when the training is over, and returns the model.

    Args:
        model: What was prepared, without Opacus around it; parameters stay the same objects.

    Example:
        >>> import pytest, torch, ikattn
        >>> opacus = pytest.importorskip("opacus")
        >>> from ikattn.integrations.opacus import prepare, restore
        >>> type(restore(prepare(ikattn.MultiheadAttention(16, 4, batch_first=True)))).__name__
        'MultiheadAttention'
    """
    for module in list(model.modules()):
        if isinstance(module, _Private):
            values: dict[str, Any] = {n: held.value for n, held in module.per_sample.items()}
            del module.per_sample
            module.__class__ = module.__dict__.pop("_class_before")
            for name, value in values.items():
                module.register_parameter(name, value)
    return model


class PerSample(nn.Module):
    """A parameter, of which every sample gets a copy so that its gradient can be told apart.

    ``batch_first``: Opacus takes the first axis for the batch, otherwise the second.
    """

    def __init__(self, value: nn.Parameter, batch_first: bool) -> None:
        super().__init__()
        self.value = value
        self.batch_first = batch_first

    def forward(self, batch: Tensor) -> Tensor:
        """Returns the parameter as [N, *shape] or [1, N, *shape], for a tensor [N, 0] or [0, N].

        Opacus reads the size of the batch from the input, and where the batch is in the output.
        """
        sizes = (batch.size(0),) if self.batch_first else (1, batch.size(1))
        return self.value.expand(*sizes, *self.value.shape)


class _Private(nn.Module):
    """A module whose parameters are in ``per_sample``, but named in a state dict as before."""

    per_sample: nn.ModuleDict

    def __getattr__(self, name: str) -> Any:
        """Finds parameters in ``per_sample`` by the names that they had."""
        held = vars(self).get("_modules", {}).get("per_sample", {})
        return held[name].value if name in held else super().__getattr__(name)

    def _for_samples(self, name: str, batch_size: int) -> Tensor | None:
        """Returns the parameter of a name for each sample, [N, *shape]; None if there is none."""
        if name not in self.per_sample:
            return None
        held: Any = self.per_sample[name]
        sizes = (batch_size, 0) if held.batch_first else (0, batch_size)
        copies: Tensor = held(torch.empty(sizes))  # of the same memory
        return copies if held.batch_first else copies.squeeze(0)

    def _wants_samples(self) -> bool:
        """Whether Opacus' hooks look: exactly where they do, the gradient of each sample is due."""
        return self.training and torch.is_grad_enabled()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name in self.per_sample:
            found[prefix + name] = found.pop(f"{prefix}per_sample.{name}.value")
        return found

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in self.per_sample:
            if prefix + name in state_dict:
                state_dict[f"{prefix}per_sample.{name}.value"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class PrivateDirect(_Private, Direct):
    """Frequencies that are parameters, with a batch axis while Opacus looks."""

    def forward(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns w1 and w2 as [N, H, d, M], or as [H, d, M] where no gradient is due."""
        if not self._wants_samples():
            return self.frequencies()
        shape = (-1, self.num_heads, self.head_dim, self.num_frequencies)
        w1, w2 = (self._for_samples(name, query.size(0)) for name in ("w1", "w2"))
        assert w1 is not None
        return w1.view(shape), None if w2 is None else w2.view(shape)


class PrivateMultiheadAttention(_Private, MultiheadAttention):
    """Multi-head attention whose parameters Opacus can tell the gradients of."""

    def _projection(self) -> Projection:
        return self._project if self._wants_samples() else super()._projection()

    def _extra_keys(self, query: Tensor) -> ExtraKeys:
        if not self._wants_samples():
            return super()._extra_keys(query)
        if query.dim() != 3:
            raise ValueError(
                f"expected a batch, [N, L, E] or [L, N, E], got a query of {list(query.shape)}"
            )
        N = query.size(0 if self.batch_first else 1)
        biases = (self._for_samples(name, N) for name in ("bias_k", "bias_v"))  # [N, 1, 1, E]
        bias_k, bias_v = (None if bias is None else bias.squeeze(1) for bias in biases)
        return ExtraKeys(bias_k, bias_v, self.add_zero_attn)

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Makes queries [N, H, L, d], keys and values [N, H, S, d], each by weights of its own."""
        inputs = [query, key, value]
        if not batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        N = inputs[0].size(0)
        packed = self._for_samples("in_proj_weight", N)  # [N, 3 E, E]
        names = () if packed is not None else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        separate = [self._for_samples(name, N) for name in names]
        weights = separate if packed is None else packed.chunk(3, dim=1)
        bias = self._for_samples("in_proj_bias", N)  # [N, 3 E]
        biases = (None, None, None) if bias is None else bias.unsqueeze(1).chunk(3, dim=2)
        heads = []
        for x, weight, offset in zip(inputs, weights, biases, strict=True):
            assert weight is not None
            y = x @ weight.mT if offset is None else torch.baddbmm(offset, x, weight.mT)
            heads.append(y.unflatten(2, (self.num_heads, -1)).transpose(1, 2))
        q, k, v = heads
        return q, k, v


def _is_plain(module: nn.Module) -> bool:
    """Whether it gives its own parameters for frequencies, and nobody has changed how."""
    return isinstance(module, Direct) and type(module).forward is Direct.forward


def _move_parameters(module: Any, kind: type[_Private], batch_first: bool) -> None:
    """Hands a module's own parameters to ``PerSample`` modules and makes it one of that kind."""
    own = {name: w for name, w in module._parameters.items() if w is not None}
    for name in own:
        del module._parameters[name]
    module.__dict__["_class_before"] = type(module)
    module.__class__ = kind
    held = nn.ModuleDict({name: PerSample(w, batch_first) for name, w in own.items()})
    module.register_module("per_sample", held.train(module.training))


def _gradient_of_each(
    module: PerSample, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Takes the gradient of each sample's copy: [N, *shape], or [N, 1, *shape]."""
    if not module.value.requires_grad:
        return {}
    return {module.value: backprops.reshape(-1, *module.value.shape)}
