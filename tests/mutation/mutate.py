"""Sees which changes of the code the tests of its package notice.

    scripts/mutate --mutants 600 --seed 0

mutmut's operators make the changes (tests/mutation/mutants.py). Its own runner changes neither
decorated functions nor tables, and runs a whole checkout; this one draws statements of
all kinds. A process imports and collects the tests of a package. For each mutant it
forks one that has the mutant's code in the place of the function's, and runs the tests
that came by the statement, the fastest first, to the first failure. Where none came by,
those run that start processes, which read the mutant from the disk. What runs as
modules are imported needs them imported
anew: for it a process is forked that has imported only other packages, and it collects
the tests.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import click
import coverage
import hypothesis
import pytest
from hypothesis import Phase

from tests.mutation.mutants import PACKAGES, SOURCE, Mutant, draw_mutants

HERE = Path.cwd()  # the copy of the checkout
SURVIVORS = "tests/mutation/survivors.md"
ARGUMENTS = [
    word
    for name in ("terminal", "cacheprovider", "xdist")
    for word in ("-p", f"no:{name}")
]
OUT = os.dup(1)  # pytest captures what is printed
PR_SET_CHILD_SUBREAPER = 36
# A mutant has this many times what its tests take, and this many seconds for a slow machine.
MORE_TIMES = 5
MORE_S = 20
# So many seconds of tests are run for a mutant: those of many slow tests would take
# hours. What a slower one would notice counts as a survivor.
MOST_S = 10
BY_TIME = "it took too long"


class Tests:
    """What is known of a package's tests.

    Attributes:
        times: seconds of each, by its name.
        come_by: tests that run a line of a file.
        imported: lines of a file that run as it is imported.
        starting: tests that start processes.
    """

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.come_by: dict[str, dict[int, list[str]]] = {}
        self.imported: dict[str, list[int]] = {}
        self.starting: list[str] = []
        self.failed: list[str] = []

    def choose(self, mutant: Mutant) -> list[str]:
        """Return those that may notice, fastest first, of MOST_S in all."""
        lines = self.come_by.get(mutant.path, {})
        found = {name for line in mutant.lines for name in lines.get(line, ())}
        if self.runs_on_import(mutant):
            in_file = {name for names in lines.values() for name in names}
            others = [
                *_sorted(self.times, in_file),
                *_sorted(self.times, self.times.keys()),
            ]
        else:
            others = [] if found else _sorted(self.times, self.starting)
        names = dict.fromkeys([*_sorted(self.times, found), *others])
        left = [name for name in names if name not in self.failed]
        ends = accumulate(self.times[name] for name in left)
        return [
            name for name, end in zip(left, ends, strict=True) if end < MOST_S
        ] or left[:1]

    def runs_on_import(self, mutant: Mutant) -> bool:
        lines = set(self.imported.get(mutant.path, ()))
        return mutant.function is None or not lines.isdisjoint(mutant.lines)


def _sorted(times: dict[str, float], names: Any) -> list[str]:
    """Sort by time, in steps; within one, tests of a file stay together for its fixtures."""
    places = {name: place for place, name in enumerate(times)}
    steps = (0.03, 0.3, 3)
    return sorted(
        names, key=lambda name: (sum(times[name] > s for s in steps), places[name])
    )


class _Plugin:
    """Runs mutants in the place of pytest's loop over the tests."""

    def __init__(self, work: Callable[[list[pytest.Item]], object]) -> None:
        self._work = work

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._work(session.items)
        return True


class _Watch:
    """Sees a test's time, and whether it fails or starts processes."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.starts = False
        self.ends_at_failure = False
        self.tell: int | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            if self.tell is not None:
                os.write(self.tell, report.nodeid.encode())
                os._exit(1)

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        started = event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec")
        self.starts |= started or (
            event == "socket.connect" and not isinstance(given[1], tuple)
        )


def _run(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Run tests one after another, and give each once it has run."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        yield item


class _Contexts:
    """Tells coverage which test runs."""

    def __init__(self, seen: coverage.Coverage) -> None:
        self._seen = seen

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seen.switch_context(nodeid)


class Forker:
    """Forks a process at a time, in its own folder, and ends all that it leaves."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.folder = HERE / "t"  # short, for sockets in it

    def run(self, work: Callable[[int], object], limit_s: float) -> str | None:
        """Return the test that failed, as the process says it by its argument, or BY_TIME.

        The process is to end by itself; None is returned if its status is 0.
        """
        told, tell = os.pipe()
        pid = os.fork()
        if not pid:
            status = 3
            try:
                os.close(told)
                os.setsid()
                self._be_quiet()
                work(tell)
                status = 0
            except BaseException as error:
                os.write(tell, f"{type(error).__name__}: {error}"[:500].encode())
            finally:
                os._exit(status)
        os.close(tell)
        status = self._wait(pid, limit_s)
        with open(told, "rb", closefd=True) as said:
            os.set_blocking(told, False)
            words = (said.read() or b"").decode(errors="replace")
        self._end_orphans(pid)
        shutil.rmtree(self.folder, ignore_errors=True)
        if status is None:
            return BY_TIME
        return words or f"it ended with {status}" if status else None

    def _be_quiet(self) -> None:
        self.folder.mkdir(exist_ok=True)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)

    def _wait(self, pid: int, limit_s: float) -> int | None:
        end = time.monotonic() + limit_s
        pause_s = 0.002
        while time.monotonic() < end:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.5)
        else:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # those beside it; its own status stays
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _end_orphans(self, group: int) -> None:
        while (
            children := Path(f"/proc/self/task/{os.getpid()}/children")
            .read_text()
            .split()
        ):
            for child in map(int, children):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def say(text: str) -> None:
    os.write(OUT, f"{text}\n".encode())


@contextmanager
def mutated(mutant: Mutant, times: Iterator[int]) -> Iterator[None]:
    """Write the mutant into the copy; its time is another each time, so that Python
    compiles it."""
    path = Path(mutant.path)
    state = path.stat()
    path.write_text(mutant.after)
    second = next(times)
    os.utime(path, (second, second))
    try:
        yield
    finally:
        path.write_text(mutant.before)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def _codes(code: CodeType, name: str = "") -> Iterator[tuple[str, CodeType]]:
    """Give functions and methods of a module, with qualified names."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            is_class = not each.co_flags & 2  # CO_NEWLOCALS: of functions
            if each.co_name.startswith("<"):
                continue
            if is_class:
                yield from _codes(each, f"{name}{each.co_name}.")
            else:
                yield f"{name}{each.co_name}", each


def _find_code(text: str, mutant: Mutant) -> CodeType:
    assert mutant.function
    name, place = mutant.function
    codes = [
        code
        for found, code in _codes(
            compile(text, str(HERE / mutant.path), "exec", dont_inherit=True)
        )
        if found == name
    ]
    return codes[place]


class Functions:
    """The functions of this process, to give them other code wherever they are held."""

    def __init__(self) -> None:
        self._found: dict[CodeType, list[FunctionType]] = {}
        for each in gc.get_objects():
            if type(each) is FunctionType and each.__code__.co_filename.startswith(
                f"{HERE}/"
            ):
                self._found.setdefault(each.__code__, []).append(each)

    def find(self, mutant: Mutant) -> list[tuple[FunctionType, CodeType]]:
        """Return a mutant's function, and those that it has made, with the code for each.

        They are none if the function cannot have the code.
        """
        before, after = (
            _find_code(text, mutant) for text in (mutant.before, mutant.after)
        )
        if before not in self._found or before.co_freevars != after.co_freevars:
            return []
        return [
            (function, code)
            for old, code in _pairs(before, after)
            for function in self._found.get(old, ())
            if function.__code__.co_freevars == code.co_freevars
        ]


def _pairs(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Give codes with those that take their places, outer ones first."""
    yield before, after
    inner = [
        [each for each in code.co_consts if isinstance(each, CodeType)]
        for code in (before, after)
    ]
    for old, new in zip(*inner, strict=False):
        if old.co_name == new.co_name:
            yield from _pairs(old, new)


class Mutation:
    """One run: mutants by package, and what becomes of each.

    Args:
        results: a line of JSON is appended for each mutant; those in it are passed over.
    """

    def __init__(self, mutants: list[Mutant], results: Path) -> None:
        self._mutants = mutants
        self._results = results
        self.forker = Forker()
        self._seconds = iter(range(10**9, 2 * 10**9, 2))
        self.ends: dict[str, str | None] = {}
        self._read_results()

    def _left(self, package: str) -> list[Mutant]:
        mutants = [each for each in self._mutants if each.package == package]
        return [each for each in mutants if each.name not in self.ends]

    def run(self) -> None:
        """Try those that need nothing imported anew, and then the others."""
        learned = [package for package in PACKAGES if self._left(package)]
        for package in learned:
            self._collect(package, HERE / f"tests-{package.replace('/', '-')}.json")
        gc.freeze()
        for package in learned:
            tests = load_tests(HERE / f"tests-{package.replace('/', '-')}.json")
            for mutant in self._left(package):
                work = partial(self._collect_and_run, tests.choose(mutant))
                self.try_one(mutant, tests, work)

    def _collect(self, package: str, place: Path) -> None:
        """Let a process collect a package's tests, and learn what others it has imported."""
        sys.dont_write_bytecode = False
        pid = os.fork()
        if not pid:
            try:
                Collected(self, package, self._left(package), place).run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"the tests of {package} did not run: status {status}"
        sys.dont_write_bytecode = True  # of the mutants
        self._read_results()
        found = json.loads(place.read_text())
        self._import_others(found["modules"], found["environ"])

    def _read_results(self) -> None:
        self._results.touch()
        lines = map(json.loads, self._results.read_text().splitlines())
        self.ends = {each["name"]: each["killed_by"] for each in lines}

    def _import_others(self, modules: list[str], environ: dict[str, str]) -> None:
        os.environ.update(environ)
        for name in modules:
            if name not in sys.modules:
                with suppress(Exception):
                    importlib.import_module(name)

    def add(self, mutant: Mutant, killed_by: str | None) -> None:
        self.ends[mutant.name] = killed_by
        line = {"name": mutant.name, "place": str(mutant), "killed_by": killed_by}
        with self._results.open("a") as file:
            file.write(json.dumps(line | {"diff": mutant.diff()}) + "\n")
        survived = f"SURVIVED  {mutant}\n{mutant.diff()}"
        say(f"killed    {mutant}  {killed_by}" if killed_by else survived)

    def try_one(
        self, mutant: Mutant, tests: Tests, work: Callable[[int], object]
    ) -> None:
        """Let a fork do the work, with the mutant on the disk, and write down how it ended."""
        chosen = tests.choose(mutant)
        limit_s = MORE_S + MORE_TIMES * sum(tests.times[name] for name in chosen)
        with mutated(mutant, self._seconds):
            self.add(mutant, self.forker.run(work, limit_s) if chosen else None)

    def _collect_and_run(self, chosen: list[str], tell: int) -> None:
        watch = _Watch()
        watch.tell = tell

        def work(items: list[pytest.Item]) -> None:
            by_name = {item.nodeid: item for item in items}
            for _ in _run([by_name[name] for name in chosen]):
                pass

        files = dict.fromkeys(name.partition("::")[0] for name in chosen)
        where = f"--basetemp={self.forker.folder}/p"
        status = pytest.main([*ARGUMENTS, where, *files], [_Plugin(work), watch])
        if status:
            raise RuntimeError(f"collecting: {status!r}")


class Collected:
    """A package's tests, collected in this process."""

    def __init__(
        self, mutation: Mutation, package: str, mutants: list[Mutant], place: Path
    ) -> None:
        self._mutation = mutation
        self._package = package
        self._mutants = mutants
        self._place = place
        self._forker = mutation.forker
        self._watch = _Watch()
        self._is_done = False

    def run(self) -> NoReturn:
        """Collect the tests, and try the mutants that need nothing imported anew."""
        pattern = f"{HERE}/{SOURCE}/{self._package}/*"
        self._seen = coverage.Coverage(
            data_file=None, include=[pattern], config_file=False
        )
        self._seen.start()
        plugins = [_Plugin(self._work), self._watch]
        status = pytest.main([*ARGUMENTS, *PACKAGES[self._package]], plugins)
        assert self._is_done, f"collecting {self._package}: {status!r}"
        os._exit(0)

    def _work(self, items: list[pytest.Item]) -> None:
        sys.dont_write_bytecode = True
        say(f"{self._package}: {len(self._mutants)} mutants, {len(items)} tests")
        others = [
            name for name in sys.modules if not name.startswith(("fminfer", "tests"))
        ]
        tests = self._learn(items)
        self._seen.stop()
        known = vars(tests) | {"modules": others, "environ": dict(os.environ)}
        self._place.write_text(json.dumps(known))
        by_name = {item.nodeid: item for item in items}
        functions = Functions()
        gc.freeze()  # a fork's collections leave these pages alone
        for mutant in self._mutants:
            if not tests.runs_on_import(mutant) and (found := functions.find(mutant)):
                ordered = [by_name[name] for name in tests.choose(mutant)]
                self._mutation.try_one(
                    mutant, tests, partial(self._try, ordered, found)
                )
        self._is_done = True

    def _try(
        self,
        items: list[pytest.Item],
        functions: list[tuple[FunctionType, CodeType]],
        tell: int,
    ) -> None:
        for function, code in functions:
            function.__code__ = code
        self._watch.tell = tell
        items[0].config._tmp_path_factory._given_basetemp = self._forker.folder / "p"  # type: ignore[attr-defined]
        for _ in _run(items):
            pass

    def _learn(self, items: list[pytest.Item]) -> Tests:
        """Run all tests in a fork: for the lines that they come by, and for their times."""
        failure = self._forker.run(partial(self._write_tests, items), 1800)
        assert failure is None, f"{self._package}: {failure}"
        tests = load_tests(self._place)
        if tests.failed:
            say(f"left out, for they fail without a change: {tests.failed}")
        return tests

    def _write_tests(self, items: list[pytest.Item], tell: int) -> None:
        tests = Tests()
        items[0].config.pluginmanager.register(_Contexts(self._seen))
        sys.addaudithook(self._watch.hear)
        begun = time.perf_counter()
        for item in _run(items):
            tests.times[item.nodeid] = time.perf_counter() - begun
            if self._watch.starts:
                tests.starting.append(item.nodeid)
            self._watch.starts = False
            begun = time.perf_counter()
        tests.failed = self._watch.failed
        self._seen.stop()
        data = self._seen.get_data()
        for file in data.measured_files():
            path = os.path.relpath(file, HERE)
            lines = data.contexts_by_lineno(file).items()
            tests.imported[path] = [line for line, names in lines if "" in names]
            tests.come_by[path] = {
                line: [*filter(None, names)] for line, names in lines
            }
        self._place.write_text(json.dumps(vars(tests)))


def load_tests(place: Path) -> Tests:
    tests = Tests()
    found = json.loads(place.read_text())
    for name in vars(tests):
        setattr(tests, name, found[name])
    tests.come_by = {
        path: {int(line): names for line, names in lines.items()}
        for path, lines in tests.come_by.items()
    }
    return tests


def read_reasons(place: Path) -> dict[str, str]:
    """Return why mutants change nothing that is promised, by name."""
    reasons = {}
    reason = ""
    for line in place.read_text().splitlines():
        if line.startswith("## "):
            reason = line[3:]
        elif line.startswith("- `"):
            reasons[line.split("`")[1]] = reason
    return reasons


def print_scores(
    mutants: list[Mutant], ends: dict[str, str | None], reasons: Any
) -> None:
    rows = Counter[tuple[str, str]]()
    for mutant in mutants:
        if mutant.name in ends:
            found = ends[mutant.name]
            end = (
                "killed" if found else "same" if mutant.name in reasons else "survived"
            )
            rows[mutant.package, end] += 1
            rows["all", end] += 1
    print(
        "\n| package | mutants | killed | same for users | survived | killed of all |"
    )
    print("|---|---|---|---|---|---|")
    for package in [*PACKAGES, "all"]:
        counts = [rows[package, end] for end in ("killed", "same", "survived")]
        if total := sum(counts):
            cells = " | ".join(map(str, [total, *counts]))
            print(f"| {package} | {cells} | {counts[0] / total:.1%} |")


@click.command()
@click.option(
    "--mutants", "num_mutants", default=600, show_default=True, help="How many to draw."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--results", type=click.Path(path_type=Path), help="File to go on with.")
@click.option("--checkout", type=click.Path(path_type=Path), required=True, hidden=True)
@click.option(
    "--list", "only_list", is_flag=True, help="Print what was drawn, and end."
)
@click.option("--unchanged", is_flag=True, help="Change nothing: all are to survive.")
@click.argument("chosen", nargs=-1)
def main(
    num_mutants: int,
    seed: int,
    results: Path | None,
    checkout: Path,
    only_list: bool,
    unchanged: bool,
    chosen: tuple[str, ...],
) -> None:
    """Change one place at a time; CHOSEN are packages, or names of mutants."""
    mutants = draw_mutants(num_mutants, seed)
    unknown = set(chosen) - PACKAGES.keys() - {each.name for each in mutants}
    if unknown:
        raise click.UsageError(
            f"no package and no mutant drawn: {', '.join(sorted(unknown))}"
        )
    if chosen:
        mutants = [each for each in mutants if {each.name, each.package} & {*chosen}]
    if only_list:
        for mutant in mutants:
            print(f"{mutant}\n{mutant.diff()}")
        return
    if unchanged:
        mutants = [replace(each, change=None) for each in mutants]
    settings: Any = {"derandomize": True, "database": None, "deadline": None}
    hypothesis.settings.register_profile(
        "mutate", phases=[Phase.explicit, Phase.generate], **settings
    )
    hypothesis.settings.load_profile("mutate")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for what tests start
    run = Mutation(mutants, checkout / results if results else HERE / "results.jsonl")
    run.run()
    reasons = read_reasons(HERE / SURVIVORS)
    print_scores(mutants, run.ends, reasons)
    survived = [
        each for each in mutants if each.name in run.ends and not run.ends[each.name]
    ]
    for mutant in survived:
        print(
            f"\n{mutant}  {reasons.get(mutant.name, 'no reason is given')}\n{mutant.diff()}"
        )


if __name__ == "__main__":
    main()
