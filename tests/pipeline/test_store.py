"""The ranks' store: what torch asks of it, and that strangers get nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fminfer.core.errors import FminferError, PipelineError, UsageError, make_printable
from fminfer.pipeline import finding, handshake, store
from fminfer.pipeline.finding import machine_id, open_store
from fminfer.pipeline.handshake import (
    GREETING,
    NONCE_BYTES,
    REFUSAL,
    NoStoreError,
    WrongSecretError,
    read_home_secret,
    read_private_file,
    receive_exactly,
)
from fminfer.pipeline.ranks import RankPlace
from fminfer.pipeline.store import Store, StoreHolder, connect_to_store
from fminfer.pipeline.watch import Fault

SECRET = "of these tests"


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        StoreHolder(listener, SECRET)
        yield listener.getsockname()[1]


def listening_at(port: int) -> set[str]:
    """Return the addresses on which this machine listens at a port, as Linux writes them."""
    lines = [
        line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
    ]
    ends = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    return {address for address, number in ends if int(number, 16) == port}


def test_keys(port: int) -> None:
    one, other = (Store("127.0.0.1", port, SECRET, 5) for _ in range(2))
    one.set("a", "1")
    assert other.get("a") == b"1" and other.check(["a"]) and not other.check(["a", "b"])
    assert (one.add("count", 2), other.add("count", 3)) == (2, 5)
    assert one.compare_set("swap", "", "x") == b"x"
    assert other.compare_set("swap", "", "y") == b"x", "the first one wins"
    assert other.compare_set("swap", "x", "z") == b"z"
    one.multi_set(["b", "c"], [b"\x00\xff", "3"])
    one.append("b", b"\n")
    assert other.multi_get(["c", "b"]) == [b"3", b"\x00\xff\n"]
    assert one.delete_key("b") and not one.delete_key("b") and other.num_keys() == 4
    with pytest.raises(PipelineError, match="no rank has said never"):
        one.wait(["never"], timedelta(seconds=0.01))
    threading.Timer(0.1, other.set, ("late", "now")).start()
    assert one.get("late") == b"now"


def test_torch_meets_through_it(port: int) -> None:
    """gloo and NCCL ask for keys below a prefix."""
    store = Store("127.0.0.1", port, SECRET, 5)  # torch does not keep it alive
    below = dist.PrefixStore("gloo", store)
    below.set("rank/0", b"\x01\x02")
    assert below.get("rank/0") == b"\x01\x02" and below.add("n", 1) == 1
    assert Store("127.0.0.1", port, SECRET, 5).check(["gloo/rank/0"])


def test_a_stranger_gets_nothing(port: int) -> None:
    """Any client of the port could tell the ranks that the run has failed, and they ended."""
    with pytest.raises(WrongSecretError, match="rank 0 has another secret"):
        Store("127.0.0.1", port, "guessed", 5)
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        greeting = stranger.recv(100)
        assert greeting.startswith(GREETING) and SECRET.encode() not in greeting
        stranger.sendall(bytes(NONCE_BYTES) + bytes(32))
        assert receive_exactly(stranger, len(REFUSAL)) == REFUSAL, (
            "which tells it nothing else"
        )
        assert stranger.recv(100) == b""
    with pytest.raises(dist.DistError):
        dist.TCPStore(
            "127.0.0.1", port, None, False, timedelta(seconds=1), wait_for_workers=False
        )
    store = Store("127.0.0.1", port, SECRET, 5)
    assert store.num_keys() == 0, "and the store goes on"


def test_silent_strangers_do_not_keep_ranks_out(port: int) -> None:
    strangers = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(20)]
    assert Store("127.0.0.1", port, SECRET, 5).add("n", 1) == 1
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_sends_byte_by_byte_is_dropped_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each byte gave it the whole time anew: 20 minutes in all, at one of 256 places."""
    monkeypatch.setattr(store, "PROOF_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        StoreHolder(listener, SECRET)
        stranger = socket.create_connection(listener.getsockname(), 5)
        with stranger, pytest.raises(OSError):
            for _ in range(10):
                time.sleep(0.1)
                stranger.sendall(b"x")


def test_nonsense_of_a_rank_costs_its_connection_only(port: int) -> None:
    store, other = (Store("127.0.0.1", port, SECRET, 5) for _ in range(2))
    with pytest.raises(
        PipelineError, match="rank 0, which holds the ranks together, is gone"
    ):
        store.add("n", "x")  # type: ignore[arg-type]
    assert other.add("n", 1) == 1


def test_who_claims_to_be_rank_0_must_prove_it() -> None:
    """Otherwise ranks would take steps from whoever answers at the address first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            peer, _ = listener.accept()
            peer.sendall(GREETING + bytes(NONCE_BYTES))
            peer.recv(100)
            peer.sendall(bytes(32))

        threading.Thread(target=impostor, daemon=True).start()
        with pytest.raises(WrongSecretError):
            Store("127.0.0.1", listener.getsockname()[1], SECRET, 5)


def test_a_holder_that_dies_while_a_rank_introduces_itself_is_tried_again() -> None:
    """The rank ended at once: "another secret than this rank", and advice about secrets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def die_and_come_again() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(GREETING + bytes(NONCE_BYTES))
                peer.recv(100)
            StoreHolder(listener, SECRET)

        threading.Thread(target=die_and_come_again, daemon=True).start()
        assert connect_to_store("127.0.0.1", port, SECRET, 20).add("n", 1) == 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def die() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        peer.sendall(GREETING + bytes(NONCE_BYTES))
                        peer.recv(100)

        threading.Thread(target=die, daemon=True).start()
        with pytest.raises(
            PipelineError, match=f"rank 0 at 127.0.0.1:{port} ended while this"
        ):
            connect_to_store("127.0.0.1", port, SECRET, 0.3)


def test_another_program_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(NoStoreError):
        Store("127.0.0.1", other.getsockname()[1], SECRET, 0.2)


def test_a_folder_on_one_machine_is_not_open_to_others(tmp_path: Path) -> None:
    """It listened on every interface, and asked nobody for anything."""
    place = open_store(RankPlace(None, 2, folder=tmp_path), 20)
    assert listening_at(place.port) == {"0100007F"}
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (
        json.loads(file.read_text())["secret"] == place.secret
        and len(place.secret) == 64
    )
    with pytest.raises(WrongSecretError):
        Store("127.0.0.1", place.port, "", 5)
    place.hide_address()
    assert not list(tmp_path.iterdir())


def test_a_secret_of_the_environment_is_not_written(tmp_path: Path) -> None:
    place = open_store(RankPlace(None, 2, folder=tmp_path, secret="given"), 20)
    assert "given" not in next(tmp_path.iterdir()).read_text()
    assert (
        open_store(RankPlace(None, 2, folder=tmp_path, secret="given"), 20).port
        == place.port
    )
    with pytest.raises(PipelineError, match="another secret"):
        open_store(RankPlace(None, 2, folder=tmp_path, secret="other"), 20)


def test_a_rendezvous_of_another_user_is_refused(tmp_path: Path) -> None:
    place = open_store(RankPlace(None, 2, folder=tmp_path), 20)
    (file,) = tmp_path.iterdir()
    file.chmod(0o644)
    with pytest.raises(UsageError, match=r"must be yours alone \(mode 0600\)"):
        open_store(RankPlace(None, 2, folder=tmp_path), 20)
    place.hide_address()


def write_rendezvous(folder: Path, port: int) -> None:
    """Leave a file as a run does that was killed."""
    fields = {
        "machine": machine_id(),
        "hosts": ["127.0.0.1"],
        "port": port,
        "secret": "old",
    }
    file = folder / "fminfer-rendezvous-000004.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps(fields))


def test_a_port_that_is_another_runs_by_now_leads_nowhere(
    tmp_path: Path, port: int
) -> None:
    """A new run in the folder of one that was killed ended: "another secret than this rank"."""
    write_rendezvous(tmp_path, port)
    place = open_store(RankPlace(None, 2, folder=tmp_path), 20)
    assert place.holder and place.port != port
    place.hide_address()


def test_a_port_that_is_another_programs_by_now_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks waited for its greeting as long as for each other, 5 minutes, and gave up."""
    monkeypatch.setattr(finding, "GREET_S", 0.1, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        write_rendezvous(tmp_path, other.getsockname()[1])
        started_s = time.monotonic()
        place = open_store(RankPlace(None, 2, folder=tmp_path), 5)
        assert place.holder and time.monotonic() - started_s < 3
        place.hide_address()


def test_with_a_secret_of_the_environment_a_file_system_needs_no_modes(
    tmp_path: Path,
) -> None:
    """Files for all, as some mounts have them, were refused with advice that did not help."""
    place = open_store(RankPlace(None, 2, folder=tmp_path, secret="given"), 20)
    (file,) = tmp_path.iterdir()
    file.chmod(0o755)
    assert (
        open_store(RankPlace(None, 2, folder=tmp_path, secret="given"), 20).port
        == place.port
    )
    place.hide_address()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Ranks ended with a traceback of os.link, in the folder and in the user's cache."""

    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    place = open_store(RankPlace(None, 2, folder=tmp_path / "meet"), 20)
    assert (
        open_store(RankPlace(None, 2, folder=tmp_path / "meet"), 20).port == place.port
    )
    place.hide_address()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "fminfer").mkdir(mode=0o700)
    assert read_home_secret() == read_home_secret()
    assert [path.name for path in (tmp_path / "fminfer").iterdir()] == ["ranks.secret"]


def test_a_rendezvous_that_is_being_written_is_waited_for(
    tmp_path: Path, port: int
) -> None:
    """Between its creation and its content a file is empty, and leads nowhere."""
    file = tmp_path / "fminfer-rendezvous-000000.json"
    file.touch(mode=0o600)
    fields = {
        "machine": machine_id(),
        "hosts": ["127.0.0.1"],
        "port": port,
        "secret": SECRET,
    }
    writer = threading.Timer(0.3, file.write_text, [json.dumps(fields)])
    writer.start()
    place = open_store(RankPlace(None, 2, folder=tmp_path), 20)
    assert not place.holder and place.port == port
    writer.join()


def test_a_rendezvous_that_stays_empty_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer was killed."""
    monkeypatch.setattr(finding, "TORN_S", 0.1, raising=False)
    (tmp_path / "fminfer-rendezvous-000000.json").touch(mode=0o600)
    place = open_store(RankPlace(None, 2, folder=tmp_path), 20)
    assert place.holder and len(list(tmp_path.iterdir())) == 1
    place.hide_address()


def test_ranks_elsewhere_have_it_listen_on_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of another machine cannot reach the loopback, and asks through the folder."""
    near = {"lo": "127.0.0.1", "eth0": "127.0.0.9"}
    monkeypatch.setattr(finding, "list_interfaces", lambda: near)
    monkeypatch.setattr(finding, "is_loopback", lambda host: host == "127.0.0.1")
    place = open_store(RankPlace(None, 2, folder=tmp_path), 20)
    monkeypatch.setattr(finding, "machine_id", lambda: "another machine")
    far = open_store(RankPlace(None, 2, folder=tmp_path), 20)
    assert not far.holder and far.host == "127.0.0.9"
    place.set("a", "b")
    assert far.get("a") == b"b"
    (file,) = tmp_path.glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    place.hide_address()
    assert not list(tmp_path.iterdir())


def test_a_holder_that_answers_between_two_looks_at_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank elsewhere looked twice: the loopback first, the network's address then, and so it
    took the file for one that leads nowhere and opened a store of its own."""
    near = {"lo": "127.0.0.1", "eth0": "127.0.0.9"}
    monkeypatch.setattr(finding, "list_interfaces", lambda: near)
    monkeypatch.setattr(finding, "is_loopback", lambda host: host == "127.0.0.1")
    place = open_store(RankPlace(None, 2, folder=tmp_path), 20)
    monkeypatch.setattr(finding, "machine_id", lambda: "another machine")
    (file,) = tmp_path.glob("*.json")
    join = finding._connect_by_file

    def join_slowly(*given: Any) -> Any:
        found = join(*given)
        file.with_suffix(".away").touch()
        while "127.0.0.9" not in file.read_text():
            time.sleep(0.01)
        return found

    monkeypatch.setattr(finding, "_connect_by_file", join_slowly)
    far = open_store(RankPlace(None, 2, folder=tmp_path), 20)
    assert not far.holder and far.host == "127.0.0.9"
    place.hide_address()


def test_the_secret_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are told an address share what only their user can read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old_mask = os.umask(0o000)
    try:
        (tmp_path / "fminfer").mkdir(mode=0o700)
        with ThreadPoolExecutor(8) as threads:
            found = set(threads.map(lambda _: read_home_secret(), range(8)))
    finally:
        os.umask(old_mask)
    (secret,) = found
    path = tmp_path / "fminfer/ranks.secret"
    assert len(secret) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_private_file(path).strip() == secret
    monkeypatch.setattr(handshake, "WHOLE_S", 0.1, raising=False)
    path.write_text("")  # by a process that was killed
    with pytest.raises(UsageError, match="is empty; remove it"):
        read_home_secret()
    path.chmod(0o640)
    with pytest.raises(UsageError, match="FMINFER_SECRET"):
        read_home_secret()


def test_an_address_is_listened_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number listened on every interface as soon as it was none of the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = open_store(RankPlace(0, 2, "127.0.0.3", port, secret="s"), 20)
    assert listening_at(port) == {"0300007F"}
    with pytest.raises(
        PipelineError, match=r"(?s)another secret than this rank.*FMINFER_SECRET"
    ):
        open_store(RankPlace(1, 2, "127.0.0.3", port, secret="t"), 20)
    place.hide_address()


def test_words_of_others_are_only_shown() -> None:
    """A fault's text reached the terminal with its control sequences."""
    told = Fault.from_json(
        json.dumps({"text": "\x1b[2Jgone\n", "kind": "a kind that is not"}).encode()
    )
    assert (
        make_printable(told.text) == "\\x1b[2Jgone\n"
        and type(told.to_error()) is FminferError
    )
    assert make_printable("é ✓\tü\u202e") == "é ✓\tü\\u202e"
