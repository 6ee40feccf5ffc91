"""Modules that ask a spectral source and keep what it wants added to the loss."""

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
        if not torch.compiler._is_exporting_flag and not _is_in_backward():
            if regularization is not None:
                self._regularized_in = (self.training, torch.is_grad_enabled())
                self.regularization = regularization.view(())  # a parameter would be registered
            elif self.regularization is not None:  # nothing is assigned without need: a compiled
                self.regularization = None  # checkpoint must not have side effects
        return w1, w2

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the last call's regulariser out of copies, which have no part in its graph."""
        return {**self.__dict__, "regularization": None}


def _is_in_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
