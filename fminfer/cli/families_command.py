"""`fminfer families`: the architectures that run."""

from __future__ import annotations

import json

import click

from fminfer.models.examples import EXAMPLES


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def families(is_json: bool) -> None:
    """List the architectures that run, each with a model of the Hugging Face hub.

    \b
    fminfer families
    fminfer families --json

    A family is the `model_type` of a config.json. GiB are those of the weights at 16 bits. What
    forms of checkpoints are read, and how to fetch one: docs/models.md.
    """
    if is_json:
        fields = {
            name: {"example": each.hub_id, "billions": each.billions}
            for name, each in EXAMPLES.items()
        }
        click.echo(json.dumps(fields, indent=2))
        return
    click.echo(f"{'family':<18} {'example':<48} {'GiB':>7}")
    for name, each in EXAMPLES.items():
        click.echo(f"{name:<18} {each.hub_id:<48} {each.gibibytes:7.1f}")
