"""The threads of the kernels use all cores of the process, and rest while fewer are in use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fminfer.compute.kernels.kernel_build import find_compiler
from tests.conftest import more

NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)


# Multiplies with five threads and then with two; tells of each thread that the kernels started
# where it may run, and how often it slept while there were two.
USE = """
import json, os, time
from fminfer.machine.threads import shorten_openmp_waits
shorten_openmp_waits()
import torch
from fminfer.forward.registry import find_library
from fminfer.compute.layers.products import ProductKernel
from fminfer.compute.formats.dense import make_dense_weight

def tasks():
    return set(os.listdir("/proc/self/task"))

def sleeps(task):
    with open(f"/proc/self/task/{task}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary"))

torch.set_num_threads(5)
kernel = ProductKernel(find_library("auto", torch.device("cpu")))
others = tasks()
weight = make_dense_weight(torch.randn(1600, 64), "product")
product, x = kernel.pack_weight(weight, None), torch.randn(8, 64)

def multiply(times):
    for _ in range(times):
        product(x)
        time.sleep(0.001)  # so that threads fall asleep

multiply(20)
torch.set_num_threads(2)
multiply(20)
ours = sorted(tasks() - others)
before = [sleeps(task) for task in ours]
multiply(200)
print(json.dumps([
    [sorted(os.sched_getaffinity(int(task))), sleeps(task) - number]
    for task, number in zip(ours, before)
]))
"""


def use_threads(**variables: str) -> list[Any]:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("OMP_")
    }
    command = [sys.executable, "-c", USE]
    done = subprocess.run(
        command, env=environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no Linux")
def test_threads_that_are_not_in_use_are_not_woken() -> None:
    """Where cores had been taken away, each region woke all threads: it took twice as long."""
    found = use_threads()
    assert len(found) == 4
    assert sorted(number > 20 for _, number in found) == [False, False, False, True]


@pytest.mark.skipif(NUM_CORES < 2, reason="needs two cores")
@pytest.mark.parametrize(
    "where", [{"OMP_PLACES": "cores"}, pytest.param({}, marks=more)]
)
def test_threads_use_all_cores_where_openmp_is_bound(where: dict[str, str]) -> None:
    """OpenMP binds the first thread to one core, on which all of ours then computed."""
    cores = sorted(os.sched_getaffinity(0))
    found = use_threads(OMP_PROC_BIND="true", **where)
    assert all(len(allowed) > 1 and set(allowed) <= set(cores) for allowed, _ in found)
