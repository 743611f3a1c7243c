"""A scripted model that thinks: what it would write, and what masks let it write."""

from __future__ import annotations

from typing import Any

from fminfer.compute.values.step import Step, StepResult, unpack_masks
from fminfer.core.messages import Mask
from fminfer.engine.engine_core import Event
from tests.engine.test_chat import ChatBench
from tests.engine.test_contract import ScriptedPipeline, _logprobs
from tests.steps import Row
from tests.streams import check_stream, events_of

BANNED = ord("~")  # is drawn in place of a banned token
HELLO = [{"role": "user", "content": "Hello"}]
# Both name the tags; the second one opens the thought, too.
TEMPLATE = ">{# <think> </think> #}"
OPENING = "><think>"


class MaskedPipeline(ScriptedPipeline):
    """Draws the script's byte, or another one where masks or bans do not allow it."""

    start = 0  # the place of the prompt's last token

    def _answer(self, step: Step, rows: list[Row]) -> StepResult:
        result = super()._answer(step, rows)
        if not len(step.draws):
            return result
        masks = unpack_masks(step)
        positions = [
            row.position + i for row in rows for i in range(len(row.token_ids))
        ]
        ids = []
        num_banned = 0
        for draw in step.draws:
            banned = step.banned_ids[num_banned : num_banned + draw["num_banned"]]
            num_banned += draw["num_banned"]
            place = positions[draw["token_index"]] - self.start
            token = self.script[place % len(self.script)]
            mask = masks[draw["mask"]] if draw["mask"] >= 0 else None
            if token in banned:
                token = BANNED
            ids.append(token if mask is None else _choose(mask, token))
        result.results["tokens"] = _logprobs(ids, step.draws["num_top"])
        return result


def _choose(mask: Mask, token: int) -> int:
    # the last id gives nan
    ids = range(min(255, 8 * len(mask.bits)))
    allowed = [i for i in ids if mask.bits[i >> 3] >> (i & 7) & 1]
    return token if token in allowed else allowed[-1]


class ThinkingBench(ChatBench):
    """A scripted chat whose script is read from the prompt's end on."""

    def __init__(self, script: bytes, template: str = TEMPLATE, **limits: Any) -> None:
        super().__init__(script, chat_template=template, **limits)
        self.pipeline.__class__ = MaskedPipeline
        self.find_start()

    def find_start(self, **fields: Any) -> None:
        """Begin the script behind the prompt of a chat with these fields."""
        asked = {"messages": HELLO, "max_tokens": 1} | fields
        request = self.intake.parse(asked | {"thinking_token_budget": -1})
        (prompt,) = self.intake.prepare(request).prompts
        assert isinstance(self.pipeline, MaskedPipeline)
        self.pipeline.start = len(prompt.ids) - 1

    def message(self, **fields: Any) -> tuple[Any, Any, Any]:
        """Return the thought, the content and the reason of the only choice."""
        (choice,) = self.choices(**fields)
        message = choice["message"]
        return (
            message.get("reasoning_content"),
            message["content"],
            choice["finish_reason"],
        )

    def usage(self, **fields: Any) -> dict[str, Any]:
        (record,) = self.run({"messages": HELLO, "temperature": 0} | fields)
        assert record.result is not None, record.error
        found: dict[str, Any] = record.result["usage"]
        return found

    def stream_events(self, **fields: Any) -> list[Event]:
        asked = {"messages": HELLO, "temperature": 0, "return_token_ids": True} | fields
        request_id = self.add(is_streamed=True, **asked)
        events = events_of(self.loop)
        check_stream(events, request_id)
        return events
