"""A model of Hugging Face transformers and its tokenizer: from lines of text to recordings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ikattn._command.errors import AnalyzeError, doing
from ikattn._command.job import GROUPS, Job, Line, single_maps
from ikattn._command.loading import hushed, load
from ikattn.analysis._recorder.parts import AttentionParts
from ikattn.analysis._recorder.plan import Asked
from ikattn.analysis._recorder.record import recorded
from ikattn.analysis._recorder.run_maps import why_undefined
from ikattn.analysis._sequences import batch_of_one, cut
from ikattn.analysis.attribution._texts import taken_by
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.maps import Batch, Layer
from ikattn.analysis.recording import Recording
from ikattn.analysis.tokens import readable_tokens
from ikattn.nn.selection import Selection, describe_unseen

__all__ = ["AnalyzedModel"]

_LONGEST = 1 << 20  # a tokenizer without a limit gives a far larger number
_TRIED = 4  # tokens of the call by which a model is got to know


@dataclass
class AnalyzedModel:
    """A model of Hugging Face transformers with its tokenizer."""

    module: Any
    tokenizer: Any
    device: torch.device
    start: int | None  # the first token a decoder reads; None: no sequence-to-sequence model
    maps: tuple[str, ...]  # each layer gives those that it has
    max_length: int = _LONGEST
    vocabulary: int = _LONGEST  # rows of the smallest table of tokens
    layers: frozenset[str] = frozenset()  # names of those to keep, ``name#2`` the second run's
    modules: frozenset[str] = frozenset()  # names of theirs

    @staticmethod
    def load(job: Job, *, has_target: bool) -> AnalyzedModel:
        with hushed():
            module, tokenizer = load(
                job.model,
                lambda transformers, _: transformers.AutoModel,
                {"trust_remote_code": False},
            )
        config = module.config
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
        start = None
        if two_sided:
            names = ("decoder_start_token_id", "pad_token_id", "bos_token_id")
            tokens = [getattr(config, name, None) for name in names]
            start = next((token for token in tokens if token is not None), None)
            if start is None:
                raise AnalyzeError(
                    f"the config of {job.model} must have one of {', '.join(names)}, with which "
                    "its decoder begins"
                )
        device = torch.device(job.device)
        model = AnalyzedModel(module.to(device), tokenizer, device, start, single_maps(job.maps))
        model._get_to_know(job)
        return model

    def _get_to_know(self, job: Job) -> None:
        """Finds the longest sequence, and the layers, by a call with a few tokens.

        Raises:
            AnalyzeError: The model has no such layers or maps, or does not read text alone.
        """
        padding = {self.tokenizer.pad_token_id, getattr(self.module.config, "pad_token_id", None)}
        ids = [i for i in range(_TRIED + len(padding)) if i not in padding][_TRIED - 1 :: -1]
        inputs = {"input_ids": torch.tensor([ids], device=self.device)}
        if self.start is not None:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        patterns = None if any(map(_is_number, job.layers or ())) else job.layers
        with doing(f"{job.model}, called with {_TRIED} tokens"), _Tables(ids) as tables:
            recording = self._recorded(inputs, patterns)
        self.vocabulary = tables.tokens
        self.max_length = _max_length(job, self.tokenizer, self.module.config, tables.positions)
        self.layers = _chosen(recording.names, job.layers)
        self.modules = frozenset(name.partition("#")[0] for name in self.layers)
        _check_maps(job, recording, self.layers)

    @property
    def map_dtype(self) -> torch.dtype:
        """The type of maps in tables: float64 of a model that has it, else float32."""
        dtypes = {parameter.dtype for parameter in self.module.parameters()}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def has_tokens(self, line: Line) -> bool:
        """Whether the tokenizer leaves anything of a line, and of what a decoder reads with it."""
        texts = {"text": line.text}
        if self.start is not None and line.target is not None:
            texts["text_target"] = line.target
        return all(
            len(self.tokenizer(**{name: [text]}, verbose=False)["input_ids"][0]) > 0
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
            target_tokens = self._tokens(inputs["decoder_input_ids"], target_mask)
            lengths = [max(pair) for pair in zip(lengths, target_lengths, strict=True)]
        on_device = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        recording = self._recorded(on_device, lambda name, _: name in self.modules)
        recording.layers = {
            name: layer for name, layer in recording.layers.items() if name in self.layers
        }
        layers = {
            name: _with_padding(layer, recording[name], inputs["attention_mask"], target_mask)
            for name, layer in recording.layers.items()
        }
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
        with torch.no_grad(), recorded(self.module, Asked((), self.maps), layers=layers) as found:
            self.module(**taken_by(self.module, inputs))
        return found

    def _encode(
        self, texts: list[str], argument: str = "text"
    ) -> tuple[dict[str, Tensor], list[list[str]], list[int]]:
        """Inputs ``[B, L]``, tokens, and each text's length where it is longer than allowed.

        Args:
            texts: B of them.
            argument: "text", or "text_target" for what a decoder writes.
        """
        whole = self.tokenizer(**{argument: texts}, verbose=False)["input_ids"]
        encoded = self.tokenizer(
            **{argument: texts},
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
            return_attention_mask=True,
        )
        lengths = [len(ids) if len(ids) > self.max_length else 0 for ids in whole]
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        largest = int(ids.max())
        if largest >= self.vocabulary:
            raise AnalyzeError(
                f"the tokenizer gives {self.tokenizer.convert_ids_to_tokens(largest)!r} the number "
                f"{largest}, and the model has a table of {self.vocabulary} tokens: they are not "
                "of one model"
            )
        return dict(encoded), self._tokens(ids, mask), lengths

    def _tokens(self, ids: Tensor, mask: Tensor) -> list[list[str]]:
        return [
            readable_tokens(self.tokenizer, row[kept.bool()].tolist())
            for row, kept in zip(ids, mask, strict=True)
        ]


class _Tables(TorchFunctionMode):
    """Notes the tables that a call reads: of tokens, and of positions, which are consecutive.

    Attributes:
        tokens: Rows of the smallest table of tokens.
        positions: The longest sequence that the tables of positions have rows for; some have rows
            before that of the first position, for padding.
    """

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.tokens = self.positions = _LONGEST
        self._ids = ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.embedding and len(args) > 1:
            read, table = args[:2]
            rows = read.reshape(-1, read.size(-1)).unique(dim=0).tolist() if read.numel() else []
            if rows == [self._ids]:
                self.tokens = min(self.tokens, table.size(0))
            elif len(rows) == 1 and rows[0] == [rows[0][0] + i for i in range(len(self._ids))]:
                self.positions = min(self.positions, table.size(0) - rows[0][0])
        return func(*args, **(kwargs or {}))


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _chosen(names: Sequence[str], asked: Sequence[str] | None) -> frozenset[str]:
    """The layers that patterns and numbers name; None: all.

    Raises:
        AnalyzeError: One of them names none.
    """
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
    """Warns of maps that were asked for by name, and that some layers lack.

    Raises:
        AnalyzeError: No layer has one of them.
    """
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
        warnings.warn(f"{without} have no map {name!r}: {reason}", stacklevel=2)


def _max_length(job: Job, tokenizer: Any, config: Any, positions: int) -> int:
    """Tokens a sequence may have: as asked for, and no more than the model has positions."""
    limits = (tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
    allowed = min(positions, *(limit for limit in limits if limit))
    if job.max_length is None:
        return int(allowed)
    if job.max_length > allowed:
        raise AnalyzeError(
            f"--max-length must be at most {allowed}, what {job.model} can read, "
            f"got {job.max_length}"
        )
    return job.max_length


def _with_padding(
    layer: Layer, maps: Contributions, mask: Tensor, target_mask: Tensor | None
) -> Contributions:
    """The maps with padding as the tokenizer made it: a model without a mask may not know it."""
    decoder = layer.side == "decoder" and target_mask is not None
    own = target_mask if decoder and target_mask is not None else mask
    of_keys = mask if layer.kind == "cross" else own
    return replace(maps, query_padding=~own.bool(), key_padding=~of_keys.bool())
