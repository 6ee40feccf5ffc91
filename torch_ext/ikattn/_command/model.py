"""A model of Hugging Face transformers and its tokenizer: from lines of text to recordings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ikattn._command.errors import AnalyzeError
from ikattn._command.job import Job, Line, single_maps
from ikattn.analysis._recorder.record import record
from ikattn.analysis._recorder.resolvers import find_attention
from ikattn.analysis._recorder.run_maps import why_undefined
from ikattn.analysis._sequences import batch_of_one, cut
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.maps import Batch, Layer
from ikattn.analysis.recording import Recording
from ikattn.analysis.tokens import readable_tokens
from ikattn.integrations.transformers import from_pretrained
from ikattn.integrations.transformers._implicit import settings_of

__all__ = ["AnalyzedModel"]

_LONGEST = 1 << 20  # a tokenizer without a limit gives a far larger number


@dataclass
class AnalyzedModel:
    """A model of Hugging Face transformers with its tokenizer."""

    module: Any
    tokenizer: Any
    max_length: int
    device: torch.device
    start: int | None  # the first token a decoder reads; None: no sequence-to-sequence model
    layers_of: dict[tuple[str, ...], list[str]]  # maps, and the layers that give them
    order: list[str]  # of the layers

    @staticmethod
    def load(job: Job, *, has_target: bool) -> AnalyzedModel:
        transformers = import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
            module = _load_module(transformers, job.model).eval().to(job.device)
        except Exception as error:  # of many libraries, and each of them means this
            cause = str(error).strip().splitlines() or [type(error).__name__]
            raise AnalyzeError(f"cannot load the model {job.model}: {cause[0]}") from error
        config = module.config
        two_sided = bool(config.is_encoder_decoder)
        if two_sided != has_target:
            wants = "needs" if two_sided else "has no decoder that reads"
            raise AnalyzeError(
                f"{job.model} ({config.model_type}) {wants} a target text: "
                f"{'give' if two_sided else 'leave out'} --target-text or --target-file"
            )
        tokenizer.padding_side = "right"  # so that positions count from the first token
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        start = None
        if two_sided:
            start = config.decoder_start_token_id
            if start is None:
                start = config.pad_token_id
        length = _max_length(job, tokenizer, config)
        layers_of = _maps_by_layer(job, module)
        order = [site.name for site in find_attention(module)]
        device = torch.device(job.device)
        return AnalyzedModel(module, tokenizer, length, device, start, layers_of, order)

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
        recording = self._run(on_device)
        layers = {
            name: _with_padding(
                recording.layers[name], maps_of_layer, inputs["attention_mask"], target_mask
            )
            for name, maps_of_layer in recording.batches[0].items()
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

    def _run(self, inputs: dict[str, Tensor]) -> Recording:
        """One forward call, recorded: each layer with the maps that it has."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            parts = [
                stack.enter_context(
                    record(self.module, maps, layers=lambda name, _, chosen=names: name in chosen)
                )
                for maps, names in self.layers_of.items()
            ]
            self.module(**inputs)
        layers = {name: layer for part in parts for name, layer in part.layers.items()}
        maps = {name: maps for part in parts for name, maps in part.batches[0].items()}
        order = sorted(layers, key=lambda name: self.order.index(name.partition("#")[0]))
        return Recording(
            parts[0].model,
            tuple(dict.fromkeys(name for part in parts for name in part.maps)),
            {name: layers[name] for name in order},
            [Batch({name: maps[name] for name in order})],
        )

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
        return (
            dict(encoded),
            self._tokens(encoded["input_ids"], encoded["attention_mask"]),
            lengths,
        )

    def _tokens(self, ids: Tensor, mask: Tensor) -> list[list[str]]:
        return [
            readable_tokens(self.tokenizer, row[kept.bool()].tolist())
            for row, kept in zip(ids, mask, strict=True)
        ]


def _maps_by_layer(job: Job, module: Any) -> dict[tuple[str, ...], list[str]]:
    """Which maps to take of which layers.

    Raises:
        AnalyzeError: A map was named that no layer has.
    """
    wanted = single_maps(job.maps)
    missing: dict[str, str] = {}
    layers_of: dict[tuple[str, ...], list[str]] = {}
    for site in find_attention(module):
        reasons: dict[str, str | None] = {}
        if not isinstance(site.parts, str):  # else record will say why not
            kind = site.parts.kind
            reasons = {name: why_undefined(name, site.parts, kind) for name in wanted}
        missing |= {name: reason for name, reason in reasons.items() if reason is not None}
        having = tuple(name for name in wanted if reasons.get(name) is None)
        if having:
            layers_of.setdefault(having, []).append(site.name)
    for name in job.maps:
        if name in missing and not any(name in having for having in layers_of):
            raise AnalyzeError(f"no layer of {job.model} has the map {name!r}: {missing[name]}")
    return layers_of or {wanted: []}  # record will say that there is no attention


def _load_module(transformers: Any, name: str) -> Any:
    """The model, with the frequencies that ``use_implicit_attention`` gave it, if it did."""
    config = transformers.AutoConfig.from_pretrained(name)
    if settings_of(config) is None:
        return transformers.AutoModel.from_pretrained(name)
    return from_pretrained(transformers.AutoModel, name)


def _max_length(job: Job, tokenizer: Any, config: Any) -> int:
    """Tokens a sequence may have: as asked for, and no more than the model has positions."""
    positions = getattr(config, "max_position_embeddings", None) or _LONGEST
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "longformer"):
        positions -= config.pad_token_id + 1  # theirs begin after that of padding
    allowed = min(tokenizer.model_max_length, positions, _LONGEST)
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
