"""`fminfer families`: the architectures that run."""

from __future__ import annotations

import json

import click

from fminfer.models.examples import EXAMPLES


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def families(is_json: bool) -> None:
    """List the model families that run, each with a model of the Hugging Face hub.

    \b
    fminfer families
    fminfer families --json

    A family is the `model_type` of a config.json. GiB is the size of the weights in 16 bits.
    docs/models.md lists the forms of checkpoints, and says how to fetch one.
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
