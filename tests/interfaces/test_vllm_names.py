"""What vLLM's names do beyond the scripts: orders, defaults, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fminfer import LLM, RequestError, SamplingParams, UsageError
from fminfer.interfaces.vllm_arguments import ARGUMENTS
from fminfer.interfaces.vllm_params import StructuredOutputsParams
from tests.interfaces.script_models import save_bert, save_llama, save_modules

QUESTION = "Question: How do you go from the porch to the den?\nAnswer:"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("demo", dtype="float32")
    yield made
    made.engine.close()


def test_outputs_have_the_order_of_prompts(llm: LLM) -> None:
    """The short ones finish first."""
    lengths = [40, 1, 20, 3]
    params = [
        SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths
    ]
    outputs = llm.generate([QUESTION] * 4, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [o.request_id for o in outputs] == ["0", "1", "2", "3"]


def test_prompts_in_each_form_are_one_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    ids = llm.get_tokenizer().encode(QUESTION)
    forms: list[Any] = [QUESTION, ids, {"prompt": QUESTION}, {"prompt_token_ids": ids}]
    texts = [llm.generate(form, params)[0].outputs[0].text for form in forms]
    texts += [o.outputs[0].text for o in llm.generate(forms, params)]
    assert len({*texts}) == 1 and texts[0]


def test_a_text_without_a_limit_goes_to_the_end_of_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = llm.generate(QUESTION, params)[0]
    num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    assert num_tokens == llm.engine.context_length


def test_logprobs_have_the_tokens_of_a_stop_string(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=9, stop=["or"])
    logged = plain.clone()
    logged.logprobs = 0
    logged.prompt_logprobs = 0
    a, b = llm.generate([QUESTION] * 2, [plain, logged])
    assert a.outputs[0].text == b.outputs[0].text == " n"
    assert b.outputs[0].logprobs is not None and a.outputs[0].logprobs is None
    assert [*b.outputs[0].logprobs[0]] == b.outputs[0].token_ids
    assert b.prompt_logprobs is not None and b.prompt_logprobs[0] is None
    assert len(b.prompt_logprobs) == len(b.prompt_token_ids)


def test_parameters_are_the_models_if_none_are_given(tmp_path: Path) -> None:
    save_llama(tmp_path / "llama")
    path = tmp_path / "llama" / "generation_config.json"
    stated = json.loads(path.read_text())
    stated |= {"temperature": 0.25, "top_k": 7, "max_new_tokens": 5}
    path.write_text(json.dumps(stated))
    params = LLM(str(tmp_path / "llama")).get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 5)
    vllm = LLM(str(tmp_path / "llama"), generation_config="vllm")
    assert vllm.get_default_sampling_params() == SamplingParams()
    assert len(vllm.generate("a", SamplingParams(max_tokens=3))) == 1


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("", SamplingParams(temperature=9.0)),
        ([10**6], SamplingParams()),
        (QUESTION, SamplingParams(spaces_between_special_tokens=False)),
        (QUESTION, SamplingParams(logprobs=-1)),
        (QUESTION, SamplingParams(extra_args={"a": 1})),
    ],
)
def test_a_wrong_prompt_raises(prompt: Any, params: SamplingParams, llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["a", prompt, "b"], [SamplingParams(), params, SamplingParams()])
    assert llm.generate("a", SamplingParams(max_tokens=1)), "the engine goes on"


def test_arguments_are_in_the_table_or_refused(llm: LLM) -> None:
    with pytest.raises(TypeError, match="no argument 'gpu_memory'"):
        LLM("demo", gpu_memory=0.5)
    with pytest.raises(UsageError, match=r"enable_lora is not supported\. Merge"):
        LLM("demo", enable_lora=True)
    with pytest.raises(UsageError, match=r"are not quantized\. Give quantize"):
        LLM("demo", quantization="awq")
    with pytest.warns(UserWarning, match=r"enforce_eager \(memory and speed"):
        made = LLM("demo", enforce_eager=True, enable_lora=False, max_num_seqs=3)
    assert made.engine.config.max_rows == 3
    with pytest.raises(UsageError, match="lora_request is not supported"):
        llm.generate("a", lora_request=object())
    with pytest.raises(UsageError, match="2 prompts and 1 SamplingParams"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(UsageError, match="'multi_modal_data'; give"):
        llm.generate({"prompt": "a", "multi_modal_data": {}})
    with pytest.raises(UsageError, match="single ids beside others"):
        llm.generate(["a", 5])
    with pytest.raises(UsageError, match="give auto"):
        LLM("demo", generation_config="/a/folder")
    assert LLM("demo", enable_prefix_caching=None).engine.config.prefix_cache
    with pytest.raises(UsageError, match="logits_processors are not supported"):
        llm.generate("a", SamplingParams(logits_processors=[len]))
    with pytest.raises(UsageError, match="structured_outputs is a str"):
        llm.generate("a", SamplingParams(structured_outputs="json"))  # type: ignore[arg-type]
    for wish in (StructuredOutputsParams(choice=["x", "y"]), {"choice": ["x", "y"]}):
        params = SamplingParams(structured_outputs=wish)
        assert llm.generate("a", params)[0].outputs[0].text in ("x", "y")


def test_the_table_has_each_field_of_sampling_params(llm: LLM) -> None:
    """Defaults pass; what the table refuses is refused, and nothing is dropped."""
    table = ARGUMENTS["SamplingParams"]
    assert {field.name for field in fields(SamplingParams)} == {*table}
    for name, argument in table.items():
        if argument.effect == "refused":
            assert getattr(SamplingParams(), name) in argument.passes
            wrong: dict[str, Any] = {name: {"extra_args": {"a": 1}}.get(name)}
            if wrong[name] is None:
                is_on = getattr(SamplingParams(), name)
                wrong[name] = [len] if name == "logits_processors" else not is_on
            with pytest.raises((RequestError, UsageError)):
                llm.generate("a", SamplingParams(**wrong))
    with pytest.warns(UserWarning, match="without effect here: output_kind"):
        llm.generate("a", SamplingParams(output_kind=2, max_tokens=1))


def test_constraints_are_not_dropped(llm: LLM) -> None:
    """An empty list was no constraint, and of two the older one was left out."""
    empty = StructuredOutputsParams(choice=[])
    with pytest.raises(RequestError, match="choice"):
        llm.generate("a", SamplingParams(structured_outputs=empty))
    both: dict[str, Any] = {"choice": ["x"]}
    with pytest.raises(UsageError, match="are both given"):
        params = SamplingParams(structured_outputs=both, guided_decoding=both)
        llm.generate("a", params)


def test_a_cut_prompt_without_a_limit_is_answered(llm: LLM) -> None:
    """It had no token: the room was counted before the cut."""
    params = SamplingParams(max_tokens=None, truncate_prompt_tokens=5, temperature=0)
    params.ignore_eos = True
    (output,) = llm.generate("north " * 3000, params)
    num_drawn = len(output.outputs[0].token_ids)
    assert num_drawn == llm.engine.context_length - 5
    with pytest.raises(RequestError, match="context"):
        llm.generate("north " * 3000, SamplingParams(max_tokens=None))
    assert llm.chat([]) == []


def test_special_tokens_of_a_vectors_prompt_are_acted_on(tmp_path: Path) -> None:
    save_bert(tmp_path)
    save_modules(tmp_path, ("Transformer", "Pooling"))
    encoder = LLM(str(tmp_path), dtype="float32")
    bare: Any = {"prompt": "the dog", "add_special_tokens": False}
    plain, without = encoder.embed(["the dog", bare])
    assert plain.outputs.embedding != without.outputs.embedding
    encoder.engine.close()
