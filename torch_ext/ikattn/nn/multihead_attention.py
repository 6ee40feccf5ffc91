"""The drop-in module: nn.MultiheadAttention with a choice of kernel.

The module holds parameters and state; what a call computes is in ``ikattn.nn.functional``. Sizes: N
batch, L queries, S keys, E model size, H heads, d = E / H head size, M frequencies.

Nothing of upstream's is looked up at call time: by then ``nn.MultiheadAttention`` or
``F.multi_head_attention_forward`` may be somebody's replacement that calls this module.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention
from typing_extensions import Unpack

from ikattn.nn._fused_layer import StepByStep, has_values
from ikattn.nn._nested import are_jagged, attend_packed, attend_padded
from ikattn.nn.functional import ExtraKeys, attend
from ikattn.nn.kernels import Kernel, KernelOptions, Wanted
from ikattn.nn.masks import Masks, check_hint, check_types
from ikattn.nn.over_ranks import is_over_ranks
from ikattn.nn.projection import InProjection, Projection, check_axes, project
from ikattn.nn.softmax_heads import SoftmaxHeads
from ikattn.nn.with_kernel import ModuleOptions, WithKernel
from ikattn.spectral.factory import Spectral

_stock_forward = StockMultiheadAttention.forward


class MultiheadAttention(WithKernel, SoftmaxHeads, StockMultiheadAttention):
    """Multi-head attention with the implicit kernel, to stand in nn.MultiheadAttention's place.

    Constructor, ``forward``, parameter names, initial values and random stream are those of
    torch.nn.MultiheadAttention; the options from ``kernel`` on are new and keyword-only.
    ``spectral.frequencies()`` returns the frequencies of the implicit kernel. A checkpoint of
    nn.MultiheadAttention loads with ``strict=True`` and leaves them as they are.
    docs/guide/drop_in.md lists what differs.

    Args:
        embed_dim: E, the model size.
        num_heads: H; the head size d is E / H.
        dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: As for
            nn.MultiheadAttention.
        kernel: "dot": ordinary softmax attention, equal to nn.MultiheadAttention. "rbf": the same
            with the 2-norm in a key's magnitude exchanged for the p-norm. "implicit": a kernel
            learned through its spectral density.
        p: Order of the norm in a key's magnitude, a real number >= 1; None: no magnitude;
            "learned": one for each head, a parameter, 2 at first.
        num_frequencies: M, per head; this and the options below are for "implicit". None: 32.
        spectral: Where frequencies come from. "direct": they are parameters; "stationary": so, one
            set per head; "ikan": from a network of noise; "mikan": so, of noise inferred from
            queries and keys (both: num_frequencies even). Or a module with the interface described
            in ``ikattn.spectral``, or a function that is called with this module, whose
            ``num_heads`` and ``head_dim`` it may ask for, and returns one.
        stationary: One set of frequencies per head in place of two; for named sources.
        seed: If given, the initial frequencies are a function of it alone, and torch's default
            generator is left as nn.MultiheadAttention would leave it.
        forget: Each head has gates in (0, 1], made from the values of tokens, by which a query
            counts tokens before less; ``forget.weight`` and ``forget.bias`` are their parameters.
            For "implicit" in causal self-attention: calls must pass ``is_causal=True``.

    Raises:
        ValueError: Unknown kernel or spectral, p < 1, num_frequencies < 1, gates for a kernel that
            has none.
        ValueError, AssertionError: What nn.MultiheadAttention raises.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).

    Example:
        >>> import torch, ikattn
        >>> x = torch.randn(2, 5, 16)
        >>> output, weights = ikattn.MultiheadAttention(16, 4, batch_first=True)(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
    """

    can_forget = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: Kernel = "implicit",
        p: float | Literal["learned"] | None = 2.0,
        num_frequencies: int | None = None,
        spectral: Spectral = "direct",
        stationary: bool = False,
        seed: int | None = None,
        forget: bool = False,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self.set_kernel(
            kernel,
            p=p,
            num_frequencies=num_frequencies,
            spectral=spectral,
            stationary=stationary,
            seed=seed,
            forget=forget,
        )

    @torch.inference_mode(False)  # frequencies are there to be trained
    def set_kernel(self, kernel: Kernel, **options: Unpack[ModuleOptions]) -> None:
        """Changes the kernel in place, with new frequencies for "implicit"; all else stays.

        Args:
            kernel, options: As for the constructor.

        Raises:
            ValueError: An option is wrong; nothing has changed then.
        """
        weight = self.in_proj_weight if self._qkv_same_embed_dim else self.q_proj_weight
        self._choose_kernel(
            kernel, num_heads=self.num_heads, head_dim=self.head_dim, like=weight, **options
        )
        self.keep_softmax(None)
        self._keep_off_fused_path()

    def remove_kernel(self) -> None:
        """Makes the module an nn.MultiheadAttention, without frequencies; weights stay.

        Modules that other people derived from this class do not come back from it.
        """
        self.kernel = "dot"
        self._keep_off_fused_path()
        self._drop_kernel()
        self.keep_softmax(None)
        vars(self).pop("_split", None)
        self.__class__ = StockMultiheadAttention  # type: ignore[assignment]

    def reset_parameters(self) -> None:
        """Draws every parameter anew, in the order and from the distributions of construction."""
        self.out_proj.reset_parameters()
        super()._reset_parameters()
        self._reset_kernel()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from queries to keys and values, like nn.MultiheadAttention.forward.

        Args:
            query: [L, N, E]; with ``batch_first`` [N, L, E]; unbatched [L, E]. With
                ``batch_first`` it may be nested, ``[N, *, E]``, of layout torch.jagged or
                torch.strided, and key and value are then, too, without masks.
            key, value: As query, with S for L, and kdim or vdim for E.
            key_padding_mask, attn_mask, is_causal: As for ``multi_head_attention_forward``.
            need_weights: Return the attention weights too.
            average_attn_weights: Average the returned weights over heads.

        Returns:
            The output, shaped like query, and the weights or None. Weights are the ones used, after
            dropout, and differentiable: [N, L, S], per head [N, H, L, S], without N for unbatched
            input. For a query that sees no key they are zero, and so is the input of ``out_proj``.

        Raises:
            AssertionError, RuntimeError: As nn.MultiheadAttention, in its words.
            RuntimeError: ``is_causal`` with frequencies that depend on whole sequences.
            TypeError, ValueError: The source of frequencies returned what it must not.
        """
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        arguments: tuple[Any, ...] = (query, key, value, *options)
        tracer = next((x.tracer for x in arguments if isinstance(x, fx.Proxy)), None)
        if isinstance(tracer, fx.Tracer) and tracer.root is not self:
            return self._as_leaf(tracer, *arguments)  # type: ignore[no-any-return]
        self._check_causality(is_causal)
        if query.is_nested or key.is_nested or value.is_nested:
            return self._forward_nested(*arguments)
        check_types(key_padding_mask, attn_mask)
        check_axes(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        masks = Masks(key_padding_mask, attn_mask, is_causal)
        return self._attend(query, key, value, masks, Wanted(need_weights, average_attn_weights))

    def merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> tuple[Tensor | None, int | None]:
        """Serves torch's fused inference paths, which compute the dot kernel and no other.

        Raises:
            RuntimeError: The kernel is another one, which the fused path would ignore; or, in a
                compiled program, a mask adds values, which it would ignore, too.
        """
        if self.kernel != "dot":
            is_there = _forward_must_run in self._forward_pre_hooks.values()
            hook = "there" if is_there else "missing"
            raise RuntimeError(
                "torch's fused inference path computes dot-product attention, but this module has "
                f"kernel={self.kernel!r}; the forward pre-hook that keeps torch off that path is "
                f"{hook}. Call torch.backends.mha.set_fastpath_enabled(False)."
            )
        if has_values(attn_mask) or has_values(key_padding_mask):
            return StepByStep(self, attn_mask, key_padding_mask), 0
        return super().merge_masks(attn_mask, key_padding_mask, query)

    def extra_repr(self) -> str:
        p = self.p if self.magnitude is None else "learned"
        return f"embed_dim={self.embed_dim}, kernel={self.kernel!r}, p={p!r}"

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: Masks,
        wanted: Wanted,
        query_padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends as ``forward``; ``query_padding`` [N, L] says which queries not to average."""
        pools = getattr(self.spectral, "pools", False)
        split = self.split_heads() if self.kernel == "implicit" else None
        kernel = KernelOptions(self.kernel, self.p, self._frequencies, self.magnitude, pools)
        own: Any = {"head_share": self.head_share, "split": split, "forget": self.forget}
        return attend(
            query,
            key,
            value,
            self._projection(),
            self._extra_keys(query),
            kernel._replace(query_padding=query_padding, **own),
            masks,
            wanted,
            dropout_p=self.dropout if self.training else 0.0,
            out_proj=self._out_projection,
            batch_first=self.batch_first,
        )

    def _out_projection(self, merged: Tensor) -> Tensor:
        return self.out_proj(merged)  # type: ignore[no-any-return]

    def _projection(self) -> Projection:
        return partial(project, InProjection.of(self))

    def _extra_keys(self, query: Tensor) -> ExtraKeys:
        return ExtraKeys(self.bias_k, self.bias_v, self.add_zero_attn)

    def _as_leaf(self, tracer: fx.Tracer, *arguments: Any) -> Any:
        """Makes torch.fx record the call as one node, as it does for the modules of torch.

        RuntimeError tells of hooks: they have been traced, or will be, and would run twice.
        """
        name = tracer.path_of_module(self)
        hooks = [*self._forward_pre_hooks.values(), *self._forward_hooks.values()]
        if any(hook is not _forward_must_run for hook in hooks):
            raise RuntimeError(
                f"torch.fx would trace the hooks of {name!r} into the graph and run them again at "
                "every call; expected none, or a Tracer whose is_leaf_module returns True for "
                f"ikattn.MultiheadAttention, got {len(hooks)} hooks"
            )
        return tracer.create_proxy("call_module", name, arguments, {})

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attends over nested tensors [N, *, E]; weights come padded, [N, L, S].

        Of the jagged layout nothing is padded where weights are not wanted, no keys are added, and
        frequencies depend on no whole sequence.
        """
        key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal = options
        check_hint(is_causal, attn_mask)
        jagged = are_jagged(query, key, value)
        if self.kernel == "dot" and not jagged:
            return _stock_forward(self, query, key, value, *options)
        if not self.batch_first or key_padding_mask is not None or attn_mask is not None:
            raise AssertionError("NestedTensor input needs batch_first=True and takes no masks")
        if is_over_ranks():
            raise RuntimeError(
                "MultiheadAttention: query must not be nested under context_parallel, whose ranks "
                "have parts of one length"
            )
        dropout_p = self.dropout if self.training else 0.0
        has_extra_keys = self.bias_k is not None or self.add_zero_attn
        if (
            jagged
            and self.kernel == "implicit"
            and getattr(self, "head_share", None) is None
            and self.split_heads() is None
            and self.forget is None
            and not (need_weights or has_extra_keys or getattr(self.spectral, "pools", False))
            and dropout_p < 1.0
        ):
            return attend_packed(self, query, key, value, dropout_p), None

        def attend(
            q: Tensor, k: Tensor, v: Tensor, of_keys: Tensor, of_queries: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            masks = Masks(of_keys, None, is_causal)
            wanted = Wanted(need_weights, average_attn_weights)
            return self._attend(q, k, v, masks, wanted, of_queries)

        return attend_padded(attend, query, key, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Packs an in-projection that a checkpoint has in three, as ``HeadParallel`` makes it."""
        names = [f"{prefix}{name}_proj_weight" for name in "qkv"]
        if self._qkv_same_embed_dim and all(name in state_dict for name in names):
            parts = [state_dict.pop(name) for name in names]
            state_dict[f"{prefix}in_proj_weight"] = torch.cat(parts)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        source = getattr(self, "spectral", None)  # absent while upstream's constructor runs
        parameters = () if source is None else source.parameters()
        # what transformers has loaded stays, though it resets the module for others' sake
        if not any(getattr(x, "_is_hf_initialized", False) for x in parameters):
            self._reset_kernel()

    def _keep_off_fused_path(self) -> None:
        """Makes torch call ``forward`` in eval mode without grad, unless the kernel is dot.

        nn.TransformerEncoderLayer runs a fused dot-product kernel then, unless there are hooks.
        """
        for number, hook in list(self._forward_pre_hooks.items()):
            if hook is _forward_must_run:
                del self._forward_pre_hooks[number]
        if self.kernel != "dot":
            self.register_forward_pre_hook(_forward_must_run)

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            "TorchScript cannot compile ikattn.MultiheadAttention; use torch.export.export instead"
        )


def _forward_must_run(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Does nothing, as a hook whose presence matters."""
