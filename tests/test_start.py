"""What the command does before its first step: it imports little, and that changes no answer."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import transformers

import fminfer
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.weights import build_on_meta
from tests.conftest import FIELDS, SHAPE

UNUSED = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")
# Prints the answers of random models, of config.json files, and which of UNUSED it had to import.
ANSWER = """
import json, sys
from fminfer.imports import import_transformers
import_transformers()
from tests.test_start import UNUSED, answers_of
print(json.dumps([answers_of(config) for config in sys.argv[1:]]))
print(json.dumps([name for name in UNUSED if name in sys.modules]))
"""


def answers_of(config: str) -> list[Any]:
    """Return the choices of a random model, or what is wrong."""
    engine = fminfer.Engine(random_init=config, dtype="float32")
    request = {"prompt": list(range(40)), "max_tokens": 4, "logprobs": 2, "echo": True}
    records = list(engine.run([request]))
    engine.close()
    return [record.result["choices"] if record.result else str(record.error) for record in records]


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_family_answers_the_same_without_what_no_run_uses(tmp_path: Path) -> None:
    configs = []
    for name in sorted(FIELDS):
        model_type = name.partition("-")[0]
        config = transformers.AutoConfig.for_model(model_type, **SHAPE | FIELDS[name])
        config.save_pretrained(tmp_path / name)
        configs.append(str(tmp_path / name))
    with ThreadPoolExecutor() as pool:
        trimmed = pool.submit(run_python, ANSWER, *configs)
        expected = json.dumps([answers_of(config) for config in configs])
        found, unused = trimmed.result().splitlines()
    assert expected.count("token_logprobs") == len(FIELDS), expected
    assert found == expected
    assert unused == "[]"


def test_the_command_imports_neither_the_compiler_nor_sharded_tensors(tmp_path: Path) -> None:
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text('{"prompt": "The kitchen", "max_tokens": 2}\n')
    code = f"""
import sys
from fminfer.cli import main
try:
    main(["run", "-q", sys.argv[1], "--output", sys.argv[2]])
except SystemExit as end:
    assert not end.code, end.code
import transformers.utils.import_utils as reader
assert reader.create_import_structure_from_path.cache_info().hits, "read twice"
assert not [name for name in {UNUSED} if name in sys.modules]
"""
    run_python(code, str(rows), str(answers))
    assert '"choices":[' in answers.read_text()


def test_what_stood_aside_is_there_for_who_asks() -> None:
    code = """
import sys
from fminfer.imports import import_transformers
import_transformers()
import torch
assert "torch._dynamo" not in sys.modules and torch.distributed.is_available()
add = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
assert add(torch.ones(2)).tolist() == [2.0, 2.0]
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "not compiled"
"""
    run_python(code)


def test_a_version_that_cannot_be_trimmed_is_imported_as_usual() -> None:
    code = """
import sys
from fminfer import imports
class Refuses(imports._NoCompiler):
    def __getattr__(self, name):
        raise ImportError(name)
imports._NoCompiler = Refuses
imports.import_transformers()
from transformers import LlamaForCausalLM
assert "torch._dynamo" in sys.modules
assert sys.modules["torch._dynamo"].__file__
"""
    run_python(code)


def test_a_process_that_has_transformers_keeps_it_as_it_is() -> None:
    code = """
import transformers, torch
from fminfer.imports import import_transformers
import_transformers()
from transformers.utils import is_torch_distributed_available
assert is_torch_distributed_available()
"""
    run_python(code)


def test_a_model_without_memory_has_its_ties() -> None:
    """It is built without transformers' own first values, and with them its ties would go."""
    checkpoint = open_checkpoint(None)
    for is_tied in (True, False):
        checkpoint.config.tie_word_embeddings = is_tied
        model = build_on_meta(checkpoint)
        parts = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (parts[0] is parts[1]) == is_tied
        assert all(part.is_meta for part in parts)
