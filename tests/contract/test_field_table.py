"""The table of request fields: it has all that OpenAI's and vLLM's requests may hold."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from jsonschema import Draft202012Validator

from fminfer.contract.endpoints import (
    DRAWING_ENDPOINTS,
    URL_OF,
    Endpoint,
    find_url_endpoint,
)
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import Field
from fminfer.contract.read_fields import find_field, normalize_name, parse_fields
from fminfer.contract.refused_fields import REFUSED
from fminfer.contract.request import DEFAULTS, parse_request
from fminfer.core.errors import RequestError
from fminfer.split.grouping import Groups

ROOT = Path(__file__).parents[2]
# Of the openai package 3.3 and vLLM's main branch of November 2026. A field that is new to them
# goes into the table first: is it acted on, refused, or does it change no answer?
OF_BOTH = """
allowed_token_ids bad_words add_special_tokens cache_salt ec_transfer_params echo
frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params
length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens model n
presence_penalty priority prompt_logprobs repetition_detection repetition_penalty
request_id response_format return_mm_kwargs return_token_ids return_token_offsets
return_tokens_as_token_ids routed_experts_prompt_start seed session_id
skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream
stream_interval stream_options structured_outputs temperature thinking_token_budget
top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
watermarking
"""
OF_COMPLETIONS = """
best_of prompt prompt_embeds suffix
"""
OF_CHAT = """
add_generation_prompt audio chat_template chat_template_kwargs continue_final_message documents
function_call functions include_reasoning max_completion_tokens media_io_kwargs messages metadata
mm_processor_kwargs modalities moderation parallel_tool_calls prediction prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning_effort return_prompt_text safety_identifier
service_tier store tool_choice tools top_logprobs verbosity web_search_options
"""


@pytest.mark.parametrize(
    "endpoint, names",
    [("completions", OF_BOTH + OF_COMPLETIONS), ("chat", OF_BOTH + OF_CHAT)],
)
def test_every_field_of_openai_and_vllm_is_known(
    endpoint: Endpoint, names: str
) -> None:
    """Some were taken for unknown names, and answered as if they were not there."""
    assert not set(names.split()) - FIELDS[endpoint].keys()


def test_both_endpoints_know_the_same_names() -> None:
    """Wishes of chat, such as `verbosity`, were taken for unknown names in completions."""
    assert FIELDS["completions"].keys() == FIELDS["chat"].keys()


# Of vectors: what vLLM, text-embeddings-inference, Infinity, Cohere, Jina, Voyage, Gemini and
# sentence-transformers call their wishes. Each endpoint acts on one, refuses it, or records it.
OF_VECTORS = """
activation add_special_tokens candidate_labels dimension dimensions embed_dtype
embedding_types encoding_format endianness extra_body function_to_apply input_type
instruction late_chunking max_chunks_per_doc max_length max_tokens max_tokens_per_doc
messages model normalize normalized options output_dimension output_dimensionality
output_dtype parameters pooling_task precision priority prompt prompt_name query_prefix
rank_fields raw_scores return_documents return_text return_multivector score_function
score_threshold stream task task_type texts top_k top_n truncate truncate_dim
truncate_prompt_tokens truncation truncation_direction use_activation user
"""
# Of completions and chat: wishes in the wrong place, and other tools' names.
MISPLACED = """
begin_suppress_tokens extra_body forced_decoder_ids format generation_config
guided_decoding images input instructions json_mode keep_alive lora_request
max_output_tokens max_length mirostat mirostat_tau no_repeat_ngram_size num_beams
num_ctx num_predict options parameters random_seed reasoning repeat_penalty
response_mime_type response_schema sampling_params seed stop_sequences suppress_tokens
system system_instruction text think thinking top_n_sigma typical_p xtc_probability
"""


@pytest.mark.parametrize("endpoint", get_args(Endpoint))
def test_the_url_that_a_message_names_is_taken(endpoint: Endpoint) -> None:
    assert (
        find_url_endpoint(URL_OF[endpoint])
        == find_url_endpoint(f"{URL_OF[endpoint]}/")
        == endpoint
    )


@pytest.mark.parametrize("endpoint", get_args(Endpoint))
def test_no_endpoint_begins_with_an_empty_list(endpoint: Endpoint) -> None:
    """Scores and rankings began with a handful of names, so that other wishes were dropped."""
    table = FIELDS[endpoint]
    names = MISPLACED if endpoint in DRAWING_ENDPOINTS else OF_VECTORS
    assert not set(names.split()) - table.keys()
    refused = {name for name, each in table.items() if each.fate == "refused"}
    assert len(refused) > 100 and refused == {each.name for each in REFUSED[endpoint]}
    assert any(each.fate == "acted on" for each in table.values())


def test_endpoints_of_a_kind_know_the_same_names() -> None:
    """A field of one endpoint, such as `top_n`, is a wish on the other ones as well."""
    vectors = [each for each in get_args(Endpoint) if each not in DRAWING_ENDPOINTS]
    assert len(vectors) > 3
    for endpoint in vectors:
        assert FIELDS[endpoint].keys() == FIELDS["embeddings"].keys()


def in_camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


@pytest.mark.parametrize(
    "spell", [in_camel_case, str.upper, lambda name: name.replace("_", "-")]
)
@pytest.mark.parametrize("endpoint", get_args(Endpoint))
def test_a_field_in_any_spelling_is_no_unknown_name(
    endpoint: Endpoint, spell: Callable[[str], str]
) -> None:
    """`repetitionPenalty`, `toolChoice`, `inputType` and others were kept and not acted on."""
    num_refused = 0
    for name, each in FIELDS[endpoint].items():
        spelling = spell(name)
        if spelling in FIELDS[endpoint] or name in ("model", "engine"):
            continue
        fields = {
            spelling: [{}]
            if each.only is list
            else "x"
            if each.only is str
            else {"a": [{}]}
        }
        if each.fate == "recorded":
            assert parse_fields(fields, endpoint, max_logprobs=5, is_strict=True) == (
                {},
                [],
            )
            continue
        with pytest.raises(RequestError) as caught:
            parse_fields(fields, endpoint, max_logprobs=5, is_strict=False)
        assert (caught.value.code, caught.value.param) == (
            "unsupported_parameter",
            spelling,
        )
        ours = each.ours or (name if each.fate in ("acted on", "served") else "")
        remedy = f"calls that {ours}. Rename it" if ours else each.help
        assert remedy in caught.value.message
        num_refused += 1
        for value in (None, *each.neutral):
            fields = {spelling: value}
            assert parse_fields(fields, endpoint, max_logprobs=5, is_strict=True) == (
                {},
                [],
            )
    assert num_refused > 50


def test_no_two_fields_differ_in_spelling_alone() -> None:
    for table in FIELDS.values():
        assert len({normalize_name(name) for name in table}) == len(table)


def test_another_spelling_of_do_sample_may_be_false_without_sampling() -> None:
    """What passes for a name passes for its other spellings."""
    asked = {"prompt": "x", "temperature": 0, "doSample": False}
    assert not parse_request(asked, max_logprobs=5).warnings
    with pytest.raises(RequestError, match="doSample is false"):
        parse_request(asked | {"temperature": 1}, max_logprobs=5)


@pytest.mark.parametrize("name", ["temprature", "max_token", "Model", "topk2"])
def test_a_misspelling_stays_a_warning(name: str) -> None:
    (warning,) = parse_request({"prompt": "x", name: 1}, max_logprobs=5).warnings
    assert warning.names[0].startswith(name)


# Names that other services act on, and that are plain words: their type says whether they wish.
COLUMNS: tuple[tuple[Endpoint, str, object, object], ...] = (
    ("completions", "options", "A or B", {"num_predict": 1}),
    ("completions", "text", "a text", {"format": {"type": "json_object"}}),
    ("completions", "history", "a story", [{"role": "user"}]),
    ("completions", "chat_history", "a story", ["hello"]),
    ("chat", "message", "hello", {"role": "user", "content": "x"}),
    ("completions", "config", "v2", {"temperature": 0}),
    ("completions", "sampling", "random", {"top_k": 1}),
    ("completions", "constraints", ["no commas"], {"json": {}}),
    ("classify", "labels", "positive", ["positive", "negative"]),
    ("classify", "classes", 3, ["positive"]),
    ("score", "similarity", 0.8, "dot"),
    ("score", "metric", 0.8, "dot"),
)


@pytest.mark.parametrize(("endpoint", "name", "data", "wish"), COLUMNS)
def test_a_column_of_data_stays_and_is_named(
    endpoint: Endpoint, name: str, data: object, wish: object
) -> None:
    """Data in `options` or `text` passed without the warning that any other column gets."""
    _, (warning,) = parse_fields(
        {name: data}, endpoint, max_logprobs=5, is_strict=False
    )
    assert warning.names == (name,) or warning.names[0].startswith(f"{name} (")
    with pytest.raises(RequestError) as caught:
        parse_fields({name: wish}, endpoint, max_logprobs=5, is_strict=False)
    assert caught.value.param == name


# Of llama.cpp, text-generation-webui, TGIS, NVIDIA's NIM, Cohere, Mistral, Gemini and others.
NEWER_WISHES = """
response_json_schema guided_json_schema response_model format_schema nvext grammar_lazy
grammar_triggers antiprompt ignore_eos_token ban_tokens eos_token input_prefix
input_suffix greedy decoding_method max_generated_tokens adapters lora_name extra_json
prefill response_prefix assistant_prefix data_sources file_ids attachments
search_queries_only cachedContent config sampling kwargs constraint constraints
chat_history history message guidedJson structuredOutputs responseFormat
repetitionPenalty repeatPenalty logitBias maxNewTokens maxCompletionTokens nPredict
negativePrompt systemPrompt toolChoice reasoningEffort enableThinking thinkingBudget
generationConfig topK maxTokens maxOutputTokens responseSchema safetySettings
stopSequences candidateCount
"""
NEWER_WISHES_OF_VECTORS = """
dim dims embed_dim matryoshka_dim quantization l2_normalize normalise multi_vector sparse
normalization doc_prefix text_pair labels classes problem_type pairs metric similarity inputType
promptName poolingType outputDtype topN topK rankFields rawScores scoreThreshold minScore
returnDocuments taskType embeddingTypes outputDimensionality
"""


@pytest.mark.parametrize("endpoint", get_args(Endpoint))
def test_newer_wishes_of_other_services_are_refused(endpoint: Endpoint) -> None:
    """They were answered as if they were not there, with a line in the log at most."""
    names = NEWER_WISHES if endpoint in DRAWING_ENDPOINTS else NEWER_WISHES_OF_VECTORS
    for name in names.split():
        known = find_field(name, endpoint)
        assert known is not None, name
        # normalise is no name of ours, and topN of a ranking is
        if known.fate != "acted on":
            value = {list: ["x"], str: "x"}.get(known.only, {"a": 1})  # type: ignore[arg-type]
            with pytest.raises(RequestError) as caught:
                parse_fields({name: value}, endpoint, max_logprobs=5, is_strict=False)
            assert caught.value.param == name


def test_what_a_refusal_of_vectors_says() -> None:
    """top_k of classes was sent to rankings, and embd_normalize 2 to a field that is a
    switch."""
    for endpoint, name, value, remedy in (
        ("classify", "top_k", 3, "Each class has its probability"),
        ("embeddings", "embd_normalize", 2, '"normalize": true'),
        ("embeddings", "dims", 3, "calls that dimensions"),
    ):
        with pytest.raises(RequestError, match=remedy):
            parse_fields({name: value}, endpoint, max_logprobs=0, is_strict=False)


@pytest.mark.parametrize("value", ["A or B", ["A", "B"], 3, True])
def test_columns_of_data_are_no_wishes(value: object) -> None:
    """`options` of a question with choices is no object of Ollama's."""
    assert (
        parse_request({"prompt": "x", "options": value}, max_logprobs=5).params
        == DEFAULTS
    )
    with pytest.raises(RequestError, match="Put its fields into the request itself"):
        parse_request({"prompt": "x", "options": {"num_predict": 1}}, max_logprobs=5)


def test_each_field_is_told() -> None:
    for table in FIELDS.values():
        for each in table.values():
            assert not each.help or each.fate == "refused" or each.help.endswith("."), (
                each.name
            )
            if each.ours:
                assert each.ours in table and table[each.ours].fate == "acted on"


def test_the_docs_have_the_table() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "scripts" / "field_tables.py", "--check"]
    )
    assert found.returncode == 0


@pytest.mark.parametrize("endpoint", get_args(Endpoint))
def test_the_schema_of_each_field_is_one_and_null_passes(endpoint: Endpoint) -> None:
    for name, each in FIELDS[endpoint].items():
        schema = each.make_schema(9)
        Draft202012Validator.check_schema(schema)
        if name not in ("prompt", "messages", "input", "query", "documents"):
            assert Draft202012Validator(schema).is_valid(None), name


def test_true_and_false_are_numbers_of_logprobs() -> None:
    """Clients that know chat send true, which vLLM takes for 1."""
    for value, expected in ((True, 1), (False, None), (1, 1), (0, 0), (1.0, 1)):
        request = parse_request({"prompt": "x", "logprobs": value}, max_logprobs=5)
        assert request.params.logprobs == expected


def recorded() -> list[Field]:
    return [each for each in FIELDS["completions"].values() if each.fate == "recorded"]


def test_what_changes_no_answer_makes_no_group() -> None:
    """`store`, `priority` and `"stream": false` cut a file into parts of their own."""
    groups = Groups()
    groups.add({"prompt": "x"})
    for each in recorded():
        if each.name not in ("model", "engine"):
            assert groups.add({"prompt": "x", each.name: "some"}) == 0, each.name
    for name, value in (
        ("stream", False),
        ("num_beams", 1),
        ("suffix", ""),
        ("stop_sequences", []),
    ):
        assert groups.add({"prompt": "x", name: value}) == 0, name
    assert groups.add({"prompt": "x", "top_k": 3}) == 1
    assert DEFAULTS.top_k == 0
