"""The house: packages stand on eleven layers, and import from lower ones only
(docs/structure.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

# From the top down. Packages on one line never import each other.
LAYERS = """
cli
server cluster integrations
job split
estimate client interfaces
runtime
plan answers
forward
engine pipeline models files
compute
contract text machine
core
"""
LINES = [line.split() for line in LAYERS.strip().splitlines()]
LAYER = {
    package: len(LINES) - row for row, names in enumerate(LINES) for package in names
}
# These run on machines, and in tests, that have neither torch nor transformers.
NEED_NO_TORCH = [
    "core",
    "contract",
    "text",
    "engine",
    "files",
    "split",
    "cluster",
    "cli",
]
TYPE_QUESTIONS = ("isinstance", "issubclass", "type")
HEAVY = {"torch", "transformers"}
# What a function may import when it is called, and why that is not done at the top of its file.
LATE = {
    "torch": "takes a second, and is trimmed while it is imported",
    "transformers": "takes a second",
    "huggingface_hub": "takes 0.2 s, and only a model of the hub needs it",
    "numpy": "takes 0.1 s, and only `fminfer split` needs it",
    "tqdm": "takes a third of the start of commands that show no bar",
    "jsonschema": "is an extra, of --engine; it takes 0.1 s",
    "referencing": "comes with it",
    "fsspec": "is an extra, for URLs",
    "httpx": "is an extra, for servers elsewhere",
    "llguidance": "takes 0.1 s, and only constrained answers need it",
    "tomllib": "takes 3 ms, and only --config needs it",
    "tomli": "the same",
    "importlib": "loads the names of fminfer on first use",
    "importlib.metadata": "takes time, and is needed once transformers is imported",
}
# The same of our own modules: (package that imports, what it imports).
OWN_LATE = {
    ("fminfer", "fminfer.machine.processor"): "which must come before torch",
    ("cli", "fminfer.estimate"): "brings torch, and `fminfer --help` needs 0.3 s",
    ("cli", "fminfer.models.checkpoint"): "the same",
    ("cli", "fminfer.models.quantized_folder"): "the same",
    ("cli", "fminfer.job"): "the same",
    ("cli", "fminfer.client.remote_check"): "brings numpy, and only --engine needs it",
    ("cli", "fminfer.runtime"): "the same",
    ("cli", "fminfer.server"): "the same",
    ("cli", "fminfer.split"): "only its own commands need it",
    ("cli", "fminfer.files"): "only `fminfer merge` needs it",
    ("cli", "fminfer.cluster"): "only `fminfer submit` needs its templates' library",
    (
        "forward",
        "fminfer.compute.attention.triton_attention",
    ): "triton comes with CUDA's torch only",
    ("forward", "fminfer.compute.layers.triton_layers"): "the same",
    ("files", "fminfer.text.row_worker"): "brings Jinja, and only tables need it",
}
# What is decided of a run, and the packages that may name it. Others read it of the `RunPlan`.
CHOICES = ["choose_device", "choose_dtype", "choose_packer", "split_model"]
DECISIONS = {
    **{name: {"plan"} for name in CHOICES},
    # known_sizes refuses a split before torch comes
    "split_layers": {"core", "plan", "models"},
    "choose_step_sizes": {"core", "plan", "cli"},  # --help shows its defaults
}

PACKAGE = Path(__file__).parent.parent / "fminfer"


def read_modules() -> dict[str, ast.Module]:
    """Return every module by its dotted name; a package's __init__ has the package's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        words = ["fminfer", *path.relative_to(PACKAGE).with_suffix("").parts]
        name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        found[name] = ast.parse(path.read_text())
    return found


MODULES = read_modules()


def names_in(node: ast.AST) -> list[str]:
    """Return what an import statement imports, ours as modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        module = node.module or ""
        inside = [f"{module}.{alias.name}" for alias in node.names]
        own = [name for name in inside if name in MODULES]
        return own if len(own) == len(inside) else [*own, module]
    return []


@cache
def imports(tree: ast.AST) -> list[str]:
    return [name for node in ast.walk(tree) for name in names_in(node)]


@cache
def late_imports(tree: ast.Module) -> list[str]:
    """Return what functions import."""
    functions = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [name for function in functions for name in imports(function)]


def package_of(name: str) -> str:
    """Return the package that a module stands in; the root's name is "fminfer"."""
    words = name.split(".")
    return words[1] if len(words) > 1 and words[1] in LAYER else "fminfer"


def edges() -> Iterator[tuple[str, str]]:
    for name, tree in MODULES.items():
        for used in imports(tree):
            if used.split(".")[0] == "fminfer":
                yield name, used


def test_every_package_has_a_layer() -> None:
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert found == set(LAYER)
    roots = {name for name in MODULES if package_of(name) == "fminfer"}
    assert roots == {"fminfer", "fminfer.__main__"}, "a module belongs into a package"


def test_packages_import_from_lower_layers_only() -> None:
    crossing = [(a, b) for a, b in edges() if package_of(a) != package_of(b)]
    assert len(crossing) > 100, "the test looks at nothing"
    layer = LAYER | {"fminfer": len(LINES) + 1}
    wrong = {
        f"{a} -> {b}"
        for a, b in crossing
        if layer[package_of(b)] >= layer[package_of(a)]
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_nothing_imports_in_a_circle() -> None:
    """Neither modules nor folders of one package do; a folder may use what holds it,
    and back."""
    modules: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for name, used in edges():
        modules.setdefault(name, set()).add(used)
        a, b = (each.rpartition(".")[0] for each in (name, used))
        if not f"{a}.".startswith(f"{b}.") and not f"{b}.".startswith(f"{a}."):
            folders.setdefault(a, set()).add(b)
    for graph in (modules, folders):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("folder", ["fminfer.models.families", "fminfer.models.gguf"])
def test_a_folder_imports_nothing_of_what_holds_it(folder: str) -> None:
    """`families` and `models` imported each other: a folder in name only."""
    holder = folder.rpartition(".")[0]
    own = [(a, b) for a, b in edges() if a.rpartition(".")[0] == folder]
    assert own and not [(a, b) for a, b in own if b.rpartition(".")[0] == holder]


def test_functions_import_only_what_takes_time() -> None:
    wrong = []
    for name, tree in MODULES.items():
        for used in late_imports(tree):
            top = used.split(".")[0]
            if top == "fminfer":
                starts = (
                    f"{used}.".startswith(f"{each}.")
                    for by, each in OWN_LATE
                    if by == package_of(name)
                )
                is_known = any(starts)
            else:
                is_known = top in LATE or used in LATE
            if not is_known:
                wrong.append(f"{name}: {used}")
    assert not wrong, "\n".join(wrong)


def test_every_late_import_of_the_list_is_one() -> None:
    late = [
        (package_of(name), used)
        for name, tree in MODULES.items()
        for used in late_imports(tree)
    ]
    used_names = {used for _, used in late} | {used.split(".")[0] for _, used in late}
    assert not [each for each in LATE if each not in used_names]
    assert not [
        (by, each)
        for by, each in OWN_LATE
        if not any(by == a and f"{used}.".startswith(f"{each}.") for a, used in late)
    ]


def test_a_run_is_decided_in_plan_only() -> None:
    """Device, dtypes and split were chosen in 4 to 7 places each, by rules that could differ."""
    wrong = []
    num_found = 0
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            used = {getattr(node, word, None) for word in ("id", "attr", "name")}
            for decision in used & DECISIONS.keys():
                num_found += 1
                if package_of(name) not in DECISIONS[decision]:
                    wrong.append(f"{name}: {decision}")
    assert num_found > 15, "the test looks at nothing"
    assert not wrong, "\n".join(wrong)


def test_a_plan_is_made_in_one_module() -> None:
    """Eight places made plans, which could differ: free memory moves, kernels fail to build.

    A process makes one as its part of a run begins. One function replaces it.
    """
    makers = {"make_plan", "plan_ahead"}
    sites = [
        name
        for name, tree in MODULES.items()
        if package_of(name) not in ("plan", "estimate")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and {getattr(node.func, "id", ""), getattr(node.func, "attr", "")} & makers
    ]
    assert sites == ["fminfer.runtime.load.agreement"] * 2


def test_types_are_imported_like_everything_else() -> None:
    """An import for types alone hides a circle."""
    assert not [
        path for path in PACKAGE.rglob("*.py") if "TYPE_CHECKING" in path.read_text()
    ]


def test_these_need_neither_torch_nor_transformers() -> None:
    code = "import sys\n"
    for package in NEED_NO_TORCH:
        names = [name for name in MODULES if package_of(name) == package]
        assert names
        code += f"import {', '.join(names)}\nprint({package!r}, *{HEAVY} & set(sys.modules))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == NEED_NO_TORCH, done.stdout + done.stderr


def test_help_imports_nothing_heavy() -> None:
    """`fminfer --help` answers in under 0.3 s because none of these is imported for it."""
    code = (
        "import sys; from fminfer.cli.app import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True).returncode
        == 0
    )


def test_every_module_and_package_says_what_it_is() -> None:
    assert not [name for name, tree in MODULES.items() if not ast.get_docstring(tree)]


def test_no_two_modules_have_one_name() -> None:
    """Who reads `wire.send` or `lines.count` knows which is meant."""
    names = [name.rpartition(".")[2] for name in MODULES if name != "fminfer"]
    assert not {name for name in names if names.count(name) > 1}


def test_nothing_is_unpickled() -> None:
    """Pickles run what they say: a planted cache file did."""
    unsafe = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
    calls = {
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
    }
    found = []
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {
                    getattr(node, "module", None)
                }
                found += [(name, each) for each in names & unsafe]
            if isinstance(node, ast.Attribute):
                is_load = ast.unparse(node) == "torch.load"
                is_recv = node.attr in (
                    "recv",
                    "recv_pyobj",
                ) and "onnection" in ast.unparse(node)
                if node.attr in calls or is_load or is_recv:
                    found.append((name, ast.unparse(node)))
    assert not found


def test_no_class_name_stands_for_two_things() -> None:
    """`Place`, `Tally`, `Piece` and others stood for two or three classes each."""
    places: dict[str, list[str]] = {}
    for name, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_only_formats_ask_what_a_format_is() -> None:
    """31 such questions outside had to be found for each new format."""
    formats = {
        node.name
        for name, tree in MODULES.items()
        if name.startswith("fminfer.compute.formats")
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    assert {"Dense", "Blocks", "Joined", "Ordered"} <= formats
    sites = [
        name
        for name, tree in MODULES.items()
        if not name.startswith("fminfer.compute.formats")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in TYPE_QUESTIONS
        if formats & {getattr(each, "id", "") for each in ast.walk(node)}
    ]
    assert not sites
