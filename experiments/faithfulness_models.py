"""The models whose attributions experiments/faithfulness.py measures, and what they are asked.

Sizes: B sentences, S tokens of the text that is attributed, V classes or words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from comparison import pad
from parallel_text import BEGIN, END, Numbers, batches, by_length, gather, number_pairs, read_corpus
from sentences import DATA_SETS, Sentence, read

PAD, UNKNOWN, MASK, CLS, SEP = range(5)  # of the small BERT
BATCH = 64
MASKED = 0.2  # of the words in training, so that texts with masked words are known


class Question(NamedTuple):
    """A batch, and what is asked of the model.

    Attributes:
        inputs: ``input_ids`` ``[B, S]`` and others.
        keep: bool ``[B, S]``, tokens that are never taken away.
        output: From what the model gives to logits ``[B, V]``.
    """

    inputs: dict[str, Tensor]
    keep: Tensor
    output: Callable[[Any], Tensor]


class Task(NamedTuple):
    """A trained model and its test set.

    Attributes:
        model: In eval mode.
        questions: Of the test set.
        mask_id: Of the token that stands for a word that was taken away.
        said: How good the model is, for people.
    """

    model: Any
    questions: list[Question]
    mask_id: int
    said: str


def with_masked_words(
    ids: Tensor, free: Tensor, mask_id: int, generator: torch.Generator
) -> Tensor:
    """One word in five of ``free`` replaced by the mask."""
    hidden = (torch.rand(ids.shape, generator=generator) < MASKED) & free
    return ids.masked_fill(hidden, mask_id)


def logits_of(output: Any) -> Tensor:
    return output.logits


def accuracy(model: Any, questions: list[Question], labels: list[Tensor]) -> str:
    with torch.no_grad():
        right = [
            question.output(model(**question.inputs)).argmax(-1) == own
            for question, own in zip(questions, labels, strict=True)
        ]
    return f"{100 * float(torch.cat(right).double().mean()):.1f} %"


# --- Sentences, a small BERT from scratch


def sentiment(folder: Path, attention: str, seed: int, quick: bool, count: int) -> Task:
    """SST-2, a BERT of two blocks of size 64 with word embeddings from scratch."""
    training, _, test = (read(folder, file) for file in DATA_SETS["sst2"])
    training = training[:320] if quick else training
    counts = Counter(word for sentence in training for word in sentence.words)
    known = [word for word, count in counts.items() if count > 1]
    vocabulary = {word: number for number, word in enumerate(known, start=SEP + 1)}
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=128,
        vocab_size=len(vocabulary) + SEP + 1,
        max_position_embeddings=72,
        hidden_dropout_prob=0.3,
        pad_token_id=PAD,
    )
    model = transformers.BertForSequenceClassification(config)
    if attention == "implicit":
        ikattn.convert(model, num_frequencies=32, seed=0)
    shuffle, generator = np.random.RandomState(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(1 if quick else 6):
        order = shuffle.permutation(len(training))
        for ids, labels in _of_words([training[i] for i in order], vocabulary):
            inputs = {
                "input_ids": with_masked_words(ids, ids > SEP, MASK, generator),
                "attention_mask": (ids != PAD).long(),
            }
            _step(model, optimizer, F.cross_entropy(model(**inputs).logits, labels))
    model.eval()
    questions, labels = [], []
    for ids, own in _of_words(test[:count], vocabulary):
        inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
        questions.append(Question(inputs, (ids == CLS) | (ids == SEP), logits_of))
        labels.append(own)
    return Task(model, questions, MASK, f"accuracy {accuracy(model, questions, labels)}")


def _of_words(
    sentences: list[Sentence], vocabulary: dict[str, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(sentences), BATCH):
        chosen = sentences[start : start + BATCH]
        rows = [[CLS, *(vocabulary.get(word, UNKNOWN) for word in s.words), SEP] for s in chosen]
        yield pad(rows), torch.tensor([s.label for s in chosen])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# --- Sentences, a pretrained encoder


class Probe(nn.Module):
    """A linear classifier of the mean over tokens of a pretrained encoder that stays as it is."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.config.hidden_size, classes)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def mean(self, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        hidden = self.encoder(attention_mask=attention_mask, **inputs).last_hidden_state
        there = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * there).sum(1) / there.sum(1)

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> Any:
        logits = self.classifier(self.mean(attention_mask, **inputs))
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=logits)


def pretrained(folder: Path, encoder: Path, seed: int, quick: bool, count: int) -> Task:
    """SST-2, a classifier of the sentence vectors of a pretrained encoder such as MiniLM."""
    training, _, test = (read(folder, file) for file in DATA_SETS["sst2"])
    training = training[:320] if quick else training
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    torch.manual_seed(seed)
    model = Probe(transformers.AutoModel.from_pretrained(encoder), 2).eval()

    def encoded(sentences: list[Sentence]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for start in range(0, len(sentences), BATCH):
            chosen = sentences[start : start + BATCH]
            texts = [" ".join(s.words) for s in chosen]
            made = tokenizer(
                texts, padding=True, truncation=True, max_length=64, return_tensors="pt"
            )
            inputs = {name: made[name] for name in ("input_ids", "attention_mask")}
            yield inputs, torch.tensor([s.label for s in chosen])

    with torch.no_grad():
        pairs = [(model.mean(**inputs), labels) for inputs, labels in encoded(training)]
    vectors, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    optimizer = torch.optim.Adam(model.classifier.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(20 if quick else 500):
        _step(model, optimizer, F.cross_entropy(model.classifier(vectors), labels))
    questions, expected = [], []
    for inputs, own in encoded(test[:count]):
        ids = inputs["input_ids"]
        keep = (ids == tokenizer.cls_token_id) | (ids == tokenizer.sep_token_id)
        questions.append(Question(inputs, keep, logits_of))
        expected.append(own)
    said = f"accuracy {accuracy(model, questions, expected)}"
    return Task(model, questions, tokenizer.mask_token_id, said)


# --- Translation


def translation(folder: Path, seed: int, quick: bool, count: int) -> Task:
    """Multi30k, German to English, two blocks a side of size 128.

    Asked is the word in the middle of the translation, after the true words before it; what is
    taken away are words of the source.
    """
    corpus = read_corpus(folder, "test_2016_flickr", quick=quick)
    words = corpus.tokenizer.get_vocab_size()
    mask_id = words
    torch.manual_seed(seed)
    config = transformers.MBartConfig(
        vocab_size=words + 1,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        dropout=0.2,
        max_position_embeddings=160,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=BEGIN,
        scale_embedding=False,
        init_std=0.08,
        bos_token_id=BEGIN,
    )
    model = transformers.MBartForConditionalGeneration(config)
    pairs = number_pairs(corpus.tokenizer, corpus.train)
    epochs = 1 if quick else 8
    generator, shuffle = torch.Generator().manual_seed(seed), np.random.RandomState(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    model.train()
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - 0.9 * epoch / epochs)
        chunks = list(batches(pairs, by_length(pairs, range(len(pairs)))))
        for i in shuffle.permutation(len(chunks)):
            source, target = gather(pairs, chunks[i])
            masked = with_masked_words(source, source > END, mask_id, generator)
            logits = model(
                input_ids=masked,
                attention_mask=(source != PAD).long(),
                decoder_input_ids=target[:, :-1],
            ).logits
            loss = F.cross_entropy(
                logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1
            )
            _step(model, optimizer, loss)
    model.eval()
    return _of_words_in_the_middle(
        model, number_pairs(corpus.tokenizer, corpus.test)[:count], mask_id
    )


def _of_words_in_the_middle(model: Any, pairs: list[Numbers], mask_id: int) -> Task:
    questions, labels = [], []
    for start in range(0, len(pairs), BATCH):
        chosen = pairs[start : start + BATCH]
        ids = pad([pair.source for pair in chosen])
        before = [pair.target[: len(pair.target) // 2] for pair in chosen]
        last = torch.tensor([len(row) - 1 for row in before])
        rows = torch.arange(len(chosen))

        def output(found: Any, rows: Tensor = rows, last: Tensor = last) -> Tensor:
            return found.logits[rows, last]

        inputs = {
            "input_ids": ids,
            "attention_mask": (ids != PAD).long(),
            "decoder_input_ids": pad(before),
        }
        questions.append(Question(inputs, ids == END, output))
        labels.append(torch.tensor([pair.target[len(pair.target) // 2] for pair in chosen]))
    return Task(model, questions, mask_id, f"next words right {accuracy(model, questions, labels)}")
