"""The readers run over answers of our own, and nothing here reaches the network."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address
from typing import Any

import pytest

# Read by datasets and huggingface_hub when they are imported, which is after this.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="package", autouse=True)
def no_network() -> Any:
    """Make every attempt to connect a failure, but to this machine."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        # by their file system, commands are forked (tests/forked.py)
        is_internet = self.family != socket.AF_UNIX
        if is_internet and not ip_address(address[0]).is_loopback:
            raise AssertionError(f"a test tried to connect to {address}")
        connect(self, address)

    def refuse_ex(self: socket.socket, address: Any) -> int:
        refuse(self, address)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse_ex)
        yield
