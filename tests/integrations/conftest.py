"""The readers run over answers of our own, and nothing here reaches the network."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

# Read by datasets and huggingface_hub when they are imported, which is after this.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="package", autouse=True)
def no_network() -> Any:
    """Make every attempt to connect a failure, but within this machine's file system."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:  # where commands are forked (tests/forked.py)
            raise AssertionError(f"a test tried to connect to {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse)
        yield
