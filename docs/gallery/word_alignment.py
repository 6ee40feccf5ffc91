"""
Words aligned in a translation
==============================

A small encoder-decoder learns a toy language that says every sentence backwards, in other words.
Its cross-attention shows which word of the source each word of the translation comes from, and
:func:`ikattn.explain.word_alignment` reads the links from it.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import ikattn

torch.set_num_threads(1)
torch.manual_seed(0)
english = ["the", "a", "dog", "cat", "bird", "sees", "hears", "likes", "small", "old"]
toy = ["le", "un", "kani", "feli", "avi", "vidu", "audu", "ami", "piku", "anu"]
WORDS, LENGTH, START = len(english), 7, len(english)


class Translator(nn.Module):
    """Words with their places, a transformer of one layer on each side, and words again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList([nn.Embedding(WORDS, 32), nn.Embedding(WORDS + 1, 32)])
        self.places = nn.Parameter(0.5 * torch.randn(2, LENGTH, 32))
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.choice = nn.Linear(32, WORDS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, source: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Maps the source and the words so far, [N, 7], to logits of the next words."""
        x, y = (
            words(ids) + places
            for words, ids, places in zip(self.words, (source, before), self.places, strict=True)
        )
        return self.choice(self.transformer(x, y, tgt_mask=self.mask, tgt_is_causal=True))


def sentences(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns sources, translations, and what the decoder reads: the words before."""
    source = torch.randint(WORDS, (count, LENGTH))
    target = source.flip(1)
    return source, target, torch.cat([torch.full((count, 1), START), target[:, :-1]], 1)


model = Translator()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(300):
    source, target, before = sentences(64)
    loss = nn.functional.cross_entropy(model(source, before).flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
# Record the cross-attention of one sentence, and link its words.

source, target, before = sentences(1)
cross = "transformer.decoder.*multihead_attn"
with torch.no_grad(), ikattn.record(model.eval(), "summed", layers=cross) as recording:
    model(source, before)
map_ = recording[0].summed
numbers = list(range(LENGTH))
(links,) = ikattn.explain.word_alignment(map_, [numbers], [numbers])

plt.figure(figsize=(5, 4.4))
plt.imshow(map_[0], cmap="YlOrRd")
for of_source, of_target in links:
    plt.plot(of_source, of_target, "o", color="black", fillstyle="none", markersize=16)
plt.xticks(numbers, [english[i] for i in source[0]], rotation=45, ha="right")
plt.yticks(numbers, [toy[i] for i in target[0]])
plt.tight_layout()
