"""The floors: a file imports only from strictly lower ones (docs/structure.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "fminfer"
# From the lowest up. A sign of the house: a new module finds its place here or is in the wrong one.
FLOORS = """
cache cluster.job_names compute.spec control_groups detokenizer encoded_prompt engine.blocks \
    engine.expected engine.facts engine.step_shape engine.stop_strings errors gumbel head_kernel \
    hyperparameters input.pieces input.spans line messages models.architectures.nearest \
    models.context models.examples models.read_ahead models.sizes models.stored.pickles \
    models.stored.tensors options.groups output.counts output.names output.owners output.rows \
    pipeline.addresses quantities row_warnings sentencepieces shared_runs soft_cap split.folders \
    team.place timing token_lengths triton_kernels urls version weighed_values wording workspace
cluster.schedulers cluster.scripts commands.families compute.plain compute.routing config \
    cost_model decode_attention exit_status fields host_memory imports input.spread input.streams \
    input.values integrations.generation kernel_attention layer_kernels line_run.seen_counts \
    memory models.architectures.naming models.config_fields models.hub models.impostors \
    models.stored.metaseq options.model_options other_work output.disk output.journal_head \
    output.stream output.trace partition pipeline.handshake pipeline.local pipeline.step_clock \
    pipeline.transport pipeline.wire processor ranks sampling stopping threads
attention compute.parts compute.trial draw_kernel engine_options input.lines kernel_build \
    models.architectures.expert_parts models.architectures.parts models.layer_count models.shapes \
    models.stored.safetensors_file models.stored.torch_file models.weight_files \
    options.request_options options.value_types output.claims output.journal pipeline.ring \
    pipeline.secret pipeline.store placement product_kernel prompts role score_kernel start_up \
    tokenizer triton_attention triton_draws triton_layers
cluster.submission compute.kv_cache expert_kernel input.envelope input.files input.input_file \
    kernel_choice models.architectures.gpt_like models.architectures.llama_like models.origins \
    models.stored.weight_file no_tokenizer options.file_options options.old_options \
    options.rank_options options.submit_options output.hold output.terms output.writer \
    packed_linear pipeline.store_place pipeline.watch processes remote_files request spelling
compute.experts compute.products ending engine.logit_edits engine.noise engine.order \
    models.architectures.cohere_like models.architectures.exaone_like \
    models.architectures.granite_like models.architectures.hunyuan_like \
    models.architectures.latent_like models.architectures.llama_variants \
    models.architectures.mixtures models.architectures.neox_like models.architectures.olmo_like \
    models.architectures.opt_like models.architectures.squared_relu models.tensor_files \
    options.speed_options output.records output.status pipeline.meeting_folder split.grouping \
    synthetic
engine.sequence models.architectures.table output.places output.reopening pipeline.rendezvous \
    run_options split.index split.manifest storage
cluster.resources commands.run_stand_in engine.advance engine.events engine.intake engine.packing \
    engine.preemption engine.prefix engine.start engine.stats models.checkpoint output.completed \
    output.overview output.streamed_input paths pipeline.meeting split.answers split.summary
commands.submit cost_store engine.answer engine.core engine.in_flight engine.prefill \
    engine.reservation engine.waiting fingerprint line_run.asked models.load output.free_files \
    output.job_file output.progress pipeline.group run_context split.merging split.parts \
    team.heard
agreement commands.merge commands.split commands.status engine.deltas engine.scheduler \
    line_run.equal_requests line_run.line_intake models.transformer output.summary
engine.results head line_run.runner output.run_inputs whole_layers
engine.loop output.named_files output.shared_files pipeline.stage
assembly check.lines step_memory team.wire
check.simulation loading team.process
footprint team.apart team.team
forecast
check.report one_pipeline
check.checking team.member worker
bench calibration commands.check integrations.batch integrations.ray job run_engine serving
answering commands.serve_part integrations.lm_eval
ranks_apart
running
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
            module = node.module or ""
            inside = [f"{module}.{alias.name}" for alias in node.names]
            names += [name for name in inside if name in FLOOR] or [module]
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
