"""Names of a cluster's jobs: what a name says of the files that its job answers.

It knows text only.

The old tool's jobs were called `lsf_<model>#<path of the input>`, and jobs of one file still are;
those of a list of files are called `<name>.<digest of the list>`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLES = ("LSB_JOBNAME", "SLURM_JOB_NAME")  # where LSF and Slurm tell a job its name
OLD_PREFIX = "lsf_"
# What a queue's listing would break at, and the brackets of LSF's arrays.
_ODD = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\[\]]")


def infer_data_of(environ: Mapping[str, str]) -> Path | None:
    """Return the path that this job's name holds, behind its first #; None: it holds none."""
    for variable in VARIABLES:
        parts = parts_of(environ.get(variable, ""))
        if parts is not None:
            return parts[1]
    return None


def parts_of(job_name: str) -> tuple[str, Path] | None:
    """Take `lsf_<name>#<path>` apart; None: it is no such name."""
    prefix, _, path = job_name.partition("#")
    if not prefix.startswith(OLD_PREFIX) or not path:
        return None
    return prefix.removeprefix(OLD_PREFIX), Path(path)


def name_of_file(name: str, path: Path) -> str:
    """Name the job of one file; characters that a scheduler cannot take become `?`."""
    return _ODD.sub("?", f"{OLD_PREFIX}{name}#{path}").strip()


def name_of_list(name: str, paths: Sequence[Path]) -> str:
    """Name the job of a list of files; another list has another name."""
    digest = hashlib.blake2b(b"\0".join(map(os.fsencode, paths)), digest_size=4)
    return f"{name}.{digest.hexdigest()}"


def is_of(job_name: str, name: str) -> bool:
    """Tell whether a job was submitted under a name."""
    old = f"{OLD_PREFIX}{name}#"
    return job_name.startswith(old) or bool(
        re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{8}}", job_name)
    )
