#!/usr/bin/env python
"""What bits of weights cost: how far a model's next-token distributions move.

    python benchmarks/bits.py MODEL_FOLDER text.md …

For each format of `--quantize`, and each form of GGUF that the `gguf` package writes,
all matrices are quantized and dequantized in transformers' model, in float32. It prints
the mean KL divergence from the unquantized model over the texts, in windows of 512
tokens, and how often the likeliest token stayed the same. Head and embedding have 8
bits, as in a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import gguf
import torch
import transformers

from fminfer.compute.formats.own_rows import OWN_FORMATS, choose_quantized_formats

WINDOW = 512
GGUF_NAMES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# of a matrix; whether it is a layer's
Rounded = Callable[[torch.Tensor, bool], torch.Tensor]


def rounded_by(name: str) -> Rounded:
    """Return what rounds a matrix as a format does."""

    def by_ours(weight: torch.Tensor, is_inner: bool) -> torch.Tensor:
        for form in choose_quantized_formats(name, "product" if is_inner else "head"):
            if form.fits_inputs(weight.shape[1]):
                return form.dequantize((form.quantize(weight),), torch.float32)
        return weight

    def by_gguf(weight: torch.Tensor, is_inner: bool) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType[name if is_inner else "Q8_0"]
        if weight.shape[1] % 32:
            return weight
        packed = gguf.quants.quantize(weight.numpy(), kind)
        return torch.from_numpy(gguf.quants.dequantize(packed, kind))

    return by_gguf if name in GGUF_NAMES else by_ours


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.argument(
    "texts", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
)
@click.option(
    "--windows", default=8, show_default=True, help="Most windows of 512 tokens."
)
@torch.no_grad()
def main(folder: Path, texts: tuple[Path, ...], windows: int) -> None:
    """Print a table, and one line of JSON last."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    ids = tokenizer("\n".join(text.read_text() for text in texts))["input_ids"]
    num = min(windows, len(ids) // WINDOW)
    rows = torch.tensor(ids[: num * WINDOW]).view(num, WINDOW)

    def logprobs() -> torch.Tensor:
        return torch.cat([model(row[None]).logits.log_softmax(-1) for row in rows])

    matrices = {n: p for n, p in model.named_parameters() if p.dim() == 2}
    plain = {name: parameter.detach().clone() for name, parameter in matrices.items()}
    expected = logprobs()
    found = {}
    for name in (*(form.name for form in OWN_FORMATS), *GGUF_NAMES):
        rounded = rounded_by(name)
        for each, parameter in matrices.items():
            is_inner = not any(
                part in each for part in ("embed", "wte", "wpe", "lm_head")
            )
            parameter.data.copy_(rounded(plain[each], is_inner))
        now = logprobs()
        apart = float((expected.exp() * (expected - now)).sum(-1).mean())
        same = float((now.argmax(-1) == expected.argmax(-1)).float().mean())
        found[name] = {"kl": apart, "same_top": same}
        print(f"{name:20} KL {apart:.5f}   top token the same {same:7.2%}", flush=True)
    print(json.dumps({"model": folder.name, "tokens": rows.numel(), "formats": found}))


if __name__ == "__main__":
    main()
