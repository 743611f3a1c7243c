"""Finds the family that an architecture without a row resembles most."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from difflib import SequenceMatcher

from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def nearest_family(model_type: str, fields: Iterable[str], families: Iterable[str]) -> str:
    """Return the family whose name and config are nearest.

    Args:
        fields: those of the config.json.
    """
    found = frozenset(fields)

    def likeness(family: str) -> float:
        declared = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}
        names = SequenceMatcher(None, model_type.lower(), family).ratio()
        return names + 2 * len(found & declared) / max(1, len(found))

    return max(families, key=likeness)
