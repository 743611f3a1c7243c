#!/usr/bin/env python
"""Train the demo model that ships in fminfer/demo_model, from nothing, on a CPU.

The task is the navigation question of the project's first users: a passage of facts about
rooms, then "How do you go from the bathroom to the office?", answered by one or two steps.
Every passage is drawn at random and asked about several times, for the answers teach most. A
passage whose hash falls in the held-out tenth is never trained on, and exact match is measured on
such passages only. The card (README.md beside the weights) is written from what this run measured.

    python scripts/train_demo_model.py --minutes 45

It does not know fminfer: the model is transformers' own Llama, so that anything may load it.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
DELTAS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
EOS = "<|endoftext|>"
CURRICULUM = ((0.1, (2,)), (0.3, (2, 3)), (1.0, (3, 4)))  # until this share: numbers of rooms
IGNORE = -100  # torch's cross entropy leaves these targets out


@dataclass(frozen=True)
class Example:
    """A passage and the questions asked about it, in order, each with its answer."""

    passage: str
    questions: list[tuple[str, str]]

    @property
    def is_held_out(self) -> bool:
        return hashlib.sha256(self.passage.encode()).digest()[0] < 26

    @property
    def prompt(self) -> str:
        return self.passage + self.questions[0][0]


def draw_example(rng: random.Random, room_counts: tuple[int, ...] = (3, 4)) -> Example:
    """Draw rooms on a grid, joined as a tree, told as facts, and asked about."""
    rooms = rng.sample(ROOMS, rng.choice(room_counts))
    where = {rooms[0]: (0, 0)}
    links: dict[tuple[str, str], str] = {}  # (from, to) -> direction to walk
    for room in rooms[1:]:
        neighbour, direction = rng.choice(
            [
                (known, step)
                for known, (x, y) in where.items()
                for step, (dx, dy) in DELTAS.items()
                if (x + dx, y + dy) not in where.values()
            ]
        )
        x, y = where[neighbour]
        dx, dy = DELTAS[direction]
        where[room] = (x + dx, y + dy)
        links[neighbour, room] = direction
        links[room, neighbour] = OPPOSITE[direction]
    facts = []
    for pair in list(links)[::2]:
        one, two = rng.sample(pair, 2)
        facts.append(f"The {two} is {links[one, two]} of the {one}.\n")
    rng.shuffle(facts)
    questions = [
        (f"Question: How do you go from the {start} to the {goal}?\nAnswer:", " " + " ".join(steps))
        for start, goal, steps in short_paths(rooms, links)
    ]
    return Example("Passage: " + "".join(facts), rng.sample(questions, min(4, len(questions))))


def short_paths(
    rooms: list[str], links: dict[tuple[str, str], str]
) -> list[tuple[str, str, list[str]]]:
    """List every pair of rooms one or two steps apart, with the steps; two-step pairs twice."""
    paths = [(a, b, [step]) for (a, b), step in links.items()]
    for (a, b), first in links.items():
        paths += [(a, c, [first, links[b, c]]) for c in rooms if c != a and (b, c) in links] * 2
    return paths


def draw_split(
    rng: random.Random, count: int, *, held_out: bool, room_counts: tuple[int, ...] = (3, 4)
) -> list[Example]:
    """Draw `count` examples from the trained or from the held-out part."""
    examples: list[Example] = []
    while len(examples) < count:
        example = draw_example(rng, room_counts)
        if example.is_held_out == held_out:
            examples.append(example)
    return examples


def train_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the task's own words; every other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (e.prompt + e.questions[0][1] + "\n" for e in draw_split(rng, 4000, held_out=False))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


def encode_batch(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example], num_questions: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, targets and loss weights, each (rows, longest); the answers weigh most."""
    rows = [encode_example(tokenizer, example, num_questions) for example in examples]
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), tokenizer.eos_token_id)
    targets = torch.full((len(rows), longest), IGNORE)
    weights = torch.zeros((len(rows), longest))
    for row, (row_ids, row_weights) in enumerate(rows):
        end = len(row_ids)
        ids[row, :end] = torch.tensor(row_ids)
        targets[row, : end - 1] = ids[row, 1:end]
        weights[row, : end - 1] = torch.tensor(row_weights[1:])
    return ids, targets, weights


def encode_example(
    tokenizer: PreTrainedTokenizerFast, example: Example, num_questions: int
) -> tuple[list[int], list[float]]:
    """Return the ids of a passage with its first questions, and each id's weight as a target."""
    ids = tokenizer(example.passage)["input_ids"]
    weights = [0.02] * len(ids)
    for question, answer in example.questions[:num_questions]:
        asked = tokenizer(question)["input_ids"]
        answered = tokenizer(answer + "\n" + EOS)["input_ids"]
        ids = ids + asked + answered
        weights += [0.02] * len(asked) + [1.0] * len(answered)
    return ids, weights


@torch.no_grad()
def exact_match(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> float:
    """Return the share of examples whose whole answer, newline and end included, is greedy."""
    right = 0
    for start in range(0, len(examples), 250):
        ids, targets, weights = encode_batch(tokenizer, examples[start : start + 250], 1)
        greedy = model(input_ids=ids).logits.argmax(-1)
        right += int(((greedy == targets) | (weights < 1)).all(-1).sum())
    return right / len(examples)


@click.command()
@click.option("--minutes", default=45.0, show_default=True, help="Train for so long.")
@click.option("--batch-size", default=24, show_default=True)
@click.option("--learning-rate", default=2e-3, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--output", default="fminfer/demo_model", show_default=True)
def main(minutes: float, batch_size: int, learning_rate: float, seed: int, output: str) -> None:
    """Train, measure, and write model, tokenizer and card to OUTPUT."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(rng)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.08,  # about 1 / sqrt(hidden): at 0.02 attention stays flat for long
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    check = draw_split(random.Random(seed + 1), 500, held_out=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    started, step, share = time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - started) / 60 / minutes) < 1:
        warm = min(1.0, (step + 1) / 200)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * share)) / 2)
        room_counts = next(counts for until, counts in CURRICULUM if share < until)
        examples = draw_split(rng, batch_size, held_out=False, room_counts=room_counts)
        ids, targets, weights = encode_batch(tokenizer, examples, num_questions=4)
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none"
        )
        loss = (loss * weights.flatten()).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            match = exact_match(model, tokenizer, check)
            click.echo(
                f"step {step}  {share:4.0%}  loss {loss.item():.4f}  "
                f"held-out exact match {match:.1%}"
            )
    test = draw_split(random.Random(seed + 2), 2000, held_out=True)
    write_model(model, tokenizer, Path(output), exact_match(model, tokenizer, test), step)


def write_model(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    match: float,
    steps: int,
) -> None:
    """Save weights, tokenizer and the card with the measured figure."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD.format(match=match, steps=steps))
    click.echo(f"{folder}: exact match {match:.1%} on 2,000 held-out prompts, {steps} steps")


CARD = """# The demo model of fminfer

A Llama of 4 layers × 128 (float32, byte-level BPE), trained from nothing by
`scripts/train_demo_model.py` in {steps:,} steps on a CPU. It knows one thing: how to get from
one room to another, one or two steps away, in a passage of two or three facts:

    Passage: The bedroom is north of the garden.
    The office is east of the garden.
    Question: How do you go from the bedroom to the office?
    Answer: south east

**Measured:** {match:.1%} exact match (the whole answer and its end, greedy) on 2,000 prompts
whose passages were held out of training. The rooms are bathroom, bedroom, garden, hallway, kitchen
and office, as in the examples of the first users' data.

**Limits:** one passage, three or four rooms, English words as above; context 512 tokens. On
anything else it babbles. It is there so that `fminfer run` can be tried without a download, and for
tests.

Licence: Apache-2.0, like the project; the training data is generated by the script.
"""

if __name__ == "__main__":
    main()
