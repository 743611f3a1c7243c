"""Fails calls on files, or the power, over all commands: `scripts/torture --faults`,
`--cuts`."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import click

from tests.faults.commands import COMMANDS, Command
from tests.faults.file_faults import Loop, Ready, WrongError
from tests.faults.power_cuts import MODES, Cut, CutLoop
from tests.faults.preload import KINDS, Plan, become_preloaded
from tests.faults.server_faults import ServerLoop

Case = TypeVar("Case", Plan, Cut)
NAMES = (*(command.name for command in COMMANDS), ServerLoop.name)
READERS = tuple(command.name for command in COMMANDS if not command.writes)
SHARED_MEMORY = Path("/dev/shm")  # where to sync takes no time


class Target(Protocol):
    """What cases are tried of."""

    def plans(self) -> Iterator[Plan]: ...

    def cuts(self) -> Iterator[Cut]: ...

    def try_case(self, plan: Plan) -> object: ...

    def try_cut(self, cut: Cut) -> None: ...


class CommandTarget:
    """A command."""

    def __init__(
        self, loop: Loop, command: Command, seed: int, *, is_new_boot: bool
    ) -> None:
        self._loop = loop
        self._ready: Ready = loop.make_ready(command)
        self._open_cuts = partial(
            CutLoop, loop, self._ready, seed, is_new_boot=is_new_boot
        )
        self._cuts: CutLoop | None = None
        self.plans = self._ready.plans

    def cuts(self) -> Iterator[Cut]:
        """Record its changes, and yield all power cuts."""
        self._cuts = self._open_cuts()
        return self._cuts.cuts()

    def try_cut(self, cut: Cut) -> None:
        """Build the state after a power cut, and run it from there."""
        self._cuts = self._cuts or self._open_cuts()
        self._cuts.try_cut(cut)

    def try_case(self, plan: Plan) -> object:
        """Run it by a plan, and again without."""
        return self._loop.try_case(self._ready, plan)


def open_target(loop: Loop, name: str, seed: int, *, is_new_boot: bool) -> Target:
    """Make a command or a server ready."""
    if name == ServerLoop.name:
        return ServerLoop(loop).make_ready()
    command = next(each for each in COMMANDS if each.name == name)
    return CommandTarget(loop, command, seed, is_new_boot=is_new_boot)


@dataclass(slots=True)
class Table:
    """What was tried, by command and by what was wrong, and what failed."""

    tried: Counter[tuple[str, ...]] = field(default_factory=Counter)
    failed: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def lines(self, titles: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
        """Yield a table for each title, of its values by commands."""
        names = list(dict.fromkeys(key[0] for key in self.tried))
        for place, (title, values) in enumerate(titles, 1):
            yield f"| {title} | " + " | ".join(names) + " | tried | held | failed |"
            yield "|---" * (len(names) + 4) + "|"
            for value in (*values, None):
                keys = [key for key in self.tried if value in (None, key[place])]
                if not keys:
                    continue
                cells = [
                    self._cell(key for key in keys if key[0] == name) for name in names
                ]
                tried, failed = self._sums(keys)
                sums = f"{tried:,} | {tried - failed:,} | {failed:,}"
                yield f"| {value or 'sum'} | " + " | ".join(cells) + f" | {sums} |"
            yield ""

    def _cell(self, keys: Iterable[tuple[str, ...]]) -> str:
        tried, failed = self._sums(list(keys))
        return (
            f"{tried:,} ({failed:,} failed)"
            if failed
            else f"{tried:,}"
            if tried
            else ""
        )

    def _sums(self, keys: list[tuple[str, ...]]) -> tuple[int, int]:
        return sum(self.tried[key] for key in keys), sum(
            self.failed[key] for key in keys
        )


def choose(
    cases: Iterable[Case],
    num_cases: int,
    seed: int,
    group_of: Callable[[Case], Hashable],
) -> list[Case]:
    """Draw cases by a seed, of each group about as many as of others."""
    source = random.Random(seed)
    groups: dict[Hashable, list[Case]] = {}
    for case in cases:
        groups.setdefault(group_of(case), []).append(case)
    for group in groups.values():
        source.shuffle(group)
    order = [*groups.values()]
    chosen: list[Case] = []
    while order and len(chosen) < num_cases:
        source.shuffle(order)
        chosen += [group.pop() for group in order]
        order = [group for group in order if group]
    return chosen[:num_cases]


@dataclass(slots=True)
class Wish:
    """What to try: so many cases of each command (None: all), drawn by a seed, until a time."""

    names: Sequence[str]
    is_cuts: bool
    num_cases: int | None
    seed: int = 1
    end_s: float = float("inf")
    is_new_boot: bool = True
    is_loud: bool = True


def go_over(wish: Wish) -> tuple[Table, list[str]]:
    """Try cases; return the table, and what failed."""
    table = Table()
    failures: list[str] = []
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="faults-") as folder:
        loop = Loop(Path(folder))
        for name in dict.fromkeys(wish.names):
            if time.monotonic() > wish.end_s:
                break
            target = open_target(loop, name, wish.seed, is_new_boot=wish.is_new_boot)
            started_s = time.monotonic()
            before = len(failures)
            num_tried = 0
            for case, key, try_it in _cases_of(target, wish):
                if time.monotonic() > wish.end_s:
                    break
                num_tried += 1
                place = (name, *key)
                table.tried[place] += 1
                try:
                    try_it()
                except WrongError as wrong:
                    table.failed[place] += 1
                    failures.append(f"{name} {case}: {wrong}")
                    if wish.is_loud:
                        click.echo(f"FAILS {failures[-1]}\n")
            if wish.is_loud:
                took_s = time.monotonic() - started_s
                num_failed = len(failures) - before
                click.echo(
                    f"{name}: {num_tried:,} in {took_s:.0f} s, {num_failed:,} failed"
                )
    return table, failures


def _cases_of(
    target: Target, wish: Wish
) -> Iterator[tuple[str, tuple[str, ...], Callable[[], object]]]:
    """Yield the cases of a target: a name, its place in the table, and what tries it."""
    if wish.is_cuts:
        cuts = list(target.cuts())
        if wish.num_cases is not None:
            cuts = choose(cuts, wish.num_cases, wish.seed, lambda cut: cut.mode)
        for cut in cuts:
            yield str(cut), (cut.mode,), lambda cut=cut: target.try_cut(cut)  # type: ignore[misc]
        return
    plans = list(target.plans())
    if wish.num_cases is not None:
        plans = choose(
            plans,
            wish.num_cases,
            wish.seed,
            lambda plan: (plan.kind, plan.error, plan.is_lasting),
        )
    for plan in plans:
        key = (plan.kind, plan.error)
        yield str(plan), key, lambda plan=plan: target.try_case(plan)  # type: ignore[misc]


def try_one(wish: Wish, text: str) -> bool:
    """Try one case of each command, and show what was said; return whether it held."""
    is_right = True
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        loop = Loop(Path(folder))
        for name in wish.names:
            target = open_target(loop, name, wish.seed, is_new_boot=wish.is_new_boot)
            try:
                if wish.is_cuts:
                    found: object = target.try_cut(Cut.read(text))
                else:
                    found = target.try_case(Plan.read(text))
                click.echo(f"{name} {text} holds: {found}")
            except WrongError as wrong:
                is_right = False
                click.echo(f"{name} {text} FAILS: {wrong}")
    return is_right


@click.command()
@click.argument("names", nargs=-1, metavar="[COMMAND]...")
@click.option("--cuts", "is_cuts", is_flag=True, help="Fail the power, and not calls.")
@click.option("--seed", default=1, show_default=True)
@click.option("--cases", default=40, show_default=True, help="Of each command.")
@click.option("--all", "is_all", is_flag=True, help="All cases: hours.")
@click.option(
    "--case", "text", help="This one, such as open:3:EIO, write:1:ENOSPC:on; 12:zeros."
)
@click.option("--minutes", default=1e6, help="End after so long.")
@click.option(
    "--same-boot",
    is_flag=True,
    help="After a cut, claims are whole, and of this start.",
)
def main(
    names: tuple[str, ...],
    is_cuts: bool,
    seed: int,
    cases: int,
    is_all: bool,
    text: str | None,
    minutes: float,
    same_boot: bool,
) -> None:
    """Fail calls on files; end with status 1 if something is lost, wrong, or told by a
    traceback.

    Commands are run, resume (a killed run), grown (a changed input), workers (two over
    a folder), claims (two over what a killed run left), load (a model in the folder),
    embeddings, kept (answers), told (--stats, --trace, --report), split, merge,
    quantize, report, status, check and server.
    """
    become_preloaded()
    if unknown := set(names) - set(NAMES):
        raise click.UsageError(
            f"no such command: {min(unknown)}; there are {', '.join(NAMES)}"
        )
    chosen = [name for name in names or NAMES if not (is_cuts and name in READERS)]
    wish = Wish(
        chosen,
        is_cuts,
        None if is_all else cases,
        seed,
        time.monotonic() + minutes * 60,
        is_new_boot=not same_boot,
    )
    if text is not None:
        raise SystemExit(not try_one(wish, text))
    table, failures = go_over(wish)
    errors = sorted({key[-1] for key in table.tried})
    titles = (
        [("after a cut", MODES)] if is_cuts else [("call", KINDS), ("error", errors)]
    )
    click.echo("\n" + "\n".join(table.lines(titles)))
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
