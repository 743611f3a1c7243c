"""Who this process is among ranks: by flags, or by the variables of a launcher.

Understood are torchrun (RANK, WORLD_SIZE, …), Slurm's srun, and LSF's jsrun and mpirun.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fminfer.core.config import GroupSizes
from fminfer.core.errors import UsageError
from fminfer.core.option import PipeName, option, options_of

SECRET = "FMINFER_SECRET"  # which every rank of a run that is started apart has
HOW_TO_SHARE = (
    f"Ranks on machines that share no home folder need the same {SECRET} in their environment, "
    "for example of: openssl rand -hex 32"
)
FIRST_JOB_PORT = 20000
NUM_JOB_PORTS = 20000  # a port from a job's number, the same on every node
# What each launcher calls rank, world size, and the number of ranks on this machine.
# srun is last: mpirun starts its own helpers with it, so that both have set their variables.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),  # it has a number of machines
}

_option = partial(option, group="Ranks", commands=("run", "serve", "bench"))


@dataclass(frozen=True)
class RankConfig(GroupSizes):
    """How a run is spread over ranks, as the command line says it."""

    rank: int | None = _option("This process's rank. You start the others yourself.")
    rendezvous: str | None = _option(
        "Where ranks that are started apart, in any order, find each other. Without --rank they "
        "are numbered as they come.",
        metavar="HOST:PORT|FOLDER",
    )
    dist_url: str | None = _option(
        "Where rank 0 listens for ranks that are started apart.",
        metavar="tcp://HOST:PORT",
    )
    join_timeout_s: float = _option(
        "Seconds that a rank may take to join.", default=300.0
    )
    rank_timeout_s: float = _option(
        "Seconds that a rank may be silent before the run ends.", default=30.0
    )
    pp_mode: PipeName | None = _option(
        "Any name that begins with pipe_; it changes nothing, as there is one schedule.",
        group="Old command lines",
        commands=("run",),
    )

    def check(self) -> None:
        """Check that there is one meeting place, and that times are above 0."""
        if self.dist_url is not None and self.rendezvous is not None:
            raise UsageError("give either --dist-url or --rendezvous, not both")
        for name in ("rank_timeout_s", "join_timeout_s"):
            if getattr(self, name) <= 0:
                flag = options_of(RankConfig)[name].told
                raise UsageError(
                    f"{flag} is {getattr(self, name)}; it must be above 0 seconds"
                )


@dataclass(slots=True, frozen=True)
class RankPlace:
    """One rank's place, and where the ranks find each other: of all pipelines, or of one."""

    rank: int | None  # None: in the order of joining
    world_size: int
    host: str = "127.0.0.1"
    port: int = 0
    folder: Path | None = None  # of the rendezvous, in the place of host and port
    listen_fd: int | None = None  # the store's socket, if rank 0 has opened it already
    # the process of the run that started this one; None: another did
    parent: int | None = None
    source: str = "--rank"
    # of torchrun: its store is at host and port, our keys under this
    agent: str | None = None
    is_one_machine: bool = False  # all ranks are on this one
    secret: str | None = field(default=None, repr=False)  # of the environment
    prefix: str = ""  # of one pipeline's keys, where several share a store

    @property
    def opens_store(self) -> bool:
        """Whether this process opens the store, unless one without a number was faster."""
        return self.rank in (None, 0) and not self.prefix


@dataclass(slots=True, frozen=True)
class Spread:
    """Over how many processes a run is spread, and how long these wait for each other."""

    num_stages: int = 1  # of a pipeline
    num_pipelines: int = 1
    num_shards: int = 1  # ranks of a stage
    join_timeout_s: float = RankConfig.join_timeout_s
    rank_timeout_s: float = RankConfig.rank_timeout_s
    num_engines: int = 1  # on this machine, which share its cores, memory and GPUs
    engine_number: int = 0  # of this process's one among them

    @property
    def num_ranks(self) -> int:
        """Of a pipeline."""
        return self.num_stages * self.num_shards


ALONE = Spread()  # one process


def find_rank_place(config: RankConfig, environ: Mapping[str, str]) -> RankPlace | None:
    """Return this process's place among ranks; None: there are none, or they are to start."""
    place = _find_place(config, environ)
    return None if place is None else replace(place, secret=environ.get(SECRET) or None)


def _find_place(config: RankConfig, environ: Mapping[str, str]) -> RankPlace | None:
    if config.rank is not None or config.dist_url is not None:
        return _place_by_flags(config)
    for launcher, (rank_name, size_name, _) in LAUNCHERS.items():
        if rank_name not in environ or _parse_number(environ, size_name, 1) < 2:
            continue
        rank = _parse_number(environ, rank_name)
        size = _parse_number(environ, size_name)
        if config.configured_ranks not in (None, size):
            raise UsageError(
                f"--world-size is {config.configured_ranks}, but {launcher} started {size} "
                "ranks; leave the flag out"
            )
        least = config.data_group_size * config.tensor_parallel_size
        if size % least:
            tensor = ""
            if config.tensor_parallel_size > 1:
                tensor = f" × --tensor-parallel-size {config.tensor_parallel_size}"
            raise UsageError(
                f"{launcher} started {size} ranks, which --data-group-size "
                f"{config.data_group_size}{tensor} does not "
                f"divide. Start a multiple of {least}"
            )
        if config.rendezvous is not None:
            return _place_by_rendezvous(config.rendezvous, rank, size, launcher)
        if launcher == "torchrun":
            return _place_by_torchrun(rank, size, environ)
        host, port = _find_job_address(launcher, environ)
        return RankPlace(rank, size, host, port, source=launcher)
    if config.rendezvous is not None:
        if config.configured_ranks is None:
            raise UsageError(
                "--rendezvous needs --world-size: how many ranks will come"
            )
        return _place_by_rendezvous(
            config.rendezvous, None, config.configured_ranks, "--rendezvous"
        )
    return None


def _parse_number(
    environ: Mapping[str, str], name: str, default: int | None = None
) -> int:
    """Read a launcher's variable that holds a whole number."""
    text = environ.get(name) or ("" if default is None else str(default))
    if not text.isdigit():
        raise UsageError(
            f"{name} is {text!r} in the environment; it must be a whole number"
        )
    return int(text)


def _place_by_flags(config: RankConfig) -> RankPlace | None:
    size = config.configured_ranks
    if config.rank is None:
        if size in (None, 1):
            return None
        raise UsageError("--dist-url needs --rank: which of the ranks this is")
    if size is None:
        raise UsageError("--rank needs --world-size: how many ranks there are")
    if not 0 <= config.rank < size:
        raise UsageError(
            f"--rank is {config.rank}; with --world-size {size} it is from 0 to {size - 1}"
        )
    if size == 1:
        return None
    if config.rendezvous is not None:
        return _place_by_rendezvous(config.rendezvous, config.rank, size, "--rank")
    if config.dist_url is None:
        raise UsageError(
            "--rank needs --dist-url tcp://host:port (host: where rank 0 runs), or --rendezvous"
        )
    url = re.fullmatch(r"tcp://(.+)", config.dist_url)
    if url is None:
        raise UsageError(
            f"--dist-url is {config.dist_url!r}; it must be tcp://host:port"
        )
    host, port = parse_address(url[1], "--dist-url")
    return RankPlace(config.rank, size, host, port)


def _place_by_rendezvous(
    where: str, rank: int | None, size: int, source: str
) -> RankPlace:
    """Return a rank's place; `where` is host:port, or the path of a folder."""
    if re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^/:]+):\d+", where):
        host, port = parse_address(where, "--rendezvous")
        return RankPlace(rank, size, host, port, source=source)
    if ":" in where and "/" not in where:
        parse_address(where, "--rendezvous")  # which says what is wrong with it
    return RankPlace(rank, size, folder=Path(where), source=source)


def _place_by_torchrun(rank: int, size: int, environ: Mapping[str, str]) -> RankPlace:
    if not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        raise UsageError(
            "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT; start the ranks "
            "with torchrun, or unset them"
        )
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = f"{environ.get('TORCHELASTIC_RUN_ID')}/{environ.get('TORCHELASTIC_RESTART_COUNT')}"
    return RankPlace(
        rank,
        size,
        environ["MASTER_ADDR"],
        _parse_number(environ, "MASTER_PORT"),
        source="torchrun",
        agent=attempt if has_agent else None,
        is_one_machine=is_one_machine("torchrun", environ),
    )


def _find_job_address(launcher: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return where rank 0 of a cluster's job listens: MASTER_ADDR, or the job's first node."""
    if launcher == "srun" or (launcher == "mpirun" and "SLURM_JOB_ID" in environ):
        # mpirun's own step may lack the first
        job_nodes = environ.get("SLURM_JOB_NODELIST", "")
        nodes = (
            environ.get("SLURM_STEP_NODELIST", "") if launcher == "srun" else job_nodes
        )
        host = find_first_node(nodes)
        job = environ.get("SLURM_JOB_ID", "0")
    else:
        names = (
            environ.get("LSB_MCPU_HOSTS", "").split()[::2]
            or environ.get("LSB_HOSTS", "").split()
        )
        if environ.get("LSB_DJOB_HOSTFILE"):
            names = Path(environ["LSB_DJOB_HOSTFILE"]).read_text().split()
        # jsrun's lists begin with the node that launches, which computes nothing.
        host = next((name for name in names if not re.match("batch|login", name)), "")
        job = environ.get("LSB_JOBID", "0")
    host = environ.get("MASTER_ADDR") or host
    if not host:
        raise UsageError(
            f"{launcher} did not say on which node rank 0 runs; set MASTER_ADDR, or give "
            "--rendezvous a folder that all nodes see"
        )
    if is_one_machine(launcher, environ) and not environ.get("MASTER_ADDR"):
        host = "127.0.0.1"
    digits = re.sub(r"\D", "", job) or "0"
    return host, _parse_number(
        environ, "MASTER_PORT", FIRST_JOB_PORT + int(digits) % NUM_JOB_PORTS
    )


def is_one_machine(launcher: str, environ: Mapping[str, str]) -> bool:
    """Return whether a launcher says that it started all ranks on this machine."""
    if launcher == "srun":
        return environ.get("SLURM_STEP_NUM_NODES") == "1"
    _, size, local_size = LAUNCHERS[launcher]
    return local_size in environ and environ[local_size] == environ.get(size)


def find_first_node(nodes: str) -> str:
    """Return the first name of a Slurm node list, as node[003-007,9],other."""
    name = re.match(r"(?:[^\[,]|\[[^\]]*\]?)*", nodes)
    assert name is not None  # it matches the empty text
    return re.sub(r"\[([^\-,\]]*)[^\]]*\]?", r"\1", name[0])


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Split host:port; raise a UsageError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{flag}: {text!r} is not host:port, with a port from 1 to 65535"
        )
    return host.strip("[]"), int(port)
