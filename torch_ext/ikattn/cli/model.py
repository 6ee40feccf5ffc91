"""A model of Hugging Face transformers and its tokenizer: from lines of text to recordings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ikattn.cli.errors import AnalyzeError, Notice, doing
from ikattn.cli.job import GROUPS, Job, Line, single_maps
from ikattn.cli.loading import Loaded, hushed, load, warn_of_missing
from ikattn.explain.attribution.texts import taken_by
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Batch
from ikattn.maps.recording import Recording
from ikattn.maps.sequences import batch_of_one, cut, size_of
from ikattn.maps.tokens import tokens_of_ids
from ikattn.nn.selection import Selection, describe_unseen
from ikattn.recorder.entry import recorded
from ikattn.recorder.plan.parts import AttentionParts
from ikattn.recorder.plan.plan import Asked
from ikattn.recorder.plan.resolvers import find_attention
from ikattn.recorder.plan.run_maps import why_undefined

_LONGEST = 1 << 20  # tokenizers without a limit give far larger numbers


@dataclass
class AnalyzedModel:
    """A model of Hugging Face transformers with its tokenizer."""

    loaded: Loaded
    start: int | None  # the first token a decoder reads; None: no sequence-to-sequence model
    maps: tuple[str, ...]  # each layer gives those that it has
    max_length: int
    layers: frozenset[str] = frozenset()  # names of those to keep, ``name#2`` the second run's

    @staticmethod
    def load(job: Job, *, has_target: bool) -> AnalyzedModel:
        """Loads the model, and gets to know its layers by a recording of a few tokens."""
        about = {"trust_remote_code": False}
        with hushed():
            loaded = load(job.model, lambda library, _: library.AutoModel, about, job.device)
        config, tokenizer = loaded.model.config, loaded.tokenizer
        two_sided = bool(config.is_encoder_decoder)
        if two_sided != has_target:
            wants = "needs" if two_sided else "has no decoder that reads"
            raise AnalyzeError(
                f"{job.model} ({config.model_type}) {wants} a target text: "
                f"{'give' if two_sided else 'leave out'} --target-text or --target-file"
            )
        tokenizer.padding_side = "right"  # so that positions count from the first token
        if tokenizer.pad_token is None:  # any will do: padding is masked, and cut off
            others = (tokenizer.eos_token, tokenizer.unk_token)
            tokenizer.pad_token = next(filter(None, others), tokenizer.convert_ids_to_tokens(0))
        start = _first_token(job, config) if two_sided else None
        length = _max_length(job, loaded)
        model = AnalyzedModel(loaded, start, single_maps(job.maps), length)
        sites = [site.name for site in find_attention(loaded.model)]
        # on parameters after the last attention, such as those of a pooler, no map depends
        names = [name for name, _ in loaded.model.named_parameters()]
        begins = tuple(f"{site}." for site in sites)
        last = max((i for i, own in enumerate(names) if own.startswith(begins)), default=len(names))
        warn_of_missing(job.model, [own for own in loaded.missing if own in names[: last + 1]])
        patterns = None if any(map(_is_number, job.layers or ())) else job.layers
        if patterns is not None:
            _chosen(sites, patterns)
        with doing(f"{job.model}, recorded on {loaded.trial['input_ids'].numel()} tokens"):
            recording = model._recorded(loaded.trial, patterns)
        counts = {None, *(ids.size(1) for ids in loaded.trial.values())}
        sizes = {n: {size_of(recording[n], axis) for axis in "LS"} for n in recording.names}
        of_text = [name for name, own in sizes.items() if own <= counts]
        if apart := [name for name in sizes if name not in of_text]:
            told = f"{describe_unseen(apart)} made maps of other tokens than the text's: left out"
            warnings.warn(told, Notice, stacklevel=2)
        if not of_text:
            raise AnalyzeError(f"no layer of {job.model} gave maps of the text's tokens")
        model.layers = _chosen(of_text, job.layers)
        _check_maps(job, recording, model.layers)
        return model

    def has_tokens(self, line: Line) -> bool:
        """Whether the tokenizer leaves anything of a line, and of what a decoder reads with it."""
        texts = {"text": line.text}
        if self.start is not None and line.target is not None:
            texts["text_target"] = line.target
        return all(
            len(self.loaded.tokenizer(**{name: [text]}, verbose=False)["input_ids"][0]) > 0
            for name, text in texts.items()
        )

    def record(self, lines: Sequence[Line]) -> list[tuple[Recording, int]]:
        """A recording of each line, without padding, and its length where it had to be cut."""
        texts = [line.text for line in lines]
        inputs, tokens, lengths = self._encode(texts)
        target_tokens = target_mask = None
        if self.start is not None:
            targets = [line.target or "" for line in lines]
            labels, _, target_lengths = self._encode(targets, "text_target")
            ids = labels["input_ids"]
            first = torch.full_like(ids[:, :1], self.start)
            target_mask = labels["attention_mask"]
            inputs["decoder_input_ids"] = torch.cat([first, ids[:, :-1]], 1)
            inputs["decoder_attention_mask"] = target_mask
            ids = inputs["decoder_input_ids"]
            target_tokens = tokens_of_ids(self.loaded.tokenizer, ids, target_mask)
            lengths = [max(pair) for pair in zip(lengths, target_lengths, strict=True)]
        modules = {name.partition("#")[0] for name in self.layers}
        recording = self._recorded(inputs, lambda name, _: name in modules)
        recording.layers = {n: x for n, x in recording.layers.items() if n in self.layers}
        layers, mask = dict[str, Contributions](), inputs["attention_mask"]
        for name, layer in recording.layers.items():  # a model without a mask may not know padding
            own = target_mask if layer.side == "decoder" and target_mask is not None else mask
            of_queries, of_keys = (~x.bool() for x in (own, mask if layer.kind == "cross" else own))
            paddings: Any = {"query_padding": of_queries, "key_padding": of_keys}
            layers[name] = replace(recording[name], **paddings)
        found = []
        for i in range(len(lines)):
            batch = Batch(
                {name: batch_of_one(cut(one, i)) for name, one in layers.items()},
                [tokens[i]],
                None if target_tokens is None else [target_tokens[i]],
            )
            found.append((replace(recording, batches=[batch]), lengths[i]))
        return found

    def _recorded(self, inputs: dict[str, Tensor], layers: Selection | None) -> Recording:
        """One forward call, recorded: each layer with the maps that it has."""
        model = self.loaded.model
        given = {n: x.to(model.device) for n, x in taken_by(model, inputs).items()}
        with torch.no_grad(), recorded(model, Asked((), self.maps), layers=layers) as recording:
            model(**given)
        return recording

    def _encode(
        self, texts: list[str], argument: str = "text"
    ) -> tuple[dict[str, Tensor], list[list[str]], list[int]]:
        """Inputs ``[B, L]``, tokens, and each text's length where it is longer than allowed.

        The argument is "text", or "text_target" for what a decoder writes.
        """
        whole = self.loaded.tokenizer(**{argument: texts}, verbose=False)["input_ids"]
        encoded = self.loaded.tokenizer(
            **{argument: texts},
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
            return_attention_mask=True,
        )
        lengths = [len(ids) if len(ids) > self.max_length else 0 for ids in whole]
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        self.loaded.check(ids)
        return dict(encoded), tokens_of_ids(self.loaded.tokenizer, ids, mask), lengths


def _first_token(job: Job, config: Any) -> int:
    names = ("decoder_start_token_id", "pad_token_id", "bos_token_id")
    for token in (getattr(config, name, None) for name in names):
        if token is not None:
            return int(token)
    raise AnalyzeError(
        f"the config of {job.model} must have one of {', '.join(names)}, with which its decoder "
        "begins"
    )


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _chosen(names: Sequence[str], asked: Sequence[str] | None) -> frozenset[str]:
    """The layers that patterns and numbers name, each of which must name one; None: all."""
    kept = set(names if asked is None else ())
    for one in asked or ():
        if _is_number(one):
            found = names[int(one) :][:1] if -len(names) <= int(one) else ()
        else:
            found = [
                n for n in names if fnmatchcase(n, one) or fnmatchcase(n.partition("#")[0], one)
            ]
        if not found:
            raise AnalyzeError(
                f"--layers must be numbers below {len(names)} or patterns of "
                f"{describe_unseen(names)}, got {one!r}"
            )
        kept.update(found)
    return frozenset(kept)


def _check_maps(job: Job, recording: Recording, names: Iterable[str]) -> None:
    """Warns of maps that were asked for and some layers lack; refuses those that all lack."""
    layers = [recording.layers[name] for name in recording.names if name in names]
    for name in job.maps:
        if name in GROUPS:
            continue
        lacking = [x for x in layers if getattr(recording[x.name], name) in (None, {})]
        if not lacking:
            continue
        parts = AttentionParts(lacking[0].family, None, lacking[0].block)
        reason = why_undefined(name, parts, lacking[0].kind, has_run=True)
        if len(lacking) == len(layers):
            raise AnalyzeError(f"no layer of {job.model} has the map {name!r}: {reason}")
        without = describe_unseen([x.name for x in lacking])
        warnings.warn(f"{without} gave no map {name!r}: {reason}", Notice, stacklevel=2)


def _max_length(job: Job, loaded: Loaded) -> int:
    """Tokens a sequence may have: as asked for, and no more than the model has positions."""
    names = ("max_position_embeddings", "max_seq_len")
    told = (getattr(loaded.model.config, name, None) for name in names)
    limits = (loaded.positions, loaded.tokenizer.model_max_length, *told)
    allowed = min(_LONGEST, *(limit for limit in limits if limit and limit > 0))
    if job.max_length is None:
        return int(allowed)
    if job.max_length > allowed:
        raise AnalyzeError(
            f"--max-length must be at most {allowed}, what {job.model} can read, "
            f"got {job.max_length}"
        )
    return job.max_length
