"""The floors: a file imports only from strictly lower ones (docs/structure.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "fminfer"
# From the lowest up. A sign of the house: a new module finds its place here or is in the wrong one.
FLOORS = """
input.pieces token_lengths row_warnings hyperparameters urls \
    errors timing messages pipeline.addresses control_groups detokenizer \
    sentencepieces shared_runs soft_cap \
    weighed_values output.rows output.names cache layer_kernels head_kernel triton_kernels \
    engine.blocks engine.noise engine.stopping engine.expected split.folders cluster.job_names
input.spread pipeline.handshake \
    config fields processor host_memory threads input.streams input.values input.spans tokenizer \
    partition ranks models.alibi models.families models.sizes models.variants \
    models.weight_files integrations.generation engine.stats engine.seen output.trace \
    output.disk stopping memory head cost_model cluster.schedulers cluster.scripts team.place
prompts engine_options \
    input.lines spelling sampling no_tokenizer placement kernel_build product_kernel module_trial \
    decode_attention kernel_attention triton_layers launcher run_options output.journal \
    output.claims models.experts models.checkpoint models.layer_count models.slicing \
    pipeline.wire pipeline.transport pipeline.step_clock pipeline.store \
    pipeline.local
input.envelope fused_layers imports layer_parts packed_linear attention score_kernel \
    draw_kernel input.files models.weights pipeline.secret pipeline.store_place pipeline.watch \
    models.adapters.bloom models.adapters.codegen \
    models.adapters.falcon models.adapters.gpt_neo models.adapters.gptj models.adapters.mpt
request fingerprint cost_store packed_experts triton_attention whole_layers remote_files \
    output.records output.writer output.stream output.progress pipeline.meeting_folder
engine.logit_edits synthetic output.reopening output.status pipeline.stage split.grouping \
    team.wire pipeline.rendezvous
pipeline.meeting
kernel_choice step_memory engine.sequence pipeline.ring pipeline.group \
    output.places output.job_file \
    storage split.manifest split.index team.process
agreement team.apart
engine.prefix engine.advance engine.packing engine.equal_requests engine.planner output.summary \
    output.shared_files output.overview loading paths split.answers split.summary \
    cluster.resources cluster.submission
engine.scheduler engine.answer engine.intake footprint split.merging split.parts \
    commands.status
engine.loop forecast commands.split commands.merge
assembly
check.lines check.simulation worker
team.team team.member check.report integrations.batch calibration
job
running bench check.checking integrations.lm_eval integrations.ray commands.submit
commands.check
cli
__main__
"""
LINES = FLOORS.strip().splitlines()
FLOOR = {f"fminfer.{name}": floor for floor, names in enumerate(LINES) for name in names.split()}
# These run on machines, and in tests, that have neither torch nor transformers.
NEEDS_NO_TORCH = ["request", "engine.scheduler", "engine.advance", "output.writer", "input.lines"]


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(("fminfer", *path.relative_to(PACKAGE).with_suffix("").parts))
        if path.name != "__init__.py":
            found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name for name in names if name.startswith("fminfer.")]


def test_every_module_has_a_floor() -> None:
    assert sorted(modules()) == sorted(FLOOR)


def test_imports_go_down_only() -> None:
    edges = [(name, used) for name, tree in modules().items() for used in imports(tree)]
    assert len(edges) > 50, "the test looks at nothing"
    wrong = [f"{a} -> {b}" for a, b in edges if FLOOR[b] >= FLOOR[a]]
    assert not wrong


def test_engine_and_pipeline_never_meet() -> None:
    for name, tree in modules().items():
        if name.startswith("fminfer.engine."):
            assert not [used for used in imports(tree) if used.startswith("fminfer.pipeline.")]
        if name.startswith("fminfer.pipeline."):
            assert not [used for used in imports(tree) if used.startswith("fminfer.engine.")]


def test_planning_and_output_need_no_torch() -> None:
    names = ", ".join(f"fminfer.{name}" for name in NEEDS_NO_TORCH)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_imports_nothing_heavy() -> None:
    """`fminfer --help` answers in under 0.3 s because none of these is imported for it."""
    code = (
        "import sys; from fminfer.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_every_module_says_what_it_is() -> None:
    assert not [name for name, tree in modules().items() if not ast.get_docstring(tree)]


def test_nothing_is_unpickled() -> None:
    """Pickles run what they say: a planted cache file did."""
    unsafe = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
    calls = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
    found = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                found += [(name, each) for each in names & unsafe]
            if isinstance(node, ast.Attribute):
                is_load = ast.unparse(node) == "torch.load"
                is_recv = node.attr in ("recv", "recv_pyobj") and "onnection" in ast.unparse(node)
                if node.attr in calls or is_load or is_recv:
                    found.append((name, ast.unparse(node)))
    assert not found
