"""What a server says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fminfer.client.remote_options import DialectName


@dataclass(slots=True, frozen=True)
class ServerFacts:
    """A server, and the model that it serves."""

    url: str  # the base, such as http://host:8000/v1
    model: str  # the id that requests name
    dialect: DialectName
    version: str = ""  # of the server; "": it does not say
    # the model's entry of /v1/models, without what changes from call to call
    entry: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What it is, such as `vllm 0.12.1`."""
        return f"{self.dialect} {self.version}".rstrip()
