"""
The answer in a conversation
============================

A small Llama learns to answer questions about what a user has said before.
:func:`ikattn.attribute` then tells how much each word of a conversation adds to the logit of the
answer. Nearly all of it comes from two words: the one that the user gave (red), and the topic that
the question names.
"""

import random

import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ikattn

ANSWERS = {
    "name": ["ada", "ben", "carl", "dora", "emil", "fay"],
    "city": ["rome", "oslo", "lima", "cairo", "quito", "perth"],
    "pet": ["cat", "dog", "fish", "horse", "parrot", "snail"],
}
REPLIES = ["nice", "okay", "really", "great"]
WORDS = ["user", ":", "assistant", "my", "is", ".", "what", "?", *ANSWERS, *REPLIES]
WORDS += [word for answers in ANSWERS.values() for word in answers]


def conversation(draw: random.Random) -> list[str]:
    """Three facts in any order, and a question about one of them."""
    words = []
    for topic in draw.sample(list(ANSWERS), 3):
        fact = f"user : my {topic} is {draw.choice(ANSWERS[topic])} ."
        words += f"{fact} assistant : {draw.choice(REPLIES)} .".split()
    topic = draw.choice(list(ANSWERS))
    answer = words[words.index(topic) + 2]
    return [*words, *f"user : what is my {topic} ? assistant : {answer}".split()]


def ids(words: list[str]) -> list[int]:
    return [WORDS.index(word) for word in words]


torch.manual_seed(0)
draw = random.Random(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=len(WORDS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(300):
    batch = torch.tensor([ids(conversation(draw)) for _ in range(64)])
    logits = model(batch[:, :-1], logits_to_keep=1).logits[:, -1]
    loss = torch.nn.functional.cross_entropy(logits, batch[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

words = conversation(random.Random(3))
prompt = torch.tensor([ids(words[:-1])])
found = ikattn.attribute(model.eval(), {"input_ids": prompt}, target=ids(words[-1:]))
scores = found.scores[0, : len(words) - 1]
figure, axis = plt.subplots(figsize=(9, 3.5), layout="constrained")
colors = ["C3" if word == words[-1] else "C0" for word in words[:-1]]
axis.bar(range(len(scores)), scores, color=colors)
axis.set_xticks(range(len(scores)), words[:-1], rotation=60, ha="right")
axis.set(title=f'what adds to the answer "{words[-1]}"', ylabel="logit")
