"""Modules that ask a spectral source, and the regularisers that they keep for the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ikattn._heads import HeadShare
from ikattn.spectral.interface import call_source
from ikattn.spectral.shared import call_shared_source


class Regularized(nn.Module):
    """A base of modules with a source, whose regularisers ``regularization_loss`` adds up."""

    spectral: nn.Module | None
    regularization: Tensor | None = None  # until regularization_loss takes it
    head_share: HeadShare | None = None  # the heads of this rank, where ranks share them out
    _regularized_in = (False, False)  # whether that call was in training mode, and with grad

    def _check_causality(self, is_causal: bool) -> None:
        """Raises RuntimeError where the source would see the future."""
        if is_causal and getattr(self.spectral, "pools", False):
            raise RuntimeError(
                f"{type(self.spectral).__name__} averages over whole sequences and would let "
                "causal attention see the future; expected a source of frequencies that does not, "
                "such as spectral='direct' or 'ikan'"
            )

    def _frequencies(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Asks the spectral source, and keeps its regulariser."""
        assert self.spectral is not None
        arguments = (query, key, key_padding_mask, query_padding_mask)
        if self.head_share is None:
            w1, w2, regularization = call_source(self.spectral, *arguments)
        else:
            w1, w2, regularization = call_shared_source(self.spectral, self.head_share, *arguments)
        # an exported program has no attributes to assign to (is_exporting() of torch 2.11 is true
        # of a compiled one, too); what a checkpoint computes again in the backward pass has been
        # taken already
        backward = -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
        if not torch.compiler._is_exporting_flag and backward == -1:
            if regularization is not None:
                self._regularized_in = (self.training, torch.is_grad_enabled())
                self.regularization = regularization.view(())  # a parameter would be registered
            elif self.regularization is not None:  # nothing is assigned without need: a compiled
                self.regularization = None  # checkpoint must not have side effects
        return w1, w2

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the last call's regulariser out of copies, which have no part in its graph."""
        return {**self.__dict__, "regularization": None}


def regularization_loss(model: nn.Module) -> Tensor:
    """Adds up what the generators of all attention layers ask to be added to the loss.

    Every layer keeps the regulariser of its last call until it is taken here, once: call this
    function once for every forward pass, in the same mode. A layer that is used several times in
    one pass counts once, with that of its last use; one that is left out of a pass adds nothing.

    Args:
        model: Any module that has been called.

    Returns:
        A scalar, in nats times the generators' weights; 0 where no generator has a regulariser. It
        is a mean over the samples of the batch and belongs to a log-likelihood of the whole data
        set: divide it by the number of training examples where the loss is a mean.

    Raises:
        RuntimeError: No generator has been called since the last time, or one without a graph, as
            torch.utils.checkpoint does with ``use_reentrant=True``, so that it would learn nothing.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021, whose code adds the
    last layer's alone.

    Example:
        >>> import torch, ikattn
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = ikattn.convert(torch.nn.TransformerEncoder(layer, 2), spectral="mikan")
        >>> loss = model(torch.randn(3, 5, 16)).square().mean()
        >>> loss = loss + ikattn.regularization_loss(model) / 1000
        >>> loss.backward()
    """
    terms: list[Tensor] = []
    missing: str | None = None
    transformations: Any = torch._C._functorch  # torch has no types for these
    for name, module in model.named_modules():
        if not isinstance(module, Regularized):
            continue
        term, module.regularization = module.regularization, None
        if term is not None:  # of a transformation of torch.func that has ended, such as vmap?
            level = transformations.maybe_get_level(term)  # 0 or less outside
            term = None if level > (transformations.maybe_current_level() or 0) else term
        in_training, with_grad = module._regularized_in
        if term is not None and in_training == module.training:
            assert module.spectral is not None
            is_lost = in_training and not with_grad and torch.is_grad_enabled()
            if is_lost and any(w.requires_grad for w in module.spectral.parameters()):
                raise RuntimeError(
                    f"the regulariser of {name or 'the attention'} has no gradient, as it was "
                    "called in training mode without grad: pass use_reentrant=False to "
                    "torch.utils.checkpoint; to read the value alone, call regularization_loss "
                    "under torch.no_grad()"
                )
            terms.append(term)
        elif getattr(module.spectral, "regularizes", False):
            missing = missing or name or "the attention"
    if terms:
        device = terms[0].device
        return torch.stack([term.to(device) for term in terms]).sum()
    if missing is not None:
        raise RuntimeError(
            f"{missing} has no regulariser: call the model first, in this process, without "
            "exporting it, and take the regulariser once for every forward pass, within the same "
            "torch.func transformation"
        )
    first = next(model.parameters(), None)
    return torch.zeros((), device=None if first is None else first.device)
