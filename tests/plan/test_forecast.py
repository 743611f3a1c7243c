"""One forecast of memory: `check` plans with it for any machine, and a run refuses by it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import fminfer
from fminfer.cli.app import main
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.values.spec import Mlp
from fminfer.core.config import EngineConfig
from fminfer.core.errors import PipelineError, UsageError
from fminfer.machine import control_groups, host_memory
from fminfer.models.checkpoint import Checkpoint, open_checkpoint, open_model
from fminfer.pipeline.group import Group, check_agreement
from fminfer.plan import machine_facts
from fminfer.plan.expected_bytes import RUN_BYTES
from fminfer.plan.machine_facts import Machine
from fminfer.plan.planning import make_plan, plan_ahead
from fminfer.plan.run_plan import ExpectedBytes, RunPlan
from fminfer.plan.shortage import auto_budget, find_rank_shortage, find_room
from fminfer.runtime.load import agreement
from fminfer.runtime.load.agreement import require_room_for_all, settle_plan
from tests.conftest import make_model

SMALL = EngineConfig(
    random_init="llama-160m", dtype="float32", kernels="off", device="cpu"
)
GIB = 1 << 30


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    lines = [
        {"prompt": "a", "max_tokens": 9},
        {"prompt": 5},
        {"prompt": "b", "max_tokens": 1000},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_model(SMALL)


@pytest.fixture
def halves(llama_checkpoint: tuple[Path, Any], tmp_path: Path) -> Checkpoint:
    """Weights in float16, and a config that does not say so."""
    folder, _ = llama_checkpoint
    fields = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in fields.items() if "dtype" not in name}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    tensors = load_file(folder / "model.safetensors")
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in tensors.items()}, file)
    return open_model(EngineConfig(model=str(tmp_path), skip_tokenizer_init=True))


def let_be_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int, swap: int = 0) -> None:
    """Have so much memory for a run, beside what this process has."""
    monkeypatch.setattr(machine_facts, "measure_free_bytes", lambda _: num_bytes)
    monkeypatch.setattr(machine_facts, "measure_free_swap_bytes", lambda: swap)


def takes_of(config: EngineConfig, checkpoint: Checkpoint) -> ExpectedBytes:
    return plan_ahead(config, checkpoint).this_rank.takes


def check(*arguments: object) -> Result:
    flags = ["--dtype", "float32", "--kernels", "off"]
    return CliRunner().invoke(main, ["check", *flags, *map(str, arguments)])


def test_a_model_that_does_not_fit_gets_a_table_and_its_lines_are_checked(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line was told to raise --budget: nothing said that the weights do not fit."""
    let_be_free(monkeypatch, GIB // 4)
    found = check(rows, "--random-init", "llama-160m", "--device", "cpu")
    assert found.exit_code == 1 and "out_of_memory" not in found.output
    assert "2 right, 1 wrong (1 invalid_type)" in found.output
    assert "KV cache  none fits: random llama-160m does not fit" in found.output
    assert "--dtype bfloat16, which takes half" in found.output
    table = [
        line.split()
        for line in found.output.splitlines()
        if "MiB" in line and "0" in line
    ]
    assert table[0][:2] == ["0", "12"], found.output
    report = json.loads(check(rows, "--random-init", "llama-160m", "--json").stdout)
    assert report["memory"]["kv_tokens"] == 0 and "free" in report["memory"]["shortage"]


def test_another_machine_is_planned_for(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_be_free(monkeypatch, 1)  # here, which does not matter
    flags = [
        "--random-init",
        "bloom-7b1",
        "--world-size",
        "8",
        "--data-group-size",
        "2",
    ]
    found = check(rows, *flags, "--device-memory", "16G", "--json")
    assert found.exit_code == 3, found.output
    report = json.loads(found.stdout)
    memory = report["memory"]
    assert [report["device"], memory["room"], memory["num_pipelines"]] == [
        "cuda",
        16 * GIB,
        2,
    ]
    assert [each["rank"] for each in memory["processes"]] == [0, 1, 2, 3]
    most = max(memory["processes"], key=lambda each: cast(int, each["total"]))
    assert most["total"] <= 16.1 * GIB  # the cache is rounded up to blocks
    assert memory["kv_tokens"] % 32 == 0 and memory["kv_tokens"] > 1000
    assert "steps are timed on the machine" in report["work"]["why_not"]
    flags[3] = "2"
    found = check(rows, *flags, "--device-memory", "16G")
    assert found.exit_code == 1
    assert (
        "Spread it over more: --world-size 6 or above with --data-group-size 2"
        in found.output
    )
    says = re.search(
        r"take (.*) GiB \((.*) GiB for weights in .*, the rest for", found.output
    )
    assert says is not None and 7e9 * 2 < float(says[2]) * GIB < float(says[1]) * GIB
    flags[3] = "6"
    assert check(rows, *flags, "--device-memory", "16G").exit_code == 3, (
        "as it was told"
    )
    found = check(rows, *flags, "--device-memory", "16G", "--budget", str(10**12))
    assert found.exit_code == 1, "more devices would not help"
    assert "Use a smaller --budget" in found.output
    assert check(rows, "--data-group-size", "3", "--world-size", "4").exit_code == 2
    assert "is no size" in check(rows, "--device-memory", "80").output


def test_a_run_refuses_with_the_figures_before_it_reads_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a run met the system's killer after it had read for minutes."""
    let_be_free(monkeypatch, GIB // 4)
    monkeypatch.setattr(
        "fminfer.runtime.load.builder.load_part",
        lambda *_: pytest.fail("weights are read"),
    )
    with pytest.raises(
        UsageError, match=r"would take .*iB.* weights in float32.* are free"
    ):
        fminfer.Engine(**asdict(SMALL))


def test_what_fits_is_not_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = takes_of(SMALL, checkpoint)
    # our own grows a bit
    least = 162_417_408 * 4 + 32 * found.kv_token + RUN_BYTES + (1 << 20)
    let_be_free(monkeypatch, least)
    assert plan_run(SMALL, checkpoint).why_reread == ""
    let_be_free(monkeypatch, least // 2, swap=least)  # it goes on in swap
    assert plan_run(SMALL, checkpoint).why_reread == ""
    let_be_free(monkeypatch, least - (40 << 20))
    with pytest.raises(UsageError):
        plan_run(SMALL, checkpoint)


def joined_bytes(checkpoint: Checkpoint) -> int:
    """Return what a llama's products of q, k and v, and of gate and up, take in 16 bits."""
    (layer, *_) = checkpoint.model.layers
    hidden = checkpoint.model.hidden_size
    assert isinstance(layer.mlp, Mlp)
    outputs = sum(layer.attention.qkv_sizes) + 2 * layer.mlp.size
    return 2 * outputs * hidden * len(checkpoint.model.layers)


def test_the_tables_of_positions_are_foreseen(checkpoint: Checkpoint) -> None:
    """Of a context of a million tokens they take 0.5 GB, and nothing counted them."""
    config = replace(SMALL, device="cuda")
    machine = Machine(device_bytes=80 * GIB)
    found = make_plan(config, checkpoint, machine).this_rank.takes
    longer = make_plan(
        config, replace(checkpoint, max_model_len=100_000), machine
    ).this_rank.takes
    more = 100_000 - checkpoint.context_length
    assert longer.libraries - found.libraries == 2 * 4 * 32 * more


def test_the_graphs_of_a_gpu_are_foreseen(checkpoint: Checkpoint) -> None:
    """They are captured while a run computes, when its KV cache has taken what was free."""

    def work(**options: Any) -> int:
        machine = Machine(device_bytes=80 * GIB, is_fast_in_bfloat16=True)
        config = replace(SMALL, device="cuda", **options)
        return make_plan(config, checkpoint, machine).this_rank.takes.work

    without = work(kernels="off")
    assert 100 << 20 < work(kernels="auto") - without < 300 << 20
    assert work(kernels="auto", max_rows=8) < without + (20 << 20)


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_a_packed_head_is_held_once(tmp_path: Path) -> None:
    """It counted as mapped, with a tied embedding, which is looked up in it now."""
    for name in ("gpt2", "gpt2-untied"):
        make_model(name).save_pretrained(tmp_path / name)
    config = EngineConfig(model=str(tmp_path / "gpt2"), dtype="float32", device="cpu")
    found = open_checkpoint(str(tmp_path / "gpt2"))
    tied = takes_of(config, found)
    other = takes_of(config, open_checkpoint(str(tmp_path / "gpt2-untied")))
    head = 4 * found.model.vocab_size * found.model.embed_size
    assert other.held_weights == tied.held_weights > 0
    assert other.mapped - tied.mapped == other.weights - tied.weights == head
    off = replace(config, kernels="off")
    plain = takes_of(off, found)
    assert plain.mapped - tied.mapped >= head


def test_mapped_files_can_be_dropped(
    halves: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are used where their file is mapped never fill memory, but may be slow.

    They counted as held where the config does not say the dtype that they have. Those
    of q, k and v and of gate and up are joined, which makes copies: they counted as mapped.
    """
    config = EngineConfig(model=halves.name, dtype="float16", device="cpu")
    found = takes_of(config, halves)
    assert found.held_weights == joined_bytes(halves) < found.weights
    # This process has run other tests: it may be above 1 GiB.
    monkeypatch.setattr(machine_facts, "measure_process_bytes", lambda: 0)
    let_be_free(monkeypatch, found.weights - 1, swap=GIB)
    assert found.reads_files
    assert (
        "read from the disk again at each step" in plan_run(config, halves).why_reread
    )
    let_be_free(monkeypatch, found.weights, swap=GIB)
    assert plan_run(config, halves).why_reread == ""


def test_what_latent_attention_moves_is_held(tmp_path: Path) -> None:
    """Of `kv_up` a layer makes two tensors of its own; it counted as mapped."""
    make_model("youtu").half().save_pretrained(tmp_path)
    found = open_checkpoint(str(tmp_path))
    config = EngineConfig(model=found.name, dtype="float16", device="cpu")
    of_run = takes_of(config, found)
    layer = found.model.layers[0]
    hidden = found.model.hidden_size
    how = layer.attention
    mlp = cast("Mlp", layer.mlp)
    assert how.latent is not None
    kv_up = how.heads * (how.latent.key_dim + how.latent.value_dim) * how.latent.rank
    joined = 2 * mlp.size * hidden
    assert of_run.held_weights == 2 * len(found.model.layers) * (joined + kv_up)


def test_mapped_files_leave_room_for_the_cache(
    halves: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` called lines out_of_memory that a run answers: it measures what is free
    once it has loaded, and the system counts mapped files as free."""
    config = EngineConfig(model=halves.name, dtype="float16", device="cpu")
    monkeypatch.setattr(machine_facts, "measure_process_bytes", lambda: 0)
    found = takes_of(config, halves)
    assert found.mapped == found.weights - joined_bytes(halves) > 0
    free = found.weights - (1 << 10) + RUN_BYTES
    let_be_free(monkeypatch, free)
    num_tokens = plan_ahead(config, halves).num_kv_tokens
    left = free - found.libraries - found.held_weights
    of_run = auto_budget(found.kv_token, 1 << 30, left, found.work, "cpu")
    assert num_tokens == -(-of_run // 32) * 32 > 32


def plan_run(
    config: EngineConfig, checkpoint: Checkpoint, group: Group | None = None
) -> RunPlan:
    return settle_plan(plan_ahead(config, checkpoint), group)


@dataclass
class FakeGroup:
    """Ranks of one machine that take the same, with so much memory free."""

    rank: int
    world_size: int = 2
    local_size: int = 2
    told: list[Any] = field(default_factory=list)

    @property
    def local_rank(self) -> int:
        return self.rank

    def gather(self, name: str, value: Any) -> list[Any]:
        self.told.append(value)
        return [value] * self.world_size


def test_ranks_of_one_machine_share_its_memory(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FakeGroup(0)
    let_be_free(monkeypatch, GIB)
    plan_run(SMALL, checkpoint, cast(Group, group))
    need = group.told[0]["least"]
    assert 100e6 < need < 162_417_408 * 4
    let_be_free(monkeypatch, 2 * need)
    assert plan_run(SMALL, checkpoint, cast(Group, group)).why_reread == ""
    let_be_free(monkeypatch, 2 * need - 1)
    with pytest.raises(UsageError, match="ranks 0, 1 together would take"):
        plan_run(SMALL, checkpoint, cast(Group, group))
    let_be_free(monkeypatch, 1)
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with pytest.raises(UsageError):
        plan_run(SMALL, checkpoint, cast(Group, FakeGroup(1)))
    assert slept == [agreement.END_S], "rank 0 speaks for all"


def test_pipelines_of_one_machine_share_its_memory(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require_room(num_pipelines: int) -> None:
        place = Machine(num_pipelines=num_pipelines)
        require_room_for_all(plan_ahead(SMALL, checkpoint, place))

    """A pipeline alone would fit: two of them were started and met the system's killer."""
    # What this process has depends on the tests before.
    monkeypatch.setattr(
        "fminfer.plan.machine_facts.measure_process_bytes", lambda: 100 << 20
    )
    one = takes_of(SMALL, checkpoint)
    each = one.held_weights + one.libraries
    let_be_free(monkeypatch, 2 * each)  # and what this process has
    require_room(2)
    let_be_free(monkeypatch, int(1.2 * each))
    require_room(1)
    with pytest.raises(UsageError, match="2 pipelines of it would take"):
        require_room(2)


def gpu_refusal(checkpoint: Checkpoint, budget: int | None, **facts: Any) -> str:
    """Return the shortage of a run on a GPU with 8 GiB free: of this machine, or planned."""
    config = replace(SMALL, device="cuda", budget=budget)
    return make_plan(
        config, checkpoint, Machine(num_gpus=1, **{"free": 8 * GIB} | facts)
    ).shortage


@pytest.mark.parametrize("facts", [{}, {"device_bytes": 8 * GIB}])
def test_a_budget_beyond_a_gpus_memory_is_named(
    checkpoint: Checkpoint, facts: Any
) -> None:
    """The refusal named --world-size and "plan with more memory" only, and too small a size."""
    said = gpu_refusal(checkpoint, 300_000, **facts)
    found = re.search(
        r"Use a smaller --budget: without the flag it is ([\d,]+) tokens; or ", said
    )
    assert found is not None, said
    fits = int(found[1].replace(",", ""))
    assert 10_000 < fits < 300_000 and not gpu_refusal(checkpoint, fits - 32, **facts)
    ranks = re.search(r"spread it over more: --world-size (\d+) or above; or ", said)
    assert ranks is not None and int(ranks[1]) > 5, (
        "the cache of so many tokens takes 22 GB"
    )
    end = "plan with more memory for each" if facts else "use GPUs with more memory"
    assert said.endswith(end)


def test_a_budget_is_no_remedy_where_the_weights_do_not_fit(
    checkpoint: Checkpoint,
) -> None:
    assert "--budget" not in gpu_refusal(checkpoint, 1_000_000, device_bytes=GIB // 2)
    assert "--budget" not in gpu_refusal(checkpoint, None, free=GIB // 2)


def test_ranks_beside_each_other_on_a_gpu_name_a_budget_that_is_given(
    checkpoint: Checkpoint,
) -> None:
    """ "A smaller --budget" was the remedy without any, where weights alone do not fit."""
    for budget, is_named in ((None, False), (1_000_000, True)):
        config = replace(SMALL, device="cuda", budget=budget)
        plan = make_plan(
            config, checkpoint, Machine(num_gpus=1, free=GIB // 4, num_stages=2)
        )
        rooms = [find_room(plan, rank, "a card", GIB // 4) for rank in plan.ranks]
        said = find_rank_shortage(plan, rooms)
        assert (
            "ranks 0, 1 together would take" in said
            and "a GPU with more memory" in said
        )
        assert ("a smaller --budget" in said) == is_named


def test_the_same_facts_give_the_same_plan(checkpoint: Checkpoint) -> None:
    """A plan looks at nothing but its arguments: it is made again from facts that are
    found out."""
    machine = Machine(free=8 * GIB, has_library=True, num_stages=2, local_size=2)
    plan = make_plan(replace(SMALL, kernels="auto"), checkpoint, machine)
    again = make_plan(plan.config, checkpoint, machine)
    assert again == plan and plan.packed_by == "kernels"
    assert [rank.share for rank in plan.ranks] == [None] * 2
    less = make_plan(
        plan.config, checkpoint, replace(machine, free=4 * GIB, has_library=False)
    )
    assert 0 < less.num_kv_tokens < plan.num_kv_tokens and less.packed_by == ""
    assert (
        "does not fit"
        in make_plan(plan.config, checkpoint, replace(machine, free=1)).shortage
    )


def test_ranks_name_the_first_field_in_which_they_differ(
    checkpoint: Checkpoint,
) -> None:
    mine, other = (replace(SMALL, seed=seed, max_rows=seed) for seed in (5, 6))
    machine = Machine(free=8 * GIB, num_stages=2, rank=1)
    theirs, plan = (make_plan(config, checkpoint, machine) for config in (mine, other))
    group: Any = FakeGroup(1)
    check_agreement(group, "options", plan.shared)
    group.gather = lambda name, value: [theirs.shared, value]
    with pytest.raises(
        PipelineError, match="--max-rows is 6 on rank 1 and 5 on rank 0; start"
    ):
        check_agreement(group, "options", plan.shared)


def test_swap_that_is_free_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_groups, "SYSTEM", tmp_path)
    assert host_memory.measure_free_swap_bytes() == 0, "no Linux"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 9 kB\nSwapFree:  12 kB\n")
    assert host_memory.measure_free_swap_bytes() == 12 << 10
