"""Which tokens of the input made a number that the model gives.

Sizes: B batch, S source tokens, n targets, L tokens that logits belong to, D model size, V logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from ikattn._memory import takes_memory_for
from ikattn.explain.alti_plus import alti_plus
from ikattn.explain.attribution._alti_logit import Writings
from ikattn.explain.attribution._linear import (
    Activation,
    LinearModel,
    activations_as_one,
    tolerance_of,
)
from ikattn.explain.attribution._model import (
    Stack,
    alone,
    attention_of,
    checkpointed,
    frozen_parameters,
    last_hidden,
    logits_of,
    replaced,
    stacks_of,
    takes,
)
from ikattn.explain.attribution._places import places_of_tokens, readers_of
from ikattn.explain.attribution._targets import Choice, Target, choose, predicts_next, with_answer
from ikattn.explain.attribution._texts import (
    Conversation,
    encoded,
    number_of_text,
    target_of_text,
    with_first_token,
)
from ikattn.explain.attribution.attribution import Attribution
from ikattn.explain.attribution.cost import MUCH, activation_bytes
from ikattn.explain.attribution.zeroing import value_zeroing
from ikattn.maps.layers import RecordedMaps
from ikattn.maps.summary import row_shares
from ikattn.maps.through_layers import rollout
from ikattn.recorder.entry import recorded

__all__ = ["attribute"]

_CALLER = "attribute"


@takes_memory_for("the attribution")
def attribute(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor | str | Conversation,
    target: Target = None,
    *,
    method: str = "decompx",
    against: int | str | None = None,
    prompt_length: int | None = None,
    each: bool = False,
    activation: Activation = "slope",
    tokenizer: Any = None,
) -> Attribution:
    r"""Which tokens of the input made a logit, or the logits of a span of text.

    ``"decompx"`` (Modarressi et al., ACL 2023): with attention weights, divisors of norms and
    slopes of activations fixed, the model is linear in the vectors x_j that enter its first block,
    and a logit is a sum over tokens and biases,

    .. math:: y = \sum_j \langle g_j, x_j \rangle + b.

    g is the gradient of that linear map, so that one backward pass gives every token's part: no
    vector of a pair of tokens is ever made. It works with any model whose attention can be found,
    and with encoder-decoders, whose two inputs both have parts. Parts that do not add up to the
    logit, because the model calls a function that is not linear and has no rule, are an error.

    ``"alti_logit"`` (Ferrando et al., ACL 2023), for models whose blocks add to a residual stream:
    what the attention of each layer writes into the logit directly, token by token, followed back
    to the input by the rollout of ALTI's maps. It leaves out what feed-forward parts write.

    ``"rollout:MAP"``, for example ``"rollout:encoder"`` or ``"rollout:alti"``: the rollout of a map
    (:func:`ikattn.rollout`), the rows that the target reads; ``"rollout:value_zeroing"`` of
    :func:`ikattn.explain.value_zeroing`. Maps without the residual get one half of it. Says
    nothing of the logit's sign.

    Args:
        model: In eval mode; one of transformers, or any module. Its parameters' ``requires_grad``
            is switched off during the call, and it has hooks: nothing else may call it meanwhile
            (several threads may call this function, which takes them one after the other).
        inputs: What it is called with, by name; a tensor: its only argument. With a tokenizer: a
            text, or a conversation, ``[{"role": "user", "content": ...}, ...]``, for the
            tokenizer's chat template; an assistant's turn at its end is the ``"answer"``.
        target: Of logits ``[B, V]``: a class, one for each sequence, or None for the predicted one.
            Of a model that predicts the next token: a slice, a span of the tokens it was given (of
            an encoder-decoder: of the decoder's), counted without padding; ``"answer"``, all after
            ``prompt_length``; token ids as a list or tensor, read as the continuation of the
            input; an int, a token that may come next; None, the one that it predicts. Of other
            logits ``[B, L, V]``: ``(position, class)``, class None: the predicted one. With a
            tokenizer: another text than "answer", which is the continuation or a class's label.
            Otherwise a function of the model's output that gives ``[B]``, taken by its tangent:
            what that leaves of the value is in ``bias``. Positions count without padding.
        method: See above.
        against: A class or token whose logit is taken off: why this one rather than that. With a
            tokenizer also as text.
        prompt_length: How many tokens stand before the answer.
        each: Rows for each target by itself, at the cost of a backward pass each ("decompx").
        activation: How "decompx" takes activations: "slope", f(x) = (f(x) / x) x, the paper's, or
            "tangent", f(x) = f'(x) x plus a constant, which counts as a bias.
        tokenizer: Of transformers, to label tokens and to read texts.

    Returns:
        Scores ``[B, S]`` (``[B, n, S]`` with ``each``), and what they add up to.

    Raises:
        TypeError: model is no module.
        ValueError: A target that the model has not, a model in training, unknown names, a value
            that is not finite.
        RuntimeError: Parts that do not add up; the message says how far off they are. A call inside
            torch.func, torch.compile or a checkpointed block.

    Example:
        >>> import pytest, torch, ikattn
        >>> transformers = pytest.importorskip("transformers")
        >>> config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=40)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> found = ikattn.attribute(model, torch.tensor([[3, 14, 15, 9, 2]]), target=slice(3, 5))
        >>> found.scores.shape
        torch.Size([1, 5])
        >>> torch.allclose(found.scores.sum(-1) + found.bias, found.value, atol=1e-5)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attribute: model must be a torch.nn.Module, got {type(model).__name__}")
    kind, _, map_ = method.partition(":")
    if kind not in ("decompx", "alti_logit", "rollout") or bool(map_) != (kind == "rollout"):
        raise ValueError(
            'attribute: method must be "decompx", "alti_logit" or "rollout:MAP", for example '
            f'"rollout:encoder", got {method!r}'
        )
    if activation not in ("slope", "tangent"):
        raise ValueError(f'attribute: activation must be "slope" or "tangent", got {activation!r}')
    if each and kind != "decompx":
        raise ValueError('attribute: each needs method="decompx"')
    with alone(model, _CALLER):
        if isinstance(inputs, str) or (isinstance(inputs, Sequence) and inputs):
            inputs, answer_begins = encoded(model, inputs, tokenizer, _CALLER)
            if target is None and predicts_next(model):
                inputs = with_first_token(model, inputs)
            if answer_begins is not None and target in (None, "answer"):
                target, prompt_length = "answer", answer_begins
        named = _named(model, inputs)
        if isinstance(target, str) and target != "answer" and tokenizer is not None:
            named, target = target_of_text(model, named, target, tokenizer, _CALLER)
        if isinstance(against, str):
            against = number_of_text(model, against, tokenizer, _CALLER)
        task = _Task.of(model, named, target, against, prompt_length)
        if kind == "decompx":
            found = _decompose(task, each, activation)
        else:
            found = _alti_logit(task) if kind == "alti_logit" else _roll_out(task, map_)
        found = _of_given_tokens(found, task)
    found.method = method
    are_tokens = predicts_next(model)
    found.label(tokenizer, task.source_ids(), task.choice.ids if are_tokens else [])
    names = getattr(getattr(model, "config", None), "id2label", None)
    if not are_tokens and tokenizer is not None and names and all(task.choice.ids):
        labels = [[str(names.get(i, i)) for i in own] for own in task.choice.ids]
        found.target_tokens = labels or None
    return found


class _Task(NamedTuple):
    """What is asked: a model, its inputs, and numbers of its output."""

    model: nn.Module
    inputs: dict[str, Any]
    choice: Choice
    is_seq2seq: bool
    plain: Any  # what the model gave, where it had to be asked to know the target; or None

    @staticmethod
    def of(
        model: nn.Module,
        named: dict[str, Any],
        target: Any,
        against: int | None,
        prompt_length: int | None,
    ) -> _Task:
        is_seq2seq = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        is_next = predicts_next(model)
        name = "decoder_input_ids" if is_seq2seq else "input_ids"
        tokens = named.get(name)
        if isinstance(target, Tensor) and target.dim() == 0:
            target = target.item()
        if isinstance(target, list) and not all(isinstance(i, int) for i in target):
            raise ValueError(f"attribute: a list as target must hold token ids, got {target!r:.60}")
        if isinstance(target, (list, Tensor)) and is_next:
            named, target = _with_answer(named, [int(i) for i in target], name)
            tokens = named[name]
        if isinstance(target, str):
            if target != "answer" or prompt_length is None:
                raise ValueError(
                    'attribute: target must be "answer", with prompt_length, a span, token ids, '
                    "a class, a text with tokenizer=, or a function, got "
                    f"{target!r} and prompt_length={prompt_length}"
                )
            target = slice(prompt_length, None)
        mask = named.get("decoder_attention_mask" if is_seq2seq else "attention_mask")
        mask = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

        given: list[Any] = []

        def logits() -> Tensor:
            with torch.no_grad():
                given.append(model(**named))
                return logits_of(given[0], _CALLER)

        choice = choose(target, against, logits, tokens, mask, is_next)
        return _Task(model, named, choice, is_seq2seq, given[0] if given else None)

    def values(self, linear: LinearModel | None = None) -> Tensor:
        """The numbers chosen, ``[n, B]``, of a call of the model, or of its linear map."""
        options: dict[str, Any] = {}
        kept = None
        positions = sorted({i for own in self.choice.positions for i in own})
        if positions and self.choice.function is None and takes(self.model, "logits_to_keep"):
            kept = positions
            options["logits_to_keep"] = torch.tensor(kept)
        if takes(self.model, "use_cache") and "use_cache" not in self.inputs:
            options["use_cache"] = False
        with nullcontext() if linear is None else linear:
            output = self.output(**options)
        return self.choice.values(output, kept, _CALLER, linear)

    def is_unnamed(self, stack: Stack) -> bool:
        """Whether a stack read something else than a vector for each id that was given."""
        ids = self.source_ids()[0]
        return ids is None or stack.source is None or stack.source.shape[:2] != ids.shape

    def output(self, **options: Any) -> Any:
        """What the model gives with other arguments in place of some."""
        return self.model(**{**self.inputs, **options})

    def source_ids(self) -> list[Tensor | None]:
        names = ["input_ids", "decoder_input_ids"] if self.is_seq2seq else ["input_ids"]
        return [self.inputs.get(name) for name in names]


def _of_given_tokens(found: Attribution, task: _Task) -> Attribution:
    """The scores of the tokens that were given; the part of all other vectors is in ``bias``."""
    kept, rest = [found.scores, found.prefix_scores], found.bias
    for n, (ids, scores) in enumerate(zip(task.source_ids(), kept, strict=False)):
        if ids is None or scores is None or ids.size(-1) == scores.size(-1):
            continue
        stacks, W = stacks_of(task.model, _CALLER), scores.size(-1)
        places = places_of_tokens(task.model, stacks, ids, W, task.values)
        if places is not None:
            own = scores[..., places.to(scores.device)]
            kept[n], rest = own, rest + scores.sum(-1) - own.sum(-1)
    assert kept[0] is not None
    return replace(found, scores=kept[0], prefix_scores=kept[1], bias=rest)


def _named(model: nn.Module, inputs: Any) -> dict[str, Any]:
    if isinstance(inputs, Tensor):
        first = next(iter(inspect.signature(model.forward).parameters))
        inputs = {first: inputs}
    if not isinstance(inputs, Mapping):
        raise ValueError(
            f"attribute: inputs must be a tensor, or arguments by name, got {type(inputs).__name__}"
        )
    named = {name: x for name, x in inputs.items() if name != "labels"}
    for name, x in named.items():
        if isinstance(x, Tensor) and x.numel() == 0:
            raise ValueError(f"attribute: inputs[{name!r}] must hold a token, got {list(x.shape)}")
        if isinstance(x, Tensor) and x.is_inference():
            named[name] = x.clone()
    return named


def _with_answer(named: dict[str, Any], ids: Sequence[int], name: str) -> Any:
    if not isinstance(named.get(name), Tensor) or not ids:
        raise ValueError(f"attribute: token ids as target need some, and inputs[{name!r}]")
    mask = named.get("attention_mask" if name == "input_ids" else "decoder_attention_mask")
    if isinstance(mask, Tensor) and not bool(mask[:, -1].all()):
        raise ValueError(
            "attribute: with token ids as target, sequences must be padded on the left, not right"
        )
    return with_answer(named, ids, name), slice(-len(ids), None)


# --- DecompX


def _decompose(task: _Task, each: bool, activation: Activation) -> Attribution:
    model = task.model
    with torch.no_grad():
        is_known = task.plain is not None
        expected = (
            task.choice.values(task.plain, None, _CALLER, None) if is_known else task.values()
        )
    expected = expected.double()  # [n, B]
    if not bool(expected.isfinite().all()):
        raise ValueError(f"attribute: the value must be finite, got {expected.sum(0).tolist()}")
    B, stacks, linear = expected.size(1), stacks_of(model, _CALLER), LinearModel(activation)
    with ExitStack() as opened:
        entered: list[tuple[Stack, torch.Size]] = []  # as they run
        if activation_bytes(stacks, task.inputs) > MUCH:
            opened.enter_context(checkpointed(stacks, linear))
        # in the backward pass too, where blocks may run once more
        opened.enter_context(frozen_parameters(model))
        readers = stacks
        if len(stacks) > 1 and not task.is_seq2seq:
            readers = readers_of(model, stacks, task.inputs, task.output)
        make = partial(_entering, entered, B, readers, len(stacks) == 1)
        for stack in stacks:
            opened.enter_context(replaced(stack, partial(make, stack)))
        opened.enter_context(activations_as_one(model, linear))
        opened.enter_context(torch.enable_grad())
        values = task.values(linear)
        order = [stack for stack, _ in entered]
        ran = order
        if not task.is_seq2seq:  # first the stack of which tokens are known
            ran = sorted((stack for stack in stacks if stack in order), key=task.is_unnamed)
        read = [stack.source for stack in ran]
        sources = [x for x in read if x is not None and x.is_leaf and x.requires_grad]
        if not sources:
            shapes = ", ".join(f"{stack.name or 'it'} with {list(x)}" for stack, x in entered)
            raise ValueError(
                f"attribute: target must give one number for each sequence, got {B} numbers; "
                f"called were, of {type(model).__name__}, {shapes or 'no blocks'}"
            )
        if not values.requires_grad:
            raise RuntimeError(
                "attribute: the value does not depend on the vectors of tokens by operations that "
                f"have gradients: a module from {ran[-1].name or type(model).__name__} on detaches "
                "or rounds numbers, or computes in an autograd function of its own"
            )
        turned = [_has_tokens_first(x, values) for x in sources]
        asked = list(values.sum(1)) if each else [values.sum()]
        rows: list[list[Tensor]] = []
        for row, value in enumerate(asked):
            linear.clear()
            try:
                gradients = torch.autograd.grad(
                    value, sources, retain_graph=row + 1 < len(asked), allow_unused=True
                )
            except CheckpointError as error:
                raise RuntimeError(
                    f"attribute: {type(model).__name__} runs blocks in torch.utils.checkpoint, "
                    "which runs them once more in the backward pass, where they are no linear map: "
                    "call the model without it, by model.gradient_checkpointing_disable()"
                ) from error
            parts = _parts(gradients, sources)
            _check_sum(parts, float(value.detach()), linear, sources[0], model)
            pairs = zip(parts, turned, strict=True)
            rows.append([part.mT if is_turned else part for part, is_turned in pairs])
    values = values.detach().double()
    if not each:
        values, expected = values.sum(0, keepdim=True), expected.sum(0, keepdim=True)
    return _found(rows, values.T, expected.T, sources[0], task, each)


def _entering(
    entered: list[tuple[Stack, torch.Size]],
    B: int,
    readers: Sequence[Stack],
    is_only: bool,
    stack: Stack,
    x: Tensor,
) -> Tensor:
    """What a stack is called with: a leaf, where it reads the vectors of B sequences.

    What other stacks read is taken as it is: what an earlier one made, or the patches of all
    pictures in a row, which enter the vectors of tokens.
    """
    entered.append((stack, x.shape))
    if stack not in readers and x.requires_grad:
        return x
    is_of_tokens = x.dim() > 2 and B in x.shape[:2]
    if not is_of_tokens and not (is_only and B == 1 and x.dim() == 2):
        return x
    return x.detach().requires_grad_()


def _has_tokens_first(x: Tensor, values: Tensor) -> bool:
    """Whether blocks read ``[S, B, D]``: told by what the first sequence's number depends on."""
    B = values.size(1)
    if x.dim() != 3 or B == 1 or x.size(0) != x.size(1):
        return x.dim() == 3 and x.size(0) != B
    number = values[:, 0].sum()
    (gradient,) = torch.autograd.grad(number, x, retain_graph=True, allow_unused=True)
    return gradient is not None and bool((gradient[1:] != 0).any())


def _found(
    rows: Sequence[Sequence[Tensor]],
    values: Tensor,
    expected: Tensor,
    source: Tensor,
    task: _Task,
    each: bool,
) -> Attribution:
    """Of n targets.

    Args:
        rows: For each target, for each stack of blocks, ``[B, S]``.
        values: ``[B, n]``, those of the linear map.
        expected: ``[B, n]``, those of the model.
        source: A vector that enters the model.
        task: What was asked.
        each: Whether targets stay apart; otherwise there is one.

    Raises:
        RuntimeError: The values are not the same.
    """
    parts = [torch.stack(own, 1) for own in zip(*rows, strict=True)]  # [B, n, S] each
    used = parts  # what an encoder adds may be nothing
    if len(parts) > 2 or not task.is_seq2seq:
        used = [part for part in parts if bool((part != 0).any())] or parts[:1]
    name = type(task.model).__name__
    if len(used) > 2:
        raise RuntimeError(
            f"attribute: the value depends on what enters {len(used)} stacks of blocks of {name}; "
            "of two at most there are scores"
        )
    size = torch.stack([part.abs().sum(-1) for part in parts]).sum(0) + values.abs()
    off = float(((values - expected).abs() / size.clamp_min(1e-30)).max())
    if not off <= tolerance_of(source):
        raise RuntimeError(
            f"attribute: the linear map of {name} gives {values.sum():.6g} where the model gave "
            f"{expected.sum():.6g}, {off:.2g} of its parts off: a function of torch's that it "
            "calls is replaced by another, or two calls of it differ"
        )
    bias = values - torch.stack([part.sum(-1) for part in used]).sum(0)

    def asked(x: Tensor) -> Tensor:
        x = x if each else x[:, 0]
        return x if source.dtype == torch.float64 else x.float()

    prefix = asked(used[1]) if len(used) > 1 else None
    return Attribution(asked(used[0]), asked(values), asked(bias), prefix_scores=prefix)


def _parts(gradients: Sequence[Tensor | None], sources: Sequence[Tensor]) -> list[Tensor]:
    """What each source token adds, ``[B, S]`` for each stack, in float64."""
    parts = []
    for gradient, x in zip(gradients, sources, strict=True):
        x = x if x.dim() > 2 else x.unsqueeze(0)
        if gradient is None:
            parts.append(x.new_zeros(x.shape[:-1], dtype=torch.float64).flatten(1))
            continue
        gradient = gradient.detach().double().view(x.shape)
        products = gradient * x.detach().double()
        # what nothing reads may hold NaN
        parts.append(products.masked_fill(gradient == 0, 0).sum(-1).flatten(1))
    return parts


def _check_sum(
    parts: Sequence[Tensor], value: float, linear: LinearModel, source: Tensor, model: nn.Module
) -> None:
    """Raises RuntimeError where tokens and constants do not add up to the value."""
    total = sum(float(part.sum()) for part in parts)
    constants, lost = linear.constants, linear.lost
    size = sum(float(part.abs().sum()) for part in parts) + abs(constants) + abs(value)
    allowed = tolerance_of(source) * max(size, 1e-30)
    name = type(model).__name__
    if not abs(lost) <= allowed:
        raise RuntimeError(
            f"attribute: {lost:.4g} of the value {value:.4g} comes from numbers that depend on the "
            f"tokens but are added as biases are: {name} adds what {linear.adds_results_of} gave, "
            'of which there is no linear map; "rollout:MAP" needs none'
        )
    if not abs(total + constants - value) <= allowed:
        raise RuntimeError(
            f"attribute: parts do not add up: tokens {total:.6g} and biases {constants:.6g} are "
            f"not the value {value:.6g}: {name} calls a function that is not linear in the vectors "
            'of tokens and has no rule here; "rollout:MAP" needs no linear map'
        )


# --- ALTI-Logit and rollout


def _alti_logit(task: _Task) -> Attribution:
    if task.is_seq2seq:
        raise ValueError(
            'attribute: "alti_logit" is of decoders alone, and config.is_encoder_decoder of '
            f'{type(task.model).__name__} is set: take "decompx"'
        )
    stack, gradient, values = _hidden_gradients(task)
    writings, layers = Writings(gradient), attention_of(task.model, stack)
    recording = recorded(task.model, ("alti",), layers=layers, to_cpu=False, on_run=writings.note)
    with torch.no_grad(), recording:
        task.values()
    scores = writings.followed_back()
    return Attribution(scores, values, values - scores.sum(-1))


def _roll_out(task: _Task, map_: str) -> Attribution:
    stack, gradient, values = _hidden_gradients(task)
    share = row_shares(gradient.norm(dim=-1))  # of each token, [B, L]
    nothing = values.new_full(values.shape, float("nan"))
    if map_ == "value_zeroing" and not task.is_seq2seq:
        flow = rollout(value_zeroing(task.model, task.inputs))
        return Attribution((share.to(flow).unsqueeze(1) @ flow)[:, 0], values, nothing)

    def record_of(layers: list[str] | None) -> RecordedMaps:
        with torch.no_grad(), recorded(task.model, (map_,), layers=layers) as recording:
            task.values()
        return recording

    recording = None if task.is_seq2seq else record_of(attention_of(task.model, stack))
    layers = {} if recording is None else recording.layers
    crossing = [name for name, layer in layers.items() if layer.kind == "cross"]
    if recording is not None and not crossing:
        residual = 0.5 if map_ in ("weights", "per_head", "summed") else None
        flow = rollout(recording, map=map_, layers=list(layers), residual=residual)
        return Attribution((share.to(flow).unsqueeze(1) @ flow)[:, 0], values, nothing)
    if map_ != "alti":
        raise ValueError(
            f"attribute: {type(task.model).__name__} has cross-attention"
            f'{", " + crossing[0] if crossing else ""}, through which only "rollout:alti" goes, '
            f'got "rollout:{map_}"'
        )
    pair = (share.to(x).unsqueeze(1) @ x for x in alti_plus(record_of(None)))
    scores, prefix = (x[:, 0] for x in pair)
    return Attribution(scores, values, nothing, prefix_scores=prefix)


def _hidden_gradients(task: _Task) -> tuple[Stack, Tensor, Tensor]:
    """How the target depends on what the last block makes.

    Returns:
        The stack of that block; the gradient ``[B, L, D]`` with the norm after it fixed; and the
        values ``[B]``.

    Raises:
        RuntimeError: What follows the last block does not add up to the values.
    """
    model, linear = task.model, LinearModel()
    with ExitStack() as opened:
        made = opened.enter_context(last_hidden(stacks_of(model, _CALLER)))
        opened.enter_context(frozen_parameters(model))
        opened.enter_context(activations_as_one(model, linear))
        opened.enter_context(torch.enable_grad())
        values = task.values(linear)
        leaves = [leaf for _, leaf in made]
        if not leaves:
            names = ", ".join(stack.name for stack in stacks_of(model, _CALLER))
            raise RuntimeError(
                f"attribute: the last block of {names or 'the model'} made no tensor"
            )
        last = made[-1][0]
        ran, readers = [stack for stack, _ in made], [last]
        if len(ran) > 1 and not task.is_seq2seq:
            readers = readers_of(model, ran, task.inputs, task.output)
        if last not in readers:
            raise ValueError(
                f"attribute: rollouts and ALTI-Logit follow one stack of blocks, and {last.name} "
                f'reads what {ran[-2].name} made: take "decompx"'
            )
        gradients: Sequence[Tensor | None] = [None]
        if values.requires_grad:
            gradients = torch.autograd.grad(
                values.sum(), leaves, retain_graph=True, allow_unused=True
            )
        gradient = gradients[-1]
        if gradient is None:
            raise RuntimeError(
                "attribute: the value does not depend on what the last block of "
                f"{last.name or type(model).__name__} makes by operations with gradients"
            )
        value = float(values.detach().sum())
        _check_sum(_parts(gradients, leaves), value, linear, leaves[-1], model)
        if gradient.dim() == 2 and values.size(1) == 1:
            gradient = gradient.unsqueeze(0)
        elif _has_tokens_first(leaves[-1], values):
            gradient = gradient.transpose(0, 1)
    return last, gradient, values.detach().sum(0)
