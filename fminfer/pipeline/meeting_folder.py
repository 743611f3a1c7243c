"""A folder in which ranks find each other, on one machine or on several that share a disk.

The store listens on the loopback interface until a rank of another machine asks for more.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

from fminfer.core.errors import PipelineError, UsageError
from fminfer.pipeline.addresses import LOOPBACK, interfaces, is_loopback, listen, machine_id
from fminfer.pipeline.handshake import (
    NoStoreError,
    WrongSecretError,
    create_own,
    new_secret,
    read_own,
)
from fminfer.pipeline.ranks import HOW_TO_SHARE
from fminfer.pipeline.store import Store
from fminfer.pipeline.store_place import POLL_S, StorePlace, hold

AWAY_POLL_S = 0.5
TORN_S = 5.0  # time for the creator of a file to fill it
GREET_S = 20.0  # time for a greeting at the address: the port may be another program's by now
AWAY_S = 30.0  # time for the holder to see, on a shared disk, that a rank is on another machine
FILES = "fminfer-rendezvous-" + "[0-9]" * 6 + ".json"


def meet_in_folder(
    folder: Path, rank: int | None, secret: str | None, timeout_s: float
) -> StorePlace:
    """Rank 0, or the first to come, writes its address into the folder; the others read it.

    Files are numbered: one that leads nowhere (a killed run left it) is followed by the next
    number, which only one rank can create. So two that find the old file agree on the new one.
    An empty file may be one that is being written, and is looked at again for a while.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--rendezvous {folder} cannot be made a folder: {error}") from error
    until_s = time.monotonic() + timeout_s
    asked_s: dict[Path, float] = {}  # when this rank said that it is on another machine
    torn_s: dict[Path, float] = {}  # when this rank first found a file empty or torn
    while time.monotonic() < until_s:
        files = sorted(folder.glob(FILES))
        if files and rank != 0:
            fields = _read(files[-1], secret)  # once: its holder may write another meanwhile
            if not fields and _is_young(files[-1], torn_s):
                time.sleep(POLL_S)
                continue
            place = _join(files[-1], fields, secret, timeout_s)
            if place is not None:
                return place
            if _is_asked(files[-1], fields, asked_s):
                time.sleep(AWAY_POLL_S)
                continue
        if rank in (0, None):
            place = _found(folder, files, secret, timeout_s)
            if place is not None:
                return place
        time.sleep(POLL_S)
    raise PipelineError(f"the ranks found no common store through {folder} in {timeout_s:g} s")


def _read(file: Path, secret: str | None) -> dict[str, object]:
    """Return what a rendezvous file says, or nothing if it is torn or gone.

    Args:
        secret: of the environment; None: it stands in the file, which must be this user's alone.
    """
    try:
        fields = json.loads(read_own(file) if secret is None else file.read_text())
    except PermissionError as error:
        raise UsageError(f"{file} cannot be read: all ranks must be one user's") from error
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(fields, dict) and isinstance(fields.get("port"), int)
    is_whole = is_whole and isinstance(fields.get("hosts"), list)
    return fields if is_whole else {}


def _join(
    file: Path, fields: dict[str, object], secret: str | None, timeout_s: float
) -> StorePlace | None:
    """Connect to the store whose address a file holds; None: it leads nowhere."""
    hosts, port, is_near = fields.get("hosts"), fields.get("port"), _is_near(fields)
    assert isinstance(hosts, list | None) and isinstance(port, int | None)
    used = secret or str(fields.get("secret", ""))
    for host in hosts or ():
        if is_loopback(host) and not is_near:
            continue
        try:
            store = Store(host, port or 0, used, min(GREET_S, timeout_s))
        except (OSError, EOFError, NoStoreError):
            continue
        except WrongSecretError as error:
            if secret is None and used:  # the port of a run that was killed is another's by now
                continue
            raise PipelineError(f"{file}: {error}. {HOW_TO_SHARE}") from None
        return StorePlace(store, host, port or 0, used, timeout_s)
    return None


def _is_young(file: Path, torn_s: dict[Path, float]) -> bool:
    """Return whether a torn file may still be filled; its age is counted from the first look."""
    return time.monotonic() - torn_s.setdefault(file, time.monotonic()) < TORN_S


def _is_near(fields: dict[str, object]) -> bool:
    return fields.get("machine") == machine_id()


def _is_asked(file: Path, fields: dict[str, object], asked_s: dict[Path, float]) -> bool:
    """Ask a holder on another machine to listen there; False: no use, or it had time enough."""
    if not fields or _is_near(fields) or fields["hosts"] != [LOOPBACK]:
        return False
    if file not in asked_s:
        asked_s[file] = time.monotonic()
        try:
            _away(file).touch()
        except OSError as error:
            raise UsageError(f"{file.parent} cannot be written: {error}") from error
    return time.monotonic() - asked_s[file] < AWAY_S


def _away(file: Path) -> Path:
    """Return what says that a rank is on another machine than the holder."""
    return file.with_suffix(".away")


def _found(
    folder: Path, old_files: list[Path], secret: str | None, timeout_s: float
) -> StorePlace | None:
    """Open a store and write its address; None: another rank was faster.

    Args:
        old_files: in order; none of them leads anywhere.
        secret: of the environment; None: one is made, and stands in the file.
    """
    number = int(old_files[-1].stem.rpartition("-")[2]) + 1 if old_files else 0
    file = folder / FILES.replace("[0-9]" * 6, f"{number:06}")
    listener = listen(LOOPBACK, 0)
    port, used = listener.getsockname()[1], secret or new_secret()
    fields = {"machine": machine_id(), "hosts": [LOOPBACK], "port": port}
    try:
        is_first = create_own(file, json.dumps(fields | ({} if secret else {"secret": used})))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}") from error
    if not is_first:
        listener.close()
        return None
    for old in old_files:
        _remove(old)
    place = hold(listener, LOOPBACK, used, timeout_s)
    place.on_leave = lambda: _remove(file)
    what = (place, file, secret)
    threading.Thread(target=_await_away, args=what, name="away", daemon=True).start()
    return place


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    _away(file).unlink(missing_ok=True)


def _write_draft(file: Path, fields: dict[str, object]) -> Path:
    """Write a rendezvous file beside its place, for this user alone."""
    draft = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.{fields['port']}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as text:
        json.dump(fields, text)
    return draft


def _await_away(place: StorePlace, file: Path, secret: str | None) -> None:
    """Listen on every interface once a rank of another machine has asked for it."""
    others = [address for address in interfaces().values() if not is_loopback(address)]
    while others and not place.has_all.wait(AWAY_POLL_S):
        if not list(file.parent.glob(_away(file).name)):  # which asks the disk, not a cache
            continue
        listener = listen("", 0)
        fields = _read(file, secret) | {"hosts": others, "port": listener.getsockname()[1]}
        assert place.holder is not None
        place.holder.listen_at(listener)
        os.replace(_write_draft(file, fields), file)
        return
