"""Processes that share a run have the same weights, or none of them answers a row."""

from __future__ import annotations

import json
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fminfer.core.config import EngineConfig
from fminfer.core.errors import PipelineError
from fminfer.models.checkpoint import open_model
from fminfer.models.fingerprint import digest_weight_files, name_different_files
from fminfer.plan.planning import plan_ahead
from fminfer.runtime.load.agreement import settle_plan
from fminfer.runtime.load.builder import load_part
from fminfer.runtime.team.team_core import Team
from fminfer.runtime.team.team_messages import Report, send
from fminfer.runtime.team.team_process import TeamPipeline
from tests.runtime.test_team import LOADED


class OneOfTwo:
    """Rank 1 of two on one machine; rank 0 has said what it is given."""

    rank = 1
    world_size = 2
    local_rank = 1
    local_size = 2

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    def gather(self, name: str, value: object = None) -> list[Any]:
        return [self._said.get(name, value), value]


@pytest.fixture(scope="module")
def folders(
    llama_checkpoint: tuple[Path, Any], tmp_path_factory: Any
) -> tuple[Path, Path]:
    """Give two folders in two shards each, whose second shards differ in one tensor."""
    tensors = load_file(llama_checkpoint[0] / "model.safetensors")
    names = sorted(tensors)
    homes = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(names)}
    changed = next(name for name in names if homes[name] == "model-1.safetensors")
    pair = []
    for change in (0.0, 0.1):
        folder: Path = tmp_path_factory.mktemp("copy")
        (folder / "config.json").write_bytes(
            (llama_checkpoint[0] / "config.json").read_bytes()
        )
        for file in sorted(set(homes.values())):
            part = {name: tensors[name] for name in names if homes[name] == file}
            if changed in part:
                part[changed] = part[changed] + change
            save_file(part, folder / file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": homes})
        )
        pair.append(folder)
    return pair[0], pair[1]


def load_as_rank_1(folder: Path, of_rank_0: Path) -> Any:
    config = EngineConfig(model=str(folder), dtype="float32", kernels="off")
    digests = digest_weight_files(open_model(EngineConfig(model=str(of_rank_0))))
    num_threads = torch.get_num_threads()
    try:
        group: Any = OneOfTwo({"weights": digests})
        plan = settle_plan(plan_ahead(config, open_model(config)), group)
        return load_part(plan, group)
    finally:
        torch.set_num_threads(num_threads)


def test_a_rank_with_other_weights_is_refused(folders: tuple[Path, Path]) -> None:
    """Configs and options were compared only: the two halves of two models answered in
    silence."""
    with pytest.raises(
        PipelineError, match=r"of rank 1 are not those of rank 0: model-1\."
    ):
        load_as_rank_1(folders[1], of_rank_0=folders[0])


def test_a_rank_with_a_copy_of_the_weights_is_not(folders: tuple[Path, Path]) -> None:
    assert load_as_rank_1(folders[0], of_rank_0=folders[0]).part.stage == 1


def test_a_pipeline_with_other_weights_is_refused(folders: tuple[Path, Path]) -> None:
    opened = [open_model(EngineConfig(model=str(folder))) for folder in folders]
    mine, theirs = map(digest_weight_files, opened)

    def start(*found: dict[str, str]) -> Team:
        pipelines = []
        for number, digests in enumerate(found):
            ours, end = Pipe()
            pipelines.append(TeamPipeline(number, ours))
            for report in (Report(file_digests=digests), Report(loaded=LOADED)):
                send(end, report)
            end.close()
        plan = plan_ahead(EngineConfig(model=str(folders[0])), opened[0])
        return Team(plan, lambda: pipelines, print)

    with pytest.raises(PipelineError, match=r"pipeline 1 are not those .*: model-1\."):
        start(mine, theirs)
    start(mine, mine).close()


def test_differences_are_named_and_not_all_of_them() -> None:
    assert name_different_files({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == ""
    assert name_different_files({"a": "1", "b": "2"}, {"a": "1"}) == "b"
    many = {f"{n}": "" for n in range(9)}
    assert name_different_files(many, {}) == "0, 1, 2 and 6 more"
