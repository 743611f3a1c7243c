"""What an earlier fminfer wrote is read today, and each name in it is what it was.

tests/data/earlier_files/README.md tells how the files came to be, and docs/structure.md lists
such names. If a new name fails here, it is the old one that stays, or that gets a reader.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

import fminfer
from fminfer.answers.answer_index import make_answer_key
from fminfer.contract.request import RequestParams, VectorSpec, VectorWish
from fminfer.core.config import Constraint, EngineConfig
from fminfer.core.option import options_of
from fminfer.engine.noise import describe_params, make_draw_key
from fminfer.engine.sequence import PreparedRequest
from fminfer.estimate.cost_model import load_costs, write_costs
from fminfer.machine.liveness import describe_this_process
from fminfer.models.checkpoint import open_random_checkpoint
from fminfer.models.quantized_folder import is_quantized_copy, write_quantized_folder
from fminfer.server.metrics import HELPS
from fminfer.split.manifest import read_manifest, write_manifest
from fminfer.text.encoded_prompt import EncodedPrompt
from tests.forked import Forked
from tests.server.running import running, until

EARLIER = Path(__file__).parent.parent / "data" / "earlier_files"
HOW = ("--dtype", "float32", "--device", "cpu", "--budget", "4096", "--threads", "1")
# of a check: what later versions tell of the first prompt
FIRST_PROMPT = (".first_prompt.closing_tag", ".first_prompt.tool_parser")
WITH_ERROR = 3  # the status of a run that has refused a line
# Names that are values: of settings that were given, of codes that were met.
GIVEN = ("settings", "errors_by_code", "metadata", "weight_map", "made_for")
# A digest of a model holds its config as one version of transformers tells it.
of_one_config = pytest.mark.skipif(
    transformers.__version__ != "5.23.0", reason="the digest of a model is another"
)


def take(folder: Path, *names: str) -> None:
    """Copy some of the earlier files."""
    for name in names:
        copy = shutil.copytree if (EARLIER / name).is_dir() else shutil.copyfile
        copy(EARLIER / name, folder / name)


def load(path: Path) -> Any:
    """Return the JSON value of a file."""
    return json.loads(path.read_text())


def run_again(folder: Path, output: str, *words: str) -> Any:
    """Answer the same input; return what `--stats` wrote."""
    line = [
        "run",
        "in.jsonl",
        "--output",
        output,
        "--stats",
        "stats.json",
        *words,
        *HOW,
    ]
    run = Forked(line, folder=folder)
    assert run.wait(60) == WITH_ERROR, run.said()
    return load(folder / "stats.json")


def texts_of(output: Path) -> list[str]:
    """Return the text of each answer."""
    found = []
    for line in output.read_text().splitlines():
        record = json.loads(line)
        result = record.get("result") or record["response"]["body"]
        (choice,) = result["choices"]
        found.append(choice.get("text") or choice["message"]["content"])
    return found


def names_in(value: Any, place: str = "") -> set[str]:
    """Return the name of each field of a JSON value, with those around it."""
    found = {place}
    if isinstance(value, list):
        for each in value:
            found |= names_in(each, place)
    if isinstance(value, dict) and not place.endswith(GIVEN):
        for name, each in value.items():
            found |= names_in(each, f"{place}.{name}")
    return found


@of_one_config
def test_a_run_that_was_ended_goes_on(tmp_path: Path) -> None:
    """Its rows are kept byte for byte, and other draws are what they would have been."""
    take(tmp_path, "in.jsonl", "half.jsonl.journal", "half.status.json")
    head, *rows = (EARLIER / "half.jsonl.journal").read_text().splitlines()
    stats = run_again(tmp_path, "half.jsonl")
    assert (stats["num_kept_rows"], stats["num_kept_errors"]) == (4, 1)
    assert (stats["num_rows"], stats["num_errors"]) == (3, 0)
    outputs = [tmp_path / name for name in ("half.jsonl", "half.errors.jsonl")]
    written = [line for output in outputs for line in output.read_text().splitlines()]
    kept = [row.partition('"record":')[2].removesuffix("}") for row in rows]
    assert len(kept) == 4 and set(kept) <= set(written)
    assert texts_of(outputs[0]) == texts_of(EARLIER / "whole.jsonl")
    status = load(tmp_path / "half.status.json")
    assert status["metadata"] == json.loads(head)["fingerprint"]
    first, second = status["fminfer"]["runs"]
    assert [first] == load(EARLIER / "half.status.json")["fminfer"]["runs"]
    assert names_in(second) - names_in(first) == {".same_answers"}
    whole = load(EARLIER / "whole.status.json")
    assert names_in(status) - names_in(whole) == {".fminfer.runs.same_answers"}
    known = names_in(load(EARLIER / "stats.json"))
    newer = {".same_answers", ".why_dependent", ".constraint_mass", ".table"}
    newer |= {".engine.num_label_tokens", ".labels"}
    newer |= {".engine.num_open_thoughts", ".engine.num_ended_thoughts"}
    newer |= {".engine.num_truncated_thoughts"}
    newer |= {".servers", ".server_kind", ".cost"}
    newer |= {".num_sent_again", ".num_without_usage"}
    assert names_in(stats) == known | newer


@of_one_config
def test_a_complete_output_stays(tmp_path: Path) -> None:
    outputs = ("whole.jsonl", "whole.errors.jsonl")
    take(tmp_path, "in.jsonl", "whole.status.json", *outputs)
    stats = run_again(tmp_path, "whole.jsonl")
    assert (stats["num_kept_rows"], stats["num_kept_errors"]) == (7, 1)
    assert stats["num_rows"] == stats["num_errors"] == 0
    for name in outputs:
        assert (tmp_path / name).read_bytes() == (EARLIER / name).read_bytes()


@of_one_config
def test_answers_to_an_input_that_grew_are_taken(tmp_path: Path) -> None:
    take(tmp_path, "in.jsonl", "whole.jsonl", "whole.errors.jsonl", "whole.status.json")
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"prompt": "x", "max_tokens": 2}\n')
    stats = run_again(tmp_path, "whole.jsonl")
    assert (stats["num_changed_inputs"], stats["num_taken_rows"]) == (
        1,
        5,
    )  # none by chance
    assert texts_of(tmp_path / "whole.jsonl")[:6] == texts_of(EARLIER / "whole.jsonl")


@of_one_config
def test_kept_answers_are_found(tmp_path: Path) -> None:
    take(tmp_path, "in.jsonl", "answers")
    stats = run_again(tmp_path, "new.jsonl", "--result-cache", "answers")
    assert stats["num_rows"] == 6
    assert stats["engine"]["num_kept_requests"] == 5  # all but the one by chance
    assert texts_of(tmp_path / "new.jsonl") == texts_of(EARLIER / "whole.jsonl")


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", device="cpu", budget=4096)
    yield engine
    engine.close()


def test_a_server_has_its_files_and_batches(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    take(tmp_path, "state")
    state = tmp_path / "state"
    (record,) = state.glob("batches/*/batch.json")
    uploads = {path: load(path) for path in state.glob("files/*.json")}
    key = {"Authorization": "Bearer a-key"}
    with running(engine, state=state, api_keys=("a-key",)) as server:
        (batch,) = server.get("/v1/batches", key).json["data"]
        assert batch["id"] == record.parent.name and batch["status"] == "completed"
        assert batch["metadata"] == {"mine": "1"}
        output = server.get(f"/v1/files/{batch['output_file_id']}/content", key)
        assert output.body == (record.parent / "output.jsonl").read_bytes()
        files = server.get("/v1/files", key).json["data"]
        assert {file["id"] for file in files} == {
            each["id"] for each in uploads.values()
        }
        gone = json.loads((EARLIER / "state" / "deleted").read_text())["id"]
        behind = server.get(f"/v1/files?after={gone}", key)
        assert behind.status == 200 and behind.json["data"] == files  # the newest one
        how = ("endpoint", "input_file_id", "completion_window", "metadata")
        made = server.post("/v1/batches", {name: batch[name] for name in how}, key).json

        def is_over() -> bool:
            told = server.get(f"/v1/batches/{made['id']}", key).json
            return bool(told["status"] == "completed")

        until(is_over, "the same batch is answered again")
        again = load(state / "batches" / made["id"] / "batch.json")
        assert names_in(again) == names_in(load(record))
        for name in uploads:
            assert (
                server.call("DELETE", f"/v1/files/{name.stem}", headers=key).status
                == 200
            )
    lines = (state / "deleted").read_text().splitlines()
    assert len(lines) == 1 + len(uploads)
    of_file, *others = [names_in(fields) for fields in uploads.values()]
    for names in (*others, *(names_in(json.loads(line)) for line in lines)):
        assert names == of_file


def test_a_quantized_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers as the same weights do that are quantized now."""
    monkeypatch.chdir(EARLIER)
    request = {
        "prompt": [3, 4, 5],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    shared: dict[str, Any] = {"dtype": "float32", "device": "cpu", "budget": 64}
    answers = []
    for model in (
        {"model": "quantized"},
        {"random_init": "tiny.json", "quantize": "int4"},
    ):
        engine = fminfer.Engine(**model, **shared, skip_tokenizer_init=True)
        (record,) = engine.run([request])
        engine.close()
        answers.append(record.choices[0].fields)
    assert answers[0] == answers[1]
    write_quantized_folder(
        open_random_checkpoint("tiny.json"),
        tmp_path,
        "int4",
        seed=1,
        on_progress=lambda *_: None,
    )
    name = "model.safetensors.index.json"
    assert (tmp_path / name).read_bytes() == (EARLIER / "quantized" / name).read_bytes()
    own = [load(folder / "config.json") for folder in (tmp_path, EARLIER / "quantized")]
    assert own[0]["quantization_config"].keys() == own[1]["quantization_config"].keys()


@of_one_config
def test_a_quantized_folder_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EARLIER)
    model = open_random_checkpoint("tiny.json")
    assert is_quantized_copy(Path("quantized"), model, "int4", seed=1)
    assert not is_quantized_copy(Path("quantized"), model, "int4", seed=2)


def test_a_split_is_read(tmp_path: Path) -> None:
    write_manifest(tmp_path, read_manifest(EARLIER / "parts"))
    name = "manifest.json"
    assert (tmp_path / name).read_bytes() == (EARLIER / "parts" / name).read_bytes()


def test_measured_costs_are_read(tmp_path: Path) -> None:
    costs = load_costs(EARLIER / "costs.json")
    assert costs is not None and costs.error == 0.16808080733320696
    write_costs(tmp_path / "costs.json", costs, "fminfer-demo")
    assert (tmp_path / "costs.json").read_bytes() == (
        EARLIER / "costs.json"
    ).read_bytes()


# All that a request can say, each in another value than its default.
PARAMS = RequestParams(
    max_tokens=9,
    min_tokens=2,
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    n=2,
    best_of=3,
    logprobs=0,
    echo=True,
    stop=("a",),
    stop_token_ids=(5,),
    include_stop_str_in_output=True,
    ignore_eos=True,
    frequency_penalty=0.5,
    presence_penalty=0.25,
    repetition_penalty=1.1,
    logit_bias=((3, 1.0),),
    allowed_token_ids=(5,),
    bad_words=("a",),
    truncate_prompt_tokens=5,
    truncation_side="right",
    constraint=Constraint("regex", "a+"),
    seed=4,
    add_special_tokens=False,
    skip_special_tokens=False,
    return_token_ids=True,
    decoder_prompt="a",
)
PROMPT = EncodedPrompt([1, 2, 3], "abc", [0, 1, 2])


def test_the_text_of_params_is_what_it_was() -> None:
    """Kept answers and draws without a seed stand under a digest of it."""
    assert describe_params(PARAMS) == (
        "[('add_special_tokens', False), ('allowed_token_ids', (5,)), ('bad_words', ('a',)), "
        "('best_of', 3), "
        "('constraint', Constraint(kind='regex', text='a+', whitespace='')), "
        "('decoder_prompt', 'a'), ('echo', True), ('frequency_penalty', 0.5), "
        "('ignore_eos', True), ('include_stop_str_in_output', True), "
        "('logit_bias', ((3, 1.0),)), ('logprobs', 0), ('max_tokens', 9), ('min_p', 0.1), "
        "('min_tokens', 2), ('n', 2), ('presence_penalty', 0.25), "
        "('repetition_penalty', 1.1), ('return_token_ids', True), "
        "('skip_special_tokens', False), ('stop', ('a',)), ('stop_token_ids', (5,)), "
        "('temperature', 0.8), ('top_k', 40), ('top_p', 0.9), "
        "('truncate_prompt_tokens', 5), ('truncation_side', 'right')]"
    )


def test_keys_of_kept_answers_are_what_they_were() -> None:
    facts = VectorSpec(8)
    wish = VectorWish(facts, "p", 4, True, True, True, ("b",), 1, False)
    prepared = {
        "plain": PreparedRequest(PARAMS, [PROMPT]),
        "chat": PreparedRequest(PARAMS, [PROMPT], 1, b"m", "chat", "hermes", True),
        "of an encoder": PreparedRequest(
            PARAMS, [PROMPT], sources=[PROMPT], num_start=1
        ),
        "vectors": PreparedRequest(RequestParams(), [PROMPT], vectors=wish),
    }
    found = {
        name: make_answer_key(each, b"terms").hex() for name, each in prepared.items()
    }
    assert found == {
        "plain": "4f7bb1fd9a26a3d68c6a9efa0b1373c149df47e11373f2175dbb673cb7f7b77d",
        "chat": "456428677ffb94c12803972407000efdbdea7d38f7cbfef6fe0b5bd181360b76",
        "of an encoder": "9db7ac58a553e5306370084d681ddbb81b63a7983efa007420fb196575d01231",
        "vectors": "df2f7e85f6df22df9b0e55b94bd0e1205451c4c10ae2f6e571be471c5212b41f",
    }


def test_keys_of_draws_are_what_they_were() -> None:
    assert (
        make_draw_key([[1, 2, 3]], PARAMS, 4, 0, b"").hex()
        == "2de109a049d24fe9bbad5885930693e1"
    )
    assert (
        make_draw_key([[1, 2, 3]], PARAMS, 1, 2, bytes(16)).hex()
        == "4911b4de3d89e800972ece4cbe3a0e2a"
    )


def test_names_of_fingerprints_are_what_they_were() -> None:
    """Those that stand there always are in the earlier journal; these can come."""
    told = sorted(
        each.told for each in options_of(EngineConfig).values() if each.alters
    )
    assert " ".join(told) == (
        "--chat-template --check-model --embeddings --generation-config --max-layers "
        "--max-logprobs --max-model-len --on-too-long --overwrite-request-args "
        "--reasoning-parser --same-answers --seed --skip-tokenizer-init --strict "
        "--tensor-parallel-size --thinking-budget --token-format --tool-call-parser"
    )


def test_names_of_options_are_what_they_were() -> None:
    """They are what users write in Python, in TOML, and in variables."""
    assert " ".join(sorted(options_of(EngineConfig))) == (
        "block_size budget chat_template check_model chunk_size cuda_ids data_group_size "
        "device dtype embeddings generation_config kernels kv_dtype max_layers "
        "max_logprobs max_model_len max_rows max_steps micro_batches model model_config "
        "model_type num_layers offload on_too_long pipeline_group_size prefix_cache "
        "quantize random_init reasoning_parser request_args revision same_answers seed "
        "skip_tokenizer_init stage_layers strict tensor_parallel_size thinking_budget "
        "threads token_format tokenizer tool_call_parser without_adapter world_size"
    )


def test_names_of_a_claim_are_what_they_were() -> None:
    names = " ".join(json.loads(describe_this_process()))
    assert names == "host pid started machine since token machine_id"


VLLM_METRICS = """
    e2e_request_latency_seconds generation_tokens inter_token_latency_seconds
    kv_cache_usage_perc num_preemptions num_requests_running num_requests_waiting
    prefix_cache_hits prefix_cache_queries prompt_tokens request_generation_tokens
    request_prompt_tokens request_queue_time_seconds request_success
    time_to_first_token_seconds
"""
OWN_METRICS = """
    batch_rows batches_open engine_steps foreseen_memory_bytes kv_cache_tokens
    peak_memory_bytes requests_refused result_cache_hits result_cache_queries
    same_answers tokens_fed_again weight_bytes
"""
GPU_METRICS = "foreseen_memory_bytes peak_memory_bytes peak_tensor_bytes"


def test_names_of_a_server_are_what_they_were(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    with running(engine, state=tmp_path / "state") as server:
        stats = server.get("/stats").json
        told = server.get("/metrics").body.decode().splitlines()
    assert " ".join(stats) == (
        "model num_running num_waiting kv_usage prompt_tokens_per_s "
        "generation_tokens_per_s result_cache_queries result_cache_hits uptime_s"
    )
    types = [line.split()[2] for line in told if line.startswith("# TYPE")]
    found = {re.sub("_(total|created)$", "", name) for name in types if ":" in name}
    on_gpu = {"fminfer:gpu_" + name for name in GPU_METRICS.split()}
    of_vllm = {"vllm:" + name for name in VLLM_METRICS.split()}
    assert found == of_vllm | {"fminfer:" + name for name in OWN_METRICS.split()}
    assert set(HELPS) == found | on_gpu


def test_names_of_reports_are_what_they_were(tmp_path: Path) -> None:
    """Of `--trace`, of `fminfer status --json`, and of `fminfer check --json`."""
    take(tmp_path, "in.jsonl", "whole.jsonl", "whole.errors.jsonl", "whole.status.json")
    asked = {
        "trace.json": [
            "run",
            "in.jsonl",
            "--output",
            "new.jsonl",
            "--trace",
            "trace.json",
        ],
        "status.json": ["status", "whole.jsonl", "--json"],
        "check.json": ["check", "in.jsonl", "--json"],
    }
    for name, words in asked.items():
        run = Forked([*words, *(() if words[0] == "status" else HOW)], folder=tmp_path)
        told, said = run.communicate(60)
        if told:
            (tmp_path / name).write_text(told)
        known = names_in(load(EARLIER / name))
        if name == "check.json":
            known |= {".why_dependent", *FIRST_PROMPT}
        assert names_in(load(tmp_path / name)) == known, said
