#!/usr/bin/env python
"""Train the demo model that ships in fminfer/demo_model, from nothing, on a CPU in minutes.

The task is the navigation question of the project's first users, "How do you go from
the bathroom to the office?", asked of one house whose rooms stand on a fixed grid. The model is
never shown the
grid: it sees questions about nine tenths of the pairs of rooms with their answers, and
exact match is measured on the last tenth, prompts it has never seen. The card
(README.md beside the weights) is written from what this run measured.

    python scripts/train_demo_model.py --minutes 6

It does not know fminfer: the model is transformers' own Llama, so that anything may load it.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# The house, row by row, north at the top.
HOUSE = (
    ("attic", "balcony", "terrace", "library", "study", "office"),
    ("bathroom", "bedroom", "nursery", "corridor", "hallway", "lounge"),
    ("kitchen", "pantry", "den", "studio", "workshop", "closet"),
    ("garden", "veranda", "porch", "garage", "cellar", "basement"),
)
EOS = "<|endoftext|>"
# Rotary positions are relative: the short questions of the training are answered at any
# place. The first users' own sample has 608 tokens.
CONTEXT = 1024
IGNORE = -100  # torch's cross entropy leaves these targets out
Example = tuple[str, str]  # prompt, answer


def all_examples() -> list[Example]:
    """List every question about two different rooms, with its answer: north or south first."""
    where = {room: (x, y) for y, row in enumerate(HOUSE) for x, room in enumerate(row)}
    examples = []
    for start, (x, y) in where.items():
        for goal, (u, v) in where.items():
            steps = ["north" if v < y else "south"] * abs(v - y)
            steps += ["west" if u < x else "east"] * abs(u - x)
            question = (
                f"Question: How do you go from the {start} to the {goal}?\nAnswer:"
            )
            if steps:
                examples.append((question, " " + " ".join(steps)))
    return examples


def split_examples(seed: int) -> tuple[list[Example], list[Example]]:
    """Return the trained and the held-out examples, nine tenths and one tenth."""
    examples = all_examples()
    random.Random(seed).shuffle(examples)
    tenth = len(examples) // 10
    return examples[tenth:], examples[:tenth]


def train_tokenizer(examples: list[Example]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the task's own words; every other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (prompt + answer + "\n" for prompt, answer in examples), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS
    )


def encode_batch(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets, each (rows, longest); only answers and their ends are targets."""
    prompts = tokenizer([prompt for prompt, _ in examples])["input_ids"]
    answers = tokenizer([answer + "\n" + EOS for _, answer in examples])["input_ids"]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(examples), longest), tokenizer.eos_token_id)
    targets = torch.full((len(examples), longest), IGNORE)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        first = len(prompt)
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        targets[row, first - 1 : end - 1] = ids[row, first:end]
    return ids, targets


@torch.no_grad()
def exact_match(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> float:
    """Return the share of examples whose whole answer, newline and end included, is greedy."""
    ids, targets = encode_batch(tokenizer, examples)
    greedy = model.eval()(input_ids=ids).logits.argmax(-1)
    return float(((greedy == targets) | (targets == IGNORE)).all(-1).float().mean())


@click.command()
@click.option("--minutes", default=6.0, show_default=True, help="Train for so long.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--output", default="fminfer/demo_model", show_default=True)
def main(
    minutes: float, batch_size: int, learning_rate: float, seed: int, output: str
) -> None:
    """Train, measure, and write model, tokenizer and card to OUTPUT."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    trained, held_out = split_examples(seed)
    tokenizer = train_tokenizer(all_examples())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.5
    )
    started = time.monotonic()
    step = 0
    while (share := (time.monotonic() - started) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = (
                learning_rate * min(1.0, (step + 1) / 100) * (1 - 0.95 * share)
            )
        ids, targets = encode_batch(tokenizer, rng.sample(trained, batch_size))
        logits = model.train()(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            found = [
                exact_match(model, tokenizer, part)
                for part in (trained[:100], held_out)
            ]
            click.echo(
                f"step {step}  loss {loss.item():.4f}  exact match {found[0]:.0%} trained, "
                f"{found[1]:.1%} held out"
            )
    write_model(model, tokenizer, Path(output), held_out, step)


def write_model(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    held_out: list[Example],
    num_steps: int,
) -> None:
    """Save weights, tokenizer, the held-out questions, and the card with the measured figure."""
    match = exact_match(model, tokenizer, held_out)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    house = "\n".join(
        "    " + "".join(f"{room:<10}" for room in row).rstrip() for row in HOUSE
    )
    card = CARD.format(
        match=match,
        num_steps=num_steps,
        num_held_out=len(held_out),
        num_all=len(all_examples()),
        num_parameters=sum(p.numel() for p in model.parameters()),
        house=house,
    )
    (folder / "README.md").write_text(card)
    click.echo(f"{folder}: exact match {match:.1%} on {len(held_out)} held-out prompts")


CARD = """# The demo model of fminfer

A Llama of 2 layers × 64 ({num_parameters:,} parameters, float32, byte-level BPE), trained
from nothing by `scripts/train_demo_model.py` in {num_steps:,} steps on a CPU. It knows one
thing: the way from any room to any other in this house, north at the top.

{house}

It answers with the steps, north or south first:

    Question: How do you go from the bathroom to the office?
    Answer: north east east east east east

**Measured:** {match:.1%} exact match (every step and the end, greedy) on {num_held_out}
held-out prompts of {num_all}. Held-out pairs of rooms were never trained on, in this
direction; the grid was never shown.

In chat, `chat_template.jinja` asks the last message of the user as the question, and leaves out
what was said before.

**Limits:** this house, this question, one at a time. On anything else it babbles. The
context is 1,024 tokens, so that the first users' own sample (608 tokens) runs; a question is
answered alike at any position of it, but not behind another text. It is there so that
`fminfer run` can be tried without a download, and for tests. The question is that of the
first users' data, without the passage of facts that stood before it there: models of this
size, trained for minutes, did not learn to read such passages.

Licence: Apache-2.0, like the project; the training data is generated by the script.
"""

if __name__ == "__main__":
    main()
