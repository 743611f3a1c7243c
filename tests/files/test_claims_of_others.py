"""Claims of processes that are gone: of this machine's last boot, or torn by a power cut."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.errors import InUseError
from fminfer.files import claims
from fminfer.files.claims import Claims, claiming_output, read_claims
from fminfer.machine import liveness
from fminfer.machine.liveness import describe_this_process

OTHER_BOOT = f"00000000-1111-2222-3333-444444444444 {os.readlink('/proc/self/ns/pid')}"


@pytest.fixture
def machine_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_read_machine_id", lambda: "mine")


def put_claim(output: Path, data: bytes) -> None:
    folder = output.with_name(f"{output.name}.claim")
    folder.mkdir()
    (folder / "1").write_bytes(data)


def claim_of(**changes: Any) -> bytes:
    fields = (
        json.loads(describe_this_process())
        | {"pid": 99999, "machine": OTHER_BOOT}
        | changes
    )
    return (
        json.dumps({n: v for n, v in fields.items() if v is not None}).encode() + b"\n"
    )


@pytest.mark.usefixtures("machine_id")
@pytest.mark.parametrize("recorded", ["mine", None])
def test_a_claim_of_the_last_boot_is_dead(tmp_path: Path, recorded: str | None) -> None:
    """It held the output for a minute, as "another run's"."""
    put_claim(tmp_path / "a.jsonl", claim_of(machine_id=recorded))
    assert Claims().acquire(tmp_path / "a.jsonl") is not None


@pytest.mark.usefixtures("machine_id")
@pytest.mark.parametrize(
    "changes",
    [
        {"machine_id": "theirs"},
        {"host": f"not-{socket.gethostname()}"},
        {"machine": ""},
        {"machine_id": ""},
    ],
)
def test_a_claim_of_another_machine_is_not(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    """Hosts of one name may share a disk."""
    put_claim(tmp_path / "a.jsonl", claim_of(**changes))
    assert Claims().acquire(tmp_path / "a.jsonl") is None


def test_without_a_machine_id_no_boot_is_known_as_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_read_machine_id", lambda: "")
    put_claim(tmp_path / "a.jsonl", claim_of(machine_id=""))
    assert Claims().acquire(tmp_path / "a.jsonl") is None


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 300, claim_of()[:100]], ids=["empty", "zeros", "cut"]
)
def test_a_torn_claim_is_dead(tmp_path: Path, data: bytes) -> None:
    put_claim(tmp_path / "a.jsonl", data)
    assert Claims().acquire(tmp_path / "a.jsonl") is None, "it may be being written"
    os.utime(tmp_path / "a.jsonl.claim" / "1", (time.time() - 2,) * 2)
    assert Claims().acquire(tmp_path / "a.jsonl") is not None


def test_a_claim_of_a_later_version_is_waited_for(tmp_path: Path) -> None:
    put_claim(tmp_path / "a.jsonl", claim_of(another_field=1))
    (found,) = read_claims(tmp_path / "a.jsonl")
    assert found.owner is None and not found.is_dead


def test_who_wrote_too_slowly_has_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took it for torn, answered the output, and left nothing."""
    output = tmp_path / "a.jsonl"
    create = claims.create_file_once

    def create_slowly(path: Path, data: bytes, mode: int) -> bool:
        is_first = create(path, data, mode)
        path.unlink()
        return is_first

    monkeypatch.setattr(claims, "create_file_once", create_slowly)
    assert Claims().acquire(output) is None


def test_claims_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    assert Claims().acquire(tmp_path / "a.jsonl") is not None
    assert synced == [str(tmp_path / "a.jsonl.claim" / "1")]


def test_a_refusal_names_the_process(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    with (
        claiming_output(output),
        pytest.raises(
            InUseError, match=f"by process {os.getpid()} of {socket.gethostname()}. W"
        ),
        claiming_output(output),
    ):
        pass
    assert not os.listdir(tmp_path)
    put_claim(output, claim_of(host="elsewhere"))
    expected = (
        "by process 99999 of elsewhere. .* if it is gone, its claim ends within 60 s"
    )
    with pytest.raises(InUseError, match=expected), claiming_output(output):
        pass


def test_a_pipe_in_the_place_of_a_claim_is_not_waited_for(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    put_claim(output, b"")
    (tmp_path / "a.jsonl.claim" / "1").unlink()
    os.mkfifo(tmp_path / "a.jsonl.claim" / "1")
    os.utime(tmp_path / "a.jsonl.claim" / "1", (time.time() - 2,) * 2)
    with claiming_output(output):
        assert os.listdir(tmp_path / "a.jsonl.claim") == ["2"]
    assert os.listdir(tmp_path) == []
