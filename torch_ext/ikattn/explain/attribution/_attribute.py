"""``attribute``: the parts of input tokens in a number that a model gives.

Sizes: B batch, S source tokens, n targets, L tokens that logits belong to, D model size, V logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ikattn._memory import takes_memory_for
from ikattn.explain.attribution._decompx import decompose
from ikattn.explain.attribution._linear import Activation
from ikattn.explain.attribution._model import alone, stacks_of
from ikattn.explain.attribution._places import places_of_tokens
from ikattn.explain.attribution._rollouts import ROLLED, alti_logit, roll_out
from ikattn.explain.attribution._targets import Target, Task, named_inputs, predicts_next
from ikattn.explain.attribution.attribution import Attribution
from ikattn.explain.attribution.texts import (
    Conversation,
    encoded,
    number_of_text,
    target_of_text,
    with_first_token,
)


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
    r"""Scores tokens of the input by their part in a logit, or in the logits of a span of text.

    ``"decompx"`` (Modarressi et al., ACL 2023): with attention weights, divisors of norms and
    slopes of activations fixed, the model is linear in the vectors x_j that enter its first block,
    and a logit is a sum over tokens and biases,

    .. math:: y = \sum_j \langle g_j, x_j \rangle + b.

    g is the gradient of that linear map, so that one backward pass gives every token's part. It
    works with any model whose attention can be found, and with encoder-decoders, whose two inputs
    both have parts. Parts that do not add up to the logit are an error.

    ``"alti_logit"`` (Ferrando et al., ACL 2023), for models whose blocks add to a residual stream:
    what the attention of each layer writes into the logit directly, token by token, followed back
    to the input by the rollout of ALTI's maps. ``"rollout:MAP"``, for example ``"rollout:encoder"``
    or ``"rollout:value_zeroing"``: the rollout of a map (:func:`ikattn.rollout`), the rows that the
    target reads, which say nothing of the logit's sign. Maps without the residual get one half of
    it. docs/guide/attribution.md compares the methods.

    Args:
        model: A model of transformers, or any module, in eval mode. Its parameters'
            ``requires_grad`` is switched off during the call, and it has hooks: nothing else may
            call it meanwhile. Several threads may call this function.
        inputs: Its arguments by name, or a tensor, its only argument. With a tokenizer: a text, or
            a conversation, ``[{"role": "user", "content": ...}, ...]``, for the tokenizer's chat
            template; an assistant's turn at its end is the ``"answer"``.
        target: For logits ``[B, V]``: a class, one for each sequence, or None for the predicted
            one. For a model that predicts the next token: a slice, a span of the tokens it was
            given (of an encoder-decoder: of the decoder's), counted without padding; ``"answer"``,
            all after ``prompt_length``; token ids as a list or tensor, read as the continuation of
            the input; an int, a token that may come next; None, the one that it predicts. For other
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
        tokenizer: A tokenizer of transformers, to label tokens and to read texts.

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
    kind, _, map_ = str(method).partition(":")
    if kind not in ("decompx", "alti_logit", "rollout") or bool(map_) != (kind == "rollout"):
        raise ValueError(
            'attribute: method must be "decompx", "alti_logit" or "rollout:MAP", for example '
            f'"rollout:encoder", got {method!r}'
        )
    if map_ and map_ not in ROLLED:
        raise ValueError(
            f"attribute: MAP of rollout:MAP must be one of {', '.join(ROLLED)}, got {map_!r}"
        )
    if activation not in ("slope", "tangent"):
        raise ValueError(f'attribute: activation must be "slope" or "tangent", got {activation!r}')
    if each and kind != "decompx":
        raise ValueError(f'attribute: each needs method="decompx", got {method!r}')
    with alone(model, "attribute"):
        if isinstance(inputs, str) or (isinstance(inputs, Sequence) and inputs):
            inputs, answer_begins = encoded(model, inputs, tokenizer)
            if target is None and predicts_next(model):
                inputs = with_first_token(model, inputs)
            if answer_begins is not None and target in (None, "answer"):
                target, prompt_length = "answer", answer_begins
        named = named_inputs(model, inputs)
        if isinstance(target, str) and target != "answer" and tokenizer is not None:
            named, target = target_of_text(model, named, target, tokenizer)
        if isinstance(against, str):
            against = number_of_text(model, against, tokenizer)
        task = Task.of(model, named, target, against, prompt_length)
        if kind == "decompx":
            found = decompose(task, each, activation)
        else:
            found = alti_logit(task) if kind == "alti_logit" else roll_out(task, map_)
        found = _of_given_tokens(found, task)
    found.method = method
    are_tokens = predicts_next(model)
    found.label(tokenizer, task.source_ids(), task.ids if are_tokens else [])
    names = getattr(getattr(model, "config", None), "id2label", None)
    if not are_tokens and tokenizer is not None and names and all(task.ids):
        labels = [[str(names.get(i, i)) for i in own] for own in task.ids]
        found.target_tokens = labels or None
    return found


def _of_given_tokens(found: Attribution, task: Task) -> Attribution:
    """Returns scores of the tokens that were given; all other vectors' part is in ``bias``."""
    kept, rest = [found.scores, found.prefix_scores], found.bias
    for n, (ids, scores) in enumerate(zip(task.source_ids(), kept, strict=False)):
        if ids is None or scores is None or ids.size(-1) == scores.size(-1):
            continue
        stacks, W = stacks_of(task.model, "attribute"), scores.size(-1)
        places = places_of_tokens(task.model, stacks, ids, W, task.values)
        if places is not None:
            own = scores[..., places.to(scores.device)]
            kept[n], rest = own, rest + scores.sum(-1) - own.sum(-1)
    assert kept[0] is not None
    return replace(found, scores=kept[0], prefix_scores=kept[1], bias=rest)
