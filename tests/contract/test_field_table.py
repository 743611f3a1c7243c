"""The table of request fields: it has all that OpenAI's and vLLM's requests may hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fminfer.contract.endpoints import Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import Field
from fminfer.contract.request import DEFAULTS, parse_request
from fminfer.split.grouping import Groups

ROOT = Path(__file__).parents[2]
# Of the openai package 3.3 and vLLM's main branch of November 2026. A field that is new to them
# goes into the table first: is it acted on, refused, or does it change no answer?
OF_BOTH = """
allowed_token_ids bad_words add_special_tokens cache_salt ec_transfer_params echo
frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty
logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens model n presence_penalty
priority prompt_logprobs repetition_detection repetition_penalty request_id response_format
return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
stop_token_ids stream stream_interval stream_options structured_outputs temperature
thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user
vllm_xargs watermarking
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
def test_every_field_of_openai_and_vllm_is_known(endpoint: Endpoint, names: str) -> None:
    """Some were taken for unknown names, and answered as if they were not there."""
    assert not set(names.split()) - FIELDS[endpoint].keys()


def test_both_endpoints_know_the_same_names() -> None:
    """Wishes of chat, such as `verbosity`, were taken for unknown names in completions."""
    assert FIELDS["completions"].keys() == FIELDS["chat"].keys()


def test_each_field_is_told() -> None:
    for table in FIELDS.values():
        for each in table.values():
            assert not each.help or each.fate == "refused" or each.help.endswith("."), each.name
            if each.ours:
                assert each.ours in table and table[each.ours].fate == "acted on"


def test_the_docs_have_the_table() -> None:
    found = subprocess.run([sys.executable, ROOT / "scripts" / "field_tables.py", "--check"])
    assert found.returncode == 0


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
