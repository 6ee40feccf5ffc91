"""``python -m ikattn attribute``: which tokens of a prompt made a model's answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ikattn._command.errors import AnalyzeError
from ikattn._whole_files import whole_file
from ikattn.analysis.attribution import Attribution, attribute
from ikattn.analysis.attribution._texts import encoded, taken_by, target_of_text, with_first_token
from ikattn.integrations.transformers import from_pretrained
from ikattn.integrations.transformers._implicit import settings_of

__all__ = ["Question", "answer", "table"]


@dataclass(frozen=True)
class Question:
    """What the command line asks.

    Attributes:
        model: A directory or the name of a repository.
        prompt, pair: What the model reads; the second of two sentences, or None.
        target: The answer as text, or the number of a class; None: what the model says itself.
        against: A token or the number of a class, or None.
        method: As in :func:`ikattn.attribute`.
        chat: The prompt is what a user says, in the tokenizer's chat template.
        new_tokens: How many tokens the model may answer where there is no target.
        dtype, device, device_map, revision, trust_remote_code: For loading the model.
        out: A file, .html or .json, or None.
    """

    model: str
    prompt: str
    pair: str | None = None
    target: str | None = None
    against: str | None = None
    method: str = "decompx"
    chat: bool = False
    new_tokens: int = 20
    dtype: str = "auto"
    device: str = "cpu"
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    out: Path | None = None


def answer(question: Question) -> Attribution:
    """Loads the model and attributes its answer, and writes the file that was asked for.

    Raises:
        AnalyzeError: It cannot be done; the message says why.
    """
    if find_spec("transformers") is None:
        raise AnalyzeError("this needs transformers: pip install 'ikattn[analyze]'")
    if question.out is not None and question.out.suffix not in (".html", ".json"):
        raise AnalyzeError(f"--out must end in .html or .json, got {question.out}")
    model, tokenizer = _load(question)
    try:
        found = _ask(question, model, tokenizer)
    except (ValueError, RuntimeError, NotImplementedError, IndexError) as error:
        raise AnalyzeError(str(error).removeprefix("attribute: ")) from error
    if question.out is not None:
        try:
            if question.out.suffix == ".html":
                found.to_html(question.out)
            else:
                with whole_file(question.out) as file:
                    file.write(json.dumps(_record(found)).encode())
        except OSError as error:
            raise AnalyzeError(str(error)) from error
    return found


def table(found: Attribution) -> str:
    """Tokens and scores, one a line, a bar beside each."""
    lines = []
    for names, scores in (
        (found.tokens, found.scores),
        (found.prefix_tokens, found.prefix_scores),
    ):
        if names is None or scores is None:
            continue
        row = scores[0].detach().float().cpu()
        largest = max(float(row.abs().max()), 1e-30)
        width = max(len(name) for name in names[0])
        for name, score in zip(names[0], row.tolist(), strict=True):
            bar = ("+" if score > 0 else "-") * round(20 * abs(score) / largest)
            lines.append(f"{name:{width}}  {score:9.4f}  {bar}".rstrip())
    targets = "" if found.target_tokens is None else " of " + " ".join(found.target_tokens[0])
    if not bool(found.bias.isnan().any()):
        lines.append(f"not of any token: {float(found.bias[0]):.4f}")
    lines.append(f"value{targets}: {float(found.value[0]):.4f}")
    return "\n".join(lines)


def _load(question: Question) -> tuple[Any, Any]:
    transformers = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"trust_remote_code": question.trust_remote_code}
    if question.revision is not None:
        options["revision"] = question.revision
    try:
        config = transformers.AutoConfig.from_pretrained(question.model, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(question.model, **options)
        kind = _kind_of(transformers, config)
        if question.device_map is not None:
            options["device_map"] = question.device_map
        dtype = question.dtype
        options["dtype"] = dtype if dtype == "auto" else getattr(torch, dtype)
        load = kind.from_pretrained
        if settings_of(config) is not None:  # use_implicit_attention gave it frequencies
            model = from_pretrained(kind, question.model, **options)
        else:
            model = load(question.model, **options)
        if question.device_map is None:
            model = model.to(question.device)
        return model.eval(), tokenizer
    except Exception as error:  # of many libraries, and each of them means this
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise AnalyzeError(f"cannot load the model {question.model}: {cause[0]}") from error


def _kind_of(transformers: Any, config: Any) -> Any:
    """The class that loads the model with the head it was saved with."""
    names = getattr(config, "architectures", None) or [""]
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    if names[0].endswith("ForSequenceClassification"):
        return transformers.AutoModelForSequenceClassification
    if names[0] and not names[0].endswith(("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")):
        raise ValueError(
            f"a {names[0]} has no head to attribute: take a decoder, a classifier of texts, or an "
            "encoder-decoder"
        )
    return transformers.AutoModelForCausalLM


def _ask(question: Question, model: Any, tokenizer: Any) -> Attribution:
    inputs = _inputs(question, model, tokenizer)
    against = None if question.against is None else _number(question.against, model, tokenizer)
    options: dict[str, Any] = {"method": question.method, "against": against}
    if not model.can_generate():
        target = None if question.target is None else _number(question.target, model, tokenizer)
        return attribute(model, inputs, target, tokenizer=tokenizer, **options)
    answer: Any = None
    if question.target is not None:
        inputs, answer = target_of_text(model, inputs, question.target, tokenizer, "attribute")
    else:
        answer = _generated(question, model, inputs)
        if not answer:
            raise AnalyzeError("the model answers nothing")
        inputs = with_first_token(model, inputs)
    return attribute(model, inputs, answer, tokenizer=tokenizer, **options)


def _inputs(question: Question, model: Any, tokenizer: Any) -> dict[str, Tensor]:
    if question.chat:
        said = [{"role": "user", "content": question.prompt}]
        return encoded(model, said, tokenizer, "attribute")[0]
    made = tokenizer(question.prompt, question.pair, return_tensors="pt")
    if made["input_ids"].numel() == 0:
        raise AnalyzeError("the prompt must have a token, got none")
    return {name: x.to(model.device) for name, x in taken_by(model, dict(made)).items()}


@torch.no_grad()
def _generated(question: Question, model: Any, inputs: dict[str, Tensor]) -> list[int]:
    """What the model answers, greedily."""
    made = model.generate(**inputs, max_new_tokens=question.new_tokens, do_sample=False)
    is_two_sided = bool(model.config.is_encoder_decoder)
    begins = 1 if is_two_sided else inputs["input_ids"].size(1)
    return [int(i) for i in made[0, begins:]]


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
    tensors = {"scores": found.scores, "prefix_scores": found.prefix_scores}
    tensors |= {"value": found.value, "bias": found.bias}
    numbers = {n: None if x is None else x[0].tolist() for n, x in tensors.items()}
    bias = found.bias[0]
    numbers["bias"] = None if bool(bias.isnan().any()) else numbers["bias"]
    names = {"tokens": found.tokens, "prefix_tokens": found.prefix_tokens}
    names |= {"target_tokens": found.target_tokens}
    return {"method": found.method, **numbers, **{n: x and x[0] for n, x in names.items()}}
