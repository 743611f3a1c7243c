"""The list of families: what it says, and that published models of theirs pass the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from transformers.core_model_loading import revert_weight_conversion

from fminfer.cli.app import main
from fminfer.cli.families_command import EXAMPLES
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.config_fields import ROWS, architecture_of
from fminfer.models.families import encoders
from fminfer.models.origins import find_origins
from tests.conftest import model_class
from tests.published_configs import PUBLISHED

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_every_family_has_an_example_and_its_line() -> None:
    assert list(EXAMPLES) == sorted(ROWS)
    told = CliRunner().invoke(main, ["families"])
    lines = told.stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(EXAMPLES)
    assert "or in fewer by --quantize (int8, int8-32, " in told.stderr
    of_vectors = {
        line.split()[0] for line in lines if line.endswith("  vectors, scores")
    }
    assert of_vectors == set(encoders.ROWS)
    found = json.loads(CliRunner().invoke(main, ["families", "--json"]).output)
    assert {name: each["example"] for name, each in found.items()} == {
        name: each.hub_id for name, each in EXAMPLES.items()
    }


def test_the_readme_counts_them() -> None:
    assert f"{len(ROWS)} model families" in (DOCS.parent / "README.md").read_text()


def test_the_table_of_the_docs_is_this_list() -> None:
    table = (DOCS / "models.md").read_text().partition("\n## Weights in 8")[0]
    for name, each in EXAMPLES.items():
        assert f"| {name} | `{each.hub_id}` | {each.gibibytes:.1f} |" in table, name
    assert table.count("| `") == len(EXAMPLES), "and no other"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_examples_have_their_published_size(name: str) -> None:
    billions, fields = PUBLISHED[name]
    example = EXAMPLES[fields["model_type"]]
    if example.hub_id == name:
        assert example.billions == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_model_passes_the_loader(name: str) -> None:
    """Its tensors are those of transformers' class for its config: names and shapes, no values.

    Configs are written down from memory of them. Four layers are enough for every kind of layer
    but those that come later, which test_architectures counts.
    """
    _, fields = PUBLISHED[name]
    fields = json.loads(json.dumps(fields))
    shorten(fields.get("text_config", fields))
    model_type = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    tensors = revert_weight_conversion(model, model.state_dict())  # as they are saved
    stored = {key: tuple(value.shape) for key, value in tensors.items()}
    checkpoint = Checkpoint(name, None, config, architecture_of(config))
    found = find_origins(checkpoint, stored)
    numbers = {name.partition(".")[0] for name in found if name[0].isdigit()}
    assert len(numbers) == config.get_text_config().num_hidden_layers


def shorten(fields: dict[str, Any]) -> None:
    """Leave four layers."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if key in fields:
            fields[key] = min(4, fields[key])
    for key, value in fields.items():
        if isinstance(value, list) and len(value) > 4 and key != "moe_k":
            fields[key] = value[:4]
    if fields.get("attention_types"):  # of gpt_neo
        fields["attention_types"] = [[["global", "local"], 2]]
