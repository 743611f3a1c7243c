"""fminfer as a model provider of Inspect AI, under the name `fminfer`.

    inspect eval task.py --model fminfer/path/to/model -M dtype=float32

Inspect finds it by an entry point. Its samples run together in one engine of this process.
Needs the extra `inspect`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
    modelapi,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo

from fminfer.core.errors import RequestError, UsageError
from fminfer.interfaces.async_engine import AsyncEngine

MOST_AT_ONCE = 256  # requests; the engine's usual rows
# Of `GenerateConfig`: what each is called in a request.
ACTED_ON = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "parallel_tool_calls": "parallel_tool_calls",
    "reasoning_effort": "reasoning_effort",
    "stop_seqs": "stop",
    "num_choices": "n",
    "reasoning_tokens": "thinking_token_budget",
}
# What Inspect does by itself, or what changes no answer of a model in this process.
OF_INSPECT = {
    "adaptive_connections",
    "attempt_timeout",
    "batch",
    "cache",
    "cache_prompt",
    "extra_headers",
    "fail_on_refusal",
    "fallback_models",
    "internal_tools",
    "max_connections",
    "max_retries",
    "max_tool_output",
    "reasoning_history",
    "stream_idle_timeout",
    "system_message",
    "timeout",
}
STOP_REASONS: dict[str, StopReason] = {
    "stop": "stop",
    "length": "max_tokens",
    "tool_calls": "tool_calls",
}


@modelapi(name="fminfer")
class FminferAPI(ModelAPI):
    """Answers Inspect's conversations.

    Args:
        model_name: a folder, a hub id, or demo.
        model_args: the engine's options (-M of the command).
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, config=config or GenerateConfig())
        if base_url is not None:
            raise UsageError(
                "fminfer computes in this process; for a server at a URL use Inspect's "
                "openai-api provider"
            )
        self._engine = AsyncEngine(model_name, **model_args)

    def max_connections(self) -> int:
        """Return how many samples may ask at once."""
        return MOST_AT_ONCE

    async def aclose(self) -> None:
        """End the engine."""
        await self._engine.close()

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Answer a conversation.

        Raises:
            RequestError: what is wrong with it, but for its length.
            UsageError: a setting that nobody acts on.
        """
        request = make_fields(config) | {"messages": [_make_message(m) for m in input]}
        if tools:
            request["tools"] = [_make_tool(tool) for tool in tools]
            request["tool_choice"] = _make_choice(tool_choice)
        try:
            record = await self._engine.generate(request)
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return ModelOutput.from_content(
                self.model_name, error.message, "model_length", error.message
            )
        usage = ModelUsage(
            input_tokens=record.num_prompt_tokens - record.num_cached_tokens,
            input_tokens_cache_read=record.num_cached_tokens,
            output_tokens=record.num_completion_tokens,
            total_tokens=record.num_prompt_tokens + record.num_completion_tokens,
        )
        choices = [
            _parse_choice(choice.fields, self.model_name) for choice in record.choices
        ]
        return ModelOutput(model=self.model_name, choices=choices, usage=usage)


def make_fields(config: GenerateConfig) -> dict[str, Any]:
    """Return the fields of a request that Inspect's settings are.

    Raises:
        UsageError: a setting that nobody acts on.
    """
    settings = {
        name: value
        for name, value in config
        if value is not None and name not in OF_INSPECT
    }
    fields: dict[str, Any] = dict(settings.pop("extra_body", {}))
    if bias := settings.pop("logit_bias", None):
        fields["logit_bias"] = {str(i): value for i, value in bias.items()}
    if (schema := settings.pop("response_schema", None)) is not None:
        form = {
            "name": schema.name,
            "schema": schema.json_schema.model_dump(exclude_none=True, by_alias=True),
        }
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    if others := sorted(settings.keys() - ACTED_ON):
        raise UsageError(
            f"fminfer's provider does not act on {', '.join(others)}; leave it out. It acts "
            f"on {', '.join(sorted(ACTED_ON))}, logit_bias, response_schema and extra_body"
        )
    return fields | {ACTED_ON[name]: value for name, value in settings.items()}


def _make_tool(tool: ToolInfo) -> Mapping[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters.model_dump(exclude_none=True),
    }
    return {"type": "function", "function": function}


def _make_choice(choice: ToolChoice) -> Any:
    """Return OpenAI's word for Inspect's choice of tools."""
    if isinstance(choice, ToolFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice == "any" else choice


def _make_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message of a request.

    Raises:
        UsageError: it holds more than text.
    """
    if not isinstance(message.content, str):
        kinds = {part.type for part in message.content} - {"text", "reasoning"}
        if kinds:
            raise UsageError(
                f"a message has {', '.join(sorted(kinds))}; texts alone are read"
            )
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if isinstance(message, ChatMessageTool):
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function,
                    "arguments": json.dumps(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _parse_choice(choice: dict[str, Any], model: str) -> ChatCompletionChoice:
    """Return a choice of an answer as Inspect's."""
    message = choice["message"]
    content: Any = message["content"] or ""
    if thought := message.get("reasoning_content"):
        content = [ContentReasoning(reasoning=thought), ContentText(text=content)]
    calls = [_parse_call(call) for call in message.get("tool_calls") or ()]
    logprobs = choice.get("logprobs")
    return ChatCompletionChoice(
        message=ChatMessageAssistant(
            content=content, tool_calls=calls or None, model=model, source="generate"
        ),
        stop_reason=STOP_REASONS.get(choice["finish_reason"], "unknown"),
        logprobs=Logprobs(content=logprobs["content"]) if logprobs else None,
    )


def _parse_call(call: dict[str, Any]) -> ToolCall:
    """Return a call of a tool; Inspect tells the model of arguments that are no JSON."""
    function = call["function"]
    fault = None
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        arguments = {}
        fault = f"the arguments are no JSON: {error}"
    return ToolCall(
        id=call["id"],
        function=function["name"],
        arguments=arguments,
        parse_error=fault,
    )
