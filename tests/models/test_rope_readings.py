"""Rotary settings, in each form that configs have had, are read as transformers reads them."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import find_text_config, open_checkpoint
from tests.conftest import FIELDS, IS_ALL, family_config, more

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
FORMS: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 5000.0},
    "old type": {
        "rope_theta": 5000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "old name": {"rope_theta": 5000.0, "rope_scaling": LINEAR},
    "old yarn": {"rope_theta": 5000.0, "rope_scaling": YARN},
    "no scaling": {"rope_theta": 5000.0, "rope_scaling": None},
    "local theta": {"rope_theta": 5000.0, "rope_local_base_freq": 300.0},
    "flat": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "flat linear": {"rope_parameters": LINEAR | {"rope_theta": 5000.0}},
    "flat yarn": {"rope_parameters": {"rope_theta": 5000.0} | YARN},
    "flat llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 5000.0}},
    "flat, theta outside": {"rope_theta": 5000.0, "rope_parameters": LINEAR},
    "flat, part of a head": {
        "rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    },
    "part outside": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "nested": {"rope_parameters": NESTED},
    "nested, theta before": {"rope_parameters": {"rope_theta": 700.0} | NESTED},
    "nested, theta behind": {"rope_parameters": NESTED | {"rope_theta": 700.0}},
    "nested, one kind": {
        "rope_parameters": {"full_attention": NESTED["full_attention"]}
    },
    "nested yarn": {
        "rope_parameters": NESTED | {"full_attention": YARN | {"rope_theta": 500.0}},
    },
}
# whose kinds of layers have settings of their own
BY_KIND = ("gemma3", "gemma3_text", "olmo3")
OLD = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")


def write_config(name: str, form: str, folder: Path) -> None:
    """Write a family's config.json with rotary settings of a form, at the end of the file."""
    fields = json.loads(family_config(name).to_json_string(use_diff=False))
    for part in (fields, fields.get("text_config") or {}):
        for old in OLD:
            part.pop(old, None)
    (fields.get("text_config") or fields).update(FORMS[form])
    (folder / "config.json").write_text(json.dumps(fields))


def rotary_class(config: Any) -> Any:
    """Return the class by which transformers computes a config's rotary positions, if any."""
    model = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    named = vars(sys.modules[model.__module__]).items()
    return next(
        (each for name, each in named if name.endswith("RotaryEmbedding")), None
    )


def read_as_transformers(folder: Path) -> list[tuple[torch.Tensor, float]] | None:
    """Return each layer's frequencies and scale, or None if transformers cannot compute them."""
    try:
        config = find_text_config(transformers.AutoConfig.from_pretrained(folder))
        module = rotary_class(config)(config)
    except (KeyError, TypeError, StrictDataclassError):
        return None
    if hasattr(module, "inv_freq"):
        return [(module.inv_freq, module.attention_scaling)] * config.num_hidden_layers
    return [
        (
            getattr(module, f"{kind}_inv_freq"),
            getattr(module, f"{kind}_attention_scaling"),
        )
        for kind in config.layer_types
    ]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"rope_type": "default", "rope_theta": None}),
        (
            "gemma3_text",
            {"sliding_attention": {"rope_type": "default", "rope_theta": "1e4"}},
        ),
        ("llama", YARN | {"rope_theta": 1.0}),
        ("llama", LLAMA3 | {"rope_theta": 500.0, "low_freq_factor": 0}),
        (
            "phi",
            {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": "0.5",
            },
        ),
        ("llama", {"rope_type": "default", "rope_theta": -5.0}),
        ("llama", LINEAR | {"rope_theta": 500.0, "factor": 0.0}),
    ],
)
def test_settings_that_make_no_positions_are_refused_by_name(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """They ended in tracebacks, or made each row's logits NaN."""
    write_config(name, "theta", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"rope_parameters": settings})
    )
    with pytest.raises(CheckpointError, match="rope_parameters"):
        open_checkpoint(str(tmp_path))


ROTARY = [  # one of each model type; the others' rotary positions are the same
    pytest.param(name, marks=more if "-" in name else [])
    for name in sorted(FIELDS)
    if rotary_class(find_text_config(family_config(name)))
]


@pytest.mark.parametrize("name", ROTARY)
def test_every_form_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    """Flat settings of Gemma 3 and OLMo 3 counted for all layers, where transformers
    has a default for each kind; a theta before nested ones was a KeyError, and nested
    ones of a llama too."""
    takes_turns = not (IS_ALL or name in (*BY_KIND, "llama"))
    for form in [*FORMS][zlib.crc32(name.encode()) % 3 :: 3] if takes_turns else FORMS:
        write_config(name, form, tmp_path)
        expected = read_as_transformers(tmp_path)
        is_for_others = (
            form.startswith("nested") and name.partition("-")[0] not in BY_KIND
        )
        if expected is None or is_for_others:
            with pytest.raises(CheckpointError, match="rope_parameters"):
                open_checkpoint(str(tmp_path))
            continue
        layers = open_checkpoint(str(tmp_path)).model.layers
        assert any(layer.attention.rope for layer in layers) == ("alibi" not in name)
        for layer, (inv_freq, scale) in zip(layers, expected, strict=True):
            if (rope := layer.attention.rope) is not None:
                # nanochat turns the other way
                found = torch.tensor(rope.inv_freq).abs()
                assert torch.equal(found, inv_freq) and rope.scale == scale, form
