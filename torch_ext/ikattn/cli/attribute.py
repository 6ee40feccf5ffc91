"""``python -m ikattn attribute``: which tokens of a prompt made a model's answer."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from ikattn._whole_files import whole_file
from ikattn.cli.errors import AnalyzeError, doing
from ikattn.cli.loading import Loaded, hushed, load, warn_of_missing
from ikattn.explain import Attribution, attribute
from ikattn.explain.attribution.texts import encoded, taken_by, target_of_text, with_first_token
from ikattn.maps.pictures import text_width


def answer(question: Namespace) -> tuple[Attribution, int | None]:
    """Loads the model and attributes its answer, and writes the file that was asked for.

    The question has the options of the command line. With the scores it returns how many of the
    last tokens the model answered itself: 0 where it chose a class, None where there was a target.
    """
    for option in ("prompt", "pair", "target", "against"):
        with doing(f"--{option} must be text in UTF-8"):
            (getattr(question, option) or "").encode()
    if question.out is not None and question.out.suffix not in (".html", ".json"):
        raise AnalyzeError(f"--out must end in .html or .json, got {question.out}")
    with hushed():
        loaded = _load(question)
        warn_of_missing(question.model, loaded.missing)
        found = _ask(question, loaded)
    own = None
    if question.target is None:
        answered = found.target_tokens if loaded.model.can_generate() else None
        own = len(answered[0]) if answered else 0
    if question.out is not None and question.out.suffix == ".html":
        found.to_html(question.out)
    elif question.out is not None:
        with whole_file(question.out) as file:
            file.write(json.dumps(_record(found)).encode())
    return found, own


def table(found: Attribution, own: int | None = None) -> str:
    """Tokens and scores, one a line, a bar beside each; ``own`` is what :func:`answer` tells."""
    target = [] if found.target_tokens is None else [_shown(x) for x in found.target_tokens[0]]
    lines = [] if own is None else [f"the model answers: {' '.join(target) or 'no known token'}"]
    parts = [(found.tokens, found.scores), (found.prefix_tokens, found.prefix_scores)]
    there = [(names[0], x[0]) for names, x in parts if names is not None and x is not None]
    width = max((text_width(_shown(name)) for names, _ in there for name in names), default=0)
    for part, (names, scores) in enumerate(there, start=1):
        shown = [_shown(name) for name in names]
        row = scores.detach().float().cpu()
        largest = max(float(row.abs().max()), 1e-30)
        begins = len(shown) - own if own and part == len(there) else None
        for place, (name, score) in enumerate(zip(shown, row.tolist(), strict=True)):
            if place == begins:
                lines.append("of the answer itself, for its later tokens:")
            bar = ("+" if score > 0 else "-") * round(20 * abs(score) / largest)
            padding = " " * (width - text_width(name))
            lines.append(f"{name}{padding}  {score:9.4f}  {bar}".rstrip())
    if not bool(found.bias.isnan().any()):
        lines.append(f"not of any token: {float(found.bias[0]):.4f}")
    of_target = f" of {' '.join(target)}" if target else ""
    lines.append(f"value{of_target}: {float(found.value[0]):.4f}")
    return "\n".join(lines)


def _shown(token: str) -> str:
    """A token on one line of a terminal."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in token)


def _load(question: Namespace) -> Loaded:
    about: dict[str, Any] = {"trust_remote_code": question.trust_remote_code}
    dtype = question.dtype
    options = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if question.revision is not None:
        about["revision"] = question.revision
    if question.device_map is None:
        return load(question.model, _kind_of, about, question.device, **options)
    return load(question.model, _kind_of, about, None, device_map=question.device_map, **options)


def _kind_of(transformers: Any, config: Any) -> Any:
    """Returns the class that the model was saved as, which must give logits of text."""
    name = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, name, None) if name else None
    if kind is None:  # its code comes with it, or nobody says
        is_pair = config.is_encoder_decoder
        return transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM
    classifiers = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if not kind.can_generate() and kind is not classifiers.get(type(config), None):
        raise AnalyzeError(
            f"a {name} gives neither a class of a text nor a next token to attribute: take a "
            "decoder, a classifier of texts, or an encoder-decoder"
        )
    return kind


def _ask(question: Namespace, loaded: Loaded) -> Attribution:
    model, tokenizer = loaded.model, loaded.tokenizer
    inputs = _inputs(question, model, tokenizer)
    against = None if question.against is None else _number(question.against, model, tokenizer)
    options: Any = {"method": question.method, "against": against, "tokenizer": tokenizer}
    loaded.check(inputs["input_ids"])
    room = loaded.positions - inputs["input_ids"].size(1)
    if room < 0:
        raise AnalyzeError(
            f"the prompt has {inputs['input_ids'].size(1)} tokens, and the model has positions for "
            f"{loaded.positions}: give a shorter one"
        )
    if not model.can_generate():
        target = None if question.target is None else _number(question.target, model, tokenizer)
        return attribute(model, inputs, target, **options)
    if model.config.is_encoder_decoder:
        room = loaded.positions
    if question.target is None:
        count = max(min(question.new_tokens, room), 1)
        made = model.generate(**inputs, max_new_tokens=count, do_sample=False)
        begins = 1 if model.config.is_encoder_decoder else inputs["input_ids"].size(1)
        answer: Any = made[0, begins:].tolist()
        inputs = with_first_token(model, inputs)
    else:
        inputs, answer = target_of_text(model, inputs, question.target, tokenizer)
        loaded.check(torch.tensor(answer))
    if not answer:
        raise AnalyzeError("the model answers nothing")
    if len(answer) > room:
        raise AnalyzeError(
            f"the answer has {len(answer)} tokens, and the model has positions for {room} after "
            "the prompt"
        )
    return attribute(model, inputs, answer, **options)


def _inputs(question: Namespace, model: Any, tokenizer: Any) -> dict[str, Tensor]:
    if question.pair is None:
        chat = [{"role": "user", "content": question.prompt}]
        given: Any = chat if question.chat else question.prompt
        return encoded(model, given, tokenizer)[0]
    made = dict(tokenizer(question.prompt, question.pair, return_tensors="pt"))
    return {name: x.to(model.device) for name, x in taken_by(model, made).items()}


@torch.no_grad()
def _number(text: str, model: Any, tokenizer: Any) -> int:
    """A class by its number or its label, or a token."""
    names = getattr(model.config, "id2label", None) or {}
    labels = {name: int(i) for i, name in names.items()}
    if not model.can_generate():
        if text in labels:
            return labels[text]
        if text.isdecimal():
            return int(text)
        raise AnalyzeError(f"a class must be a number or one of {', '.join(labels)}, got {text!r}")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise AnalyzeError(f"--against must be one token, got {text!r}, which has {len(ids)}")
    return int(ids[0])


def _record(found: Attribution) -> dict[str, Any]:
    tensors = {n: getattr(found, n) for n in ("scores", "prefix_scores", "value", "bias")}
    numbers = {n: None if x is None else x[0].tolist() for n, x in tensors.items()}
    if bool(found.bias[0].isnan().any()):
        numbers["bias"] = None
    names = {n: getattr(found, n) for n in ("tokens", "prefix_tokens", "target_tokens")}
    return {"method": found.method, **numbers, **{n: x and x[0] for n, x in names.items()}}
