"""Checkpoints of every family, and what transformers answers with them in float32 on the CPU.

`scripts/try_gpu --prepare FOLDER` writes them where there is time and a network for it.
Weights are rounded to bfloat16 before the answers are computed, and stored so.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import transformers

from tests.conftest import FIELDS, make_model, model_class, save_byte_tokenizer
from tests.models.test_oracle import mixed_requests, oracle_greedy

NAME = "expected.json"
NUM_REQUESTS = 16
NUM_BEST = 3
DIGITS = 6  # of logprobs; they are compared within 1e-4
MOST_BYTES = 48 << 20
WHEELS = ("orjson", "llguidance")  # that a machine with torch and transformers may lack
# Of Python 3.12 on Linux. pip takes no wheel for a newer glibc from an older name.
PLATFORMS = (
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


@dataclass(slots=True, frozen=True)
class Answer:
    """What transformers does with one prompt."""

    prompt: list[int]
    ids: list[int]  # greedy
    logprobs: list[float]  # of all tokens but the first one
    best: list[list[float]]  # logprobs, of each of these places


@dataclass(slots=True, frozen=True)
class FamilyAnswers:
    """What a family is compared with."""

    answers: list[Answer]


def prepare_all(folder: Path) -> int:
    """Write every family and the wheels, as far as they are not there; return an exit status."""
    started = time.monotonic()
    for name in sorted(FIELDS):
        click.echo(f"{name} …", err=True)
        prepare(name, folder)
    missing = [name for name in WHEELS if not fetch_wheel(name, folder / "whl")]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    took = time.monotonic() - started
    told = f"{len(FIELDS)} families, {size / 2**20:.1f} MiB, after {took:.0f} s"
    click.echo(f"{folder} holds {told}.")
    if missing:
        click.echo(
            f"pip found no wheel of {', '.join(missing)}: put it into {folder / 'whl'}."
        )
    if size > MOST_BYTES:
        click.echo(
            f"That is more than {MOST_BYTES >> 20} MiB, the most that should be carried."
        )
    return 1 if missing or size > MOST_BYTES else 0


def fetch_wheel(name: str, folder: Path) -> bool:
    """Fetch a package's wheel into a folder, if it is not there; tell whether it is
    there now."""
    if not [*folder.glob(f"{name}-*.whl")]:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
        ]
        command += [str(folder), "--only-binary=:all:", "--implementation", "cp"]
        command += ["--python-version", "3.12"]
        command += [part for each in PLATFORMS for part in ("--platform", each)]
        subprocess.run([*command, name], check=False)
    return bool([*folder.glob(f"{name}-*.whl")])


def prepare(name: str, folder: Path) -> FamilyAnswers:
    """Return a family's answers; they and its checkpoint are made if they are not there yet."""
    path = folder / name / NAME
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
        _write(name, part)
        with contextlib.suppress(OSError):  # another process was faster
            part.rename(path.parent)
            path.parent.chmod(0o755)  # it is carried, and another user may read it
        shutil.rmtree(part, ignore_errors=True)
    fields = json.loads(path.read_text())
    return FamilyAnswers([Answer(**each) for each in fields["answers"]])


def _write(name: str, folder: Path) -> None:
    model = make_model(name)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.bfloat16())
    requests = [each for each in mixed_requests() if each["temperature"] == 0]
    answers = [_answer(model, each) for each in requests[:NUM_REQUESTS]]
    (folder / NAME).write_text(json.dumps(asdict(FamilyAnswers(answers))))
    model.bfloat16().save_pretrained(folder)
    save_byte_tokenizer(folder)


def _answer(model: Any, request: dict[str, Any]) -> Answer:
    prompt = request["prompt"]
    ids, table = oracle_greedy(model, prompt, request["max_tokens"])
    targets = torch.tensor((prompt + ids)[1:])
    table = table[: len(targets)]
    logprobs = table.gather(1, targets[:, None])[:, 0]
    best = table.topk(NUM_BEST).values
    rounded = [[round(each, DIGITS) for each in row] for row in best.tolist()]
    return Answer(
        prompt, ids, [round(each, DIGITS) for each in logprobs.tolist()], rounded
    )


@torch.inference_mode()
def score_with_transformers(
    folder: Path, answers: list[Answer], dtype: torch.dtype, device: torch.device
) -> list[list[float]]:
    """Return transformers' own logprobs of the same tokens, in a type and on a device."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = model_class(transformers.AutoConfig.from_pretrained(folder))
    model: Any = kind.from_pretrained(folder, dtype=dtype)
    model = model.to(device).eval()
    if getattr(model.config, "attn_logit_softcapping", None):
        model.config._attn_implementation = "eager"  # 5.17's sdpa leaves the cap out
    scores = []
    for answer in answers:
        ids = torch.tensor([answer.prompt + answer.ids], device=device)
        table = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        scores.append(table.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return scores
