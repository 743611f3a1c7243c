"""vLLM's `LLM` over the engine: programs written for it run with the import changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from tqdm.auto import tqdm

from fminfer.contract.record import Record
from fminfer.core.config import EngineConfig, make_config
from fminfer.core.errors import UsageError
from fminfer.core.option import options_of
from fminfer.interfaces.vllm_arguments import OPTIONS, check_arguments
from fminfer.interfaces.vllm_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    OutputBuilder,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from fminfer.interfaces.vllm_params import SamplingParams
from fminfer.models.checkpoint import open_model
from fminfer.runtime.engine_api import Engine

DTYPES = {"half": "float16", "float": "float32"}
Output = TypeVar("Output")
AnyPrompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """Answers prompts with one model, under vLLM's names.

        llm = fminfer.LLM("path/to/model")
        for output in llm.generate(["Hello"], fminfer.SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

    Args:
        model: a folder, a .gguf file or a hub id.
        options: vLLM's arguments, as docs/other_names.md lists them, and the engine's own, such
            as `quantize`.

    Raises:
        FminferError: the model does not run, or an argument is refused.
        TypeError: an argument that neither has.
    """

    def __init__(self, model: str, **options: Any) -> None:
        known = options_of(EngineConfig).keys()
        # what both have, vLLM's table says
        chosen = {name: options.pop(name) for name in known & options.keys()}
        named = check_arguments("LLM", {"model": model, **options})
        del named["model"]
        default_source = chosen.pop("generation_config", "auto")
        if default_source not in ("auto", "vllm"):
            raise UsageError(
                f"generation_config is {default_source!r}; give auto (the model's) or vllm"
            )
        quantization = named.pop("quantization", None)
        chosen |= {
            OPTIONS.get(name, name): value
            for name, value in named.items()
            if value is not None
        }
        chosen["dtype"] = DTYPES.get(
            chosen.get("dtype", "auto"), chosen.get("dtype", "auto")
        )

        config = make_config(model, **chosen, token_format="vocab")
        checkpoint = open_model(config)
        scheme = checkpoint.architecture.scheme
        if quantization is not None and scheme is None:
            raise UsageError(
                f"quantization is {quantization!r}, and the files of {checkpoint.name} are not "
                "quantized. Give quantize='int8' or 'int4' to round their weights"
            )
        has_defaults = checkpoint.generation_folder is not None
        if default_source == "auto" and has_defaults:
            config = replace(config, generation_config="model")
        self.engine = Engine(config, checkpoint=checkpoint)
        self._generation_fields = checkpoint.generation_fields
        hf = self.engine.tokenizer.hf
        self._builder = OutputBuilder(
            find_token_id=_parse_piece if hf is None else hf.convert_tokens_to_ids,
            decode=partial(self.engine.tokenizer.decode, skip_special_tokens=False),
        )

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers."""
        return self.engine.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what a prompt without parameters gets: the model's defaults, or vLLM's."""
        defaults = self.engine.intake.limits.defaults
        names = {field.name for field in fields(SamplingParams)}
        stated = names & self._generation_fields.keys()
        params = SamplingParams(**{name: getattr(defaults, name) for name in stated})
        if (most := self.engine.intake.limits.max_new_tokens) is not None:
            params.max_tokens = most
        return params

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer prompts; return their outputs in the prompts' order.

        Raises:
            RequestError: a prompt, or its parameters, are wrong; nothing is returned.
        """
        check_arguments("generate", others)
        each_prompt = _list_prompts(prompts)
        each_params = self._list_params(sampling_params, len(each_prompt))
        requests = [
            self._make_request(prompt, params)
            for prompt, params in zip(each_prompt, each_params, strict=True)
        ]

        def build(record: Record) -> RequestOutput:
            index = record.line.number - 1
            prompt = requests[index]["prompt"]
            text = prompt if isinstance(prompt, str) else None
            return self._builder.build(record, text, each_params[index])

        return self._run(requests, build, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list, as `generate` answers prompts.

        Raises:
            UsageError: the model has no chat template.
            RequestError: as `generate`.
        """
        settings = check_arguments("chat", others)
        further = settings.pop("chat_template_kwargs", None) or {}
        template = settings.pop("chat_template", None)
        template = template or self.engine.intake.limits.chat_template
        hf = self.engine.tokenizer.hf
        if hf is None or not (template or hf.chat_template):
            raise UsageError("the model has no chat template; give chat_template")
        settings.setdefault("add_generation_prompt", True)
        is_one = any(isinstance(message, Mapping) for message in messages)
        conversations = [messages] if is_one else messages
        prompts = [
            hf.apply_chat_template(
                conversation,
                chat_template=template,
                tokenize=False,
                **settings,
                **further,
            )
            for conversation in conversations
        ]
        marked = [{"prompt": text, "add_special_tokens": False} for text in prompts]
        return self.generate(marked, sampling_params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of texts, in their order; it raises as `generate` does."""

        def build(record: Record) -> EmbeddingRequestOutput:
            vector = [float(x) for x in _find_entry(record)["embedding"]]
            return EmbeddingRequestOutput(_find_id(record), EmbeddingOutput(vector))

        settings = check_arguments("embed", others)
        return self._run(_make_inputs(prompts, settings), build, use_tqdm)

    def classify(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of texts' classes; it raises as `generate` does."""

        def build(record: Record) -> ClassificationRequestOutput:
            probs = ClassificationOutput(_find_entry(record)["probs"])
            return ClassificationRequestOutput(_find_id(record), probs)

        settings = check_arguments("classify", others)
        return self._run(_make_inputs(prompts, settings), build, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs: one text with each of others, or text by text."""
        settings = check_arguments("score", others)
        firsts = [data_1] if isinstance(data_1, str) else [*data_1]
        seconds = [data_2] if isinstance(data_2, str) else [*data_2]
        if len(firsts) == 1:
            firsts *= len(seconds)
        if len(firsts) != len(seconds):
            raise UsageError(
                f"score: there are {len(firsts)} and {len(seconds)} texts; give one and any "
                "number, or as many"
            )
        pairs = zip(firsts, seconds, strict=True)
        requests = [{"text_1": a, "text_2": b} | settings for a, b in pairs]

        def build(record: Record) -> ScoringRequestOutput:
            score = ScoringOutput(_find_entry(record)["score"])
            return ScoringRequestOutput(_find_id(record), score)

        return self._run(requests, build, use_tqdm)

    def _list_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        """Return each prompt's parameters."""
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if len(params) != num_prompts:
            raise UsageError(
                f"there are {num_prompts} prompts and {len(params)} SamplingParams; give one "
                "for all, or one for each"
            )
        return [*params]

    def _make_request(
        self, prompt: AnyPrompt, params: SamplingParams
    ) -> dict[str, Any]:
        """Return the request that a prompt and its parameters are."""
        request = _make_input(prompt, "prompt") | params.make_fields()
        if params.max_tokens is None:
            ids = request["prompt"]
            if isinstance(ids, str):
                is_special = request.get("add_special_tokens", True)
                encoded = self.engine.tokenizer.encode(
                    ids, add_special_tokens=is_special
                )
                ids = encoded.ids
            num_tokens = len(ids)
            if (most := params.truncate_prompt_tokens) is not None and most > 0:
                num_tokens = min(num_tokens, most)
            # a prompt that fills the context is refused, as with any limit
            request["max_tokens"] = max(1, self.engine.context_length - num_tokens)
        return request

    def _run(
        self,
        requests: list[dict[str, Any]],
        build: Callable[[Record], Output],
        use_tqdm: bool | Callable[..., Any],
    ) -> list[Output]:
        """Answer requests together; return what is built of each record, in their order."""
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        outputs: dict[int, Output] = {}
        with (
            make_bar(
                total=len(requests), desc="Processed prompts", disable=not use_tqdm
            ) as bar,
            closing(self.engine.run(requests)) as records,
        ):
            for record in records:
                if record.error is not None:
                    raise record.error
                outputs[record.line.number] = build(record)
                bar.update()
        return [outputs[number] for number in sorted(outputs)]


def _list_prompts(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """Return prompts as a list; a text, a dict or a list of ids is one of them."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    ids = [each for each in prompts if isinstance(each, int)]
    if ids and len(ids) == len(prompts):
        return [ids]
    if ids:
        raise UsageError(
            "prompts holds single ids beside others; give each prompt's ids as a list"
        )
    return [each for each in prompts if not isinstance(each, int)]


def _make_input(prompt: AnyPrompt, field: str) -> dict[str, Any]:
    """Return the fields of a request that a prompt is; `field` has its text or ids."""
    if not isinstance(prompt, Mapping):
        return {field: prompt if isinstance(prompt, str) else [*prompt]}
    others = dict(prompt)
    texts = [others.pop(n) for n in ("prompt_token_ids", "prompt") if n in prompt]
    if len(texts) != 1 or others.keys() - {"add_special_tokens"}:
        raise UsageError(
            f"a prompt has {', '.join(map(repr, prompt))}; give 'prompt' or "
            "'prompt_token_ids', and nothing else"
        )
    return {field: texts[0], **others}


def _make_inputs(
    prompts: AnyPrompt | Sequence[AnyPrompt], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the requests that ask for the vectors or classes of prompts."""
    return [
        _make_input(prompt, "input") | settings for prompt in _list_prompts(prompts)
    ]


def _find_entry(record: Record) -> dict[str, Any]:
    """Return the one entry of an answer that has no text."""
    assert record.result is not None, "a record has a result or an error"
    entry: dict[str, Any] = record.result["data"][0]
    return entry


def _find_id(record: Record) -> str:
    return str(record.line.number - 1)


def _parse_piece(piece: str) -> int:
    """Return the id that a model without a tokenizer spells."""
    return int(piece.removeprefix("token_id:"))
