"""Where each input's answers go, and that no two go to one place. It opens no file."""

from __future__ import annotations

from pathlib import Path

from fminfer.errors import UsageError
from fminfer.input.lines import stem
from fminfer.input.streams import STDIN
from fminfer.output.status import status_path
from fminfer.output.writer import traces

STDOUT = Path("-")


def answers_path(source: Path) -> Path:
    """Return where an input's answers go if no place is named: beside it."""
    return source.with_name(f"output_{stem(source)}.jsonl")


def plan_outputs(inputs: list[Path], output: Path | None) -> list[Path]:
    """Return where each input's answers go.

    Args:
        output: a file (for one input), a folder, `-` for stdout, or None for `output_<name>.jsonl`
            beside each input; stdin's answers go to stdout then.

    Raises:
        UsageError: one file for several inputs, or two inputs for one file.
    """
    outputs = _name_outputs(inputs, output)
    taken = {path.resolve(): f"is the input {path}" for path in inputs if path != STDIN}
    for source, path in zip(inputs, outputs, strict=True):
        if path == STDOUT:
            continue
        for trace in [*traces(path), status_path(path)]:
            if trace.resolve() in taken:
                raise UsageError(
                    f"the answers to {source} would be written to {trace}, which "
                    f"{taken[trace.resolve()]}; run it apart, or give another --output"
                )
            taken[trace.resolve()] = f"also belongs to the answers to {source}"
    return outputs


def _name_outputs(inputs: list[Path], output: Path | None) -> list[Path]:
    if output == STDOUT:
        return [STDOUT] * len(inputs)
    if output is None:
        return [STDOUT if path == STDIN else answers_path(path) for path in inputs]
    if output.is_file() or output.suffix == ".jsonl":
        if len(inputs) > 1:
            raise UsageError(
                f"--output {output} is one file, and there are {len(inputs)} inputs; give a folder"
            )
        return [output]
    if output.suffix in (".json", ".gz", ".zst") and not output.is_dir():
        raise UsageError(
            f"--output {output}: answers are written as plain JSON lines; give a name that ends in "
            ".jsonl (and compress the file afterwards), or a folder"
        )
    return [output / f"output_{stem(path)}.jsonl" for path in inputs]
