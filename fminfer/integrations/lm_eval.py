"""fminfer as a model of lm-evaluation-harness, under the name `fminfer`.

    import fminfer.integrations.lm_eval  # registers it
    lm_eval.simple_evaluate("fminfer", {"pretrained": "path/to/model"}, tasks=["hellaswag"])

or, as lm-eval's own command with the model known to it:

    python -m fminfer.integrations.lm_eval --model fminfer --model_args pretrained=… --tasks …

It gives the numbers of lm-eval's `hf` model: same ids, same windows, same cuts. All
requests of a call go to the engine together. Needs the extra `lm-eval`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm.auto import tqdm

from fminfer.answers.cache_place import KeptAnswers
from fminfer.core.config import EngineConfig, check_option_names
from fminfer.core.errors import FminferError, UsageError
from fminfer.core.option import options_of
from fminfer.integrations.lm_eval_prompts import (
    ChatRenderer,
    Generation,
    plan_generation,
)
from fminfer.runtime.engine_api import Engine

Result = TypeVar("Result")


def answer_all(
    engine: Engine,
    bodies: list[dict[str, Any]],
    parse: Callable[[int, dict[str, Any]], Result],
    name: Callable[[int], str],
    *,
    is_quiet: bool,
) -> list[Result]:
    """Run requests together; return what `parse` makes of each answer.

    Args:
        parse: parses the first choice of the request at an index, as soon as it is there.
        name: what an error calls the request at an index.
        is_quiet: show no progress.

    Raises:
        FminferError: a request was refused.
    """
    results: dict[int, Result] = {}
    with closing(engine.run(bodies)) as records:
        for record in tqdm(
            records, total=len(bodies), disable=is_quiet, unit="request"
        ):
            index = record.line.number - 1
            if record.error is not None:
                raise FminferError(
                    f"request {index + 1} of {len(bodies)}, {name(index)}: "
                    f"{record.error.message} ({record.error.code})"
                )
            assert record.result is not None
            results[index] = parse(index, record.result["choices"][0])
    return [results[index] for index in range(len(bodies))]


def sum_logprobs(logprobs: dict[str, Any], num_scored: int) -> tuple[float, bool]:
    """Return the sum over the last tokens, and whether each was the best one.

    `top_logprobs` has the best first, so ties count as `argmax` would have them.
    """
    tokens, values, tops = (
        logprobs[name][-num_scored:]
        for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    best = [next(iter(top.items())) for top in tops]
    return sum(values), best == list(zip(tokens, values, strict=True))


def describe_texts(texts: tuple[str, ...] | None) -> str:
    """Return a request's texts, short enough for a message."""
    if texts is None:
        return "a window of a text"
    return " → ".join(
        repr(text if len(text) <= 60 else "…" + text[-59:]) for text in texts
    )


LM_EVAL_OPTIONS = [
    "pretrained",
    "device",
    "max_length",
    "max_gen_toks",
    "prefix_token_id",
    "chat_template_args",
]
LM_EVAL_DEVICE = "cuda:0"  # what lm-eval's command passes if the user says nothing

log = logging.getLogger(__name__)

# cache key, context, continuation
ScoredPair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("fminfer")
class FminferLM(TemplateLM):
    """Scores and generates for lm-eval with an `Engine`.

    Args:
        pretrained: the engine's model: a folder or hub id; None is the demo model of
        the package.
        device: as for the engine; lm-eval's default, cuda:0, is the CPU where there is no GPU.
        max_length: tokens of context to use, at most the model's.
        max_gen_toks: tokens to generate where the task does not say.
        prefix_token_id: what an empty context becomes; default BOS, or else EOS.
        chat_template_args: further variables of the chat template.
        batch_size, max_batch_size: passed by lm-eval and not used: all requests run together, as
            many at once as the engine's `budget` and `max_rows` allow.
        options: other fields of `EngineConfig`, and `result_cache` and `result_cache_bytes`.

    Raises:
        UsageError: an option that cannot be, or a model without a tokenizer.
    """

    backend = "causal"  # or "seq2seq"

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        device: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        known = {*options_of(EngineConfig), *options_of(KeptAnswers)}
        known -= {"model", "device"}
        check_option_names(options, [*LM_EVAL_OPTIONS, *sorted(known)])
        if batch_size not in (None, 1, "1", "auto"):
            log.warning(
                "batch_size %s is not used; see the engine's budget", batch_size
            )
        device = "auto" if device == LM_EVAL_DEVICE else device
        self.engine = Engine(pretrained, device=device, **options)
        if self.engine.intake.limits.start_ids is not None:
            self.backend = "seq2seq"
        self.tokenizer: Any = self.engine.tokenizer.hf
        if self.tokenizer is None:
            raise UsageError(
                f"{self.engine.model_name} has no tokenizer; give a model folder that has one"
            )
        self._chat = ChatRenderer(
            self.tokenizer, self.engine.intake.limits.chat_template, chat_template_args
        )
        most = self.engine.context_length
        if max_length is not None and not 1 < max_length <= most:
            raise UsageError(
                f"max_length is {max_length}; it must be from 2 to the model's context, {most}"
            )
        self.max_length = most if max_length is None else max_length
        self.max_gen_toks = max_gen_toks
        starts = (
            prefix_token_id,
            self.tokenizer.bos_token_id,
            self.tokenizer.eos_token_id,
        )
        self._prefix_token_id: int | None = next(
            (i for i in starts if i is not None), None
        )

    @property
    def eot_token_id(self) -> int | None:
        token_id: int | None = self.tokenizer.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        if self._prefix_token_id is None:
            raise UsageError(
                "the tokenizer has neither BOS nor EOS to stand for an empty context; "
                "give prefix_token_id in model_args"
            )
        return self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """The key of lm-eval's cache of prompts, which depend on the template, too."""
        return (
            f"{self.tokenizer.name_or_path.replace('/', '__')}{self._chat.fingerprint}"
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokenize; None is the tokenizer's own policy, unless the text has its prefix."""
        if add_special_tokens is None:
            prefix_id = self._prefix_token_id
            prefix = None if prefix_id is None else self.tokenizer.decode(prefix_id)
            add_special_tokens = not has_bos_prefix(string, prefix)
        ids: list[int] = self.tokenizer.encode(
            string, add_special_tokens=add_special_tokens
        )
        return ids

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return each text's whole log-likelihood, over windows of at most max_length tokens."""
        pairs: list[ScoredPair] = []
        owners: list[int] = []  # the request of each window
        for place, request in enumerate(requests):
            for window in self._make_windows(request.args[0]):
                pairs.append((None, *window))
                owners.append(place)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)
        for place, (logprob, _) in zip(owners, scores, strict=True):
            totals[place] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _make_windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        rolling = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return map(make_disjoint_window, rolling)

    def _loglikelihood_tokens(
        self, requests: list[ScoredPair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations; lm-eval's `loglikelihood` tokenizes and calls this."""
        scored_prompts = [self._make_scored_prompt(*pair) for pair in requests]
        self._warn_of_cuts(sum(is_cut for _, is_cut in scored_prompts), len(requests))
        scored = {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        bodies = [prompts | scored for prompts, _ in scored_prompts]

        def parse_scores(index: int, choice: dict[str, Any]) -> tuple[float, bool]:
            key, _, continuation = requests[index]
            logprob = sum_logprobs(choice["logprobs"], len(continuation))
            if key is not None:  # a window of a rolling text is cached with its text
                self.cache_hook.add_partial("loglikelihood", key, logprob)
            return logprob

        return answer_all(
            self.engine,
            bodies,
            parse_scores,
            lambda i: describe_texts(requests[i][0]),
            is_quiet=disable_tqdm,
        )

    def _make_scored_prompt(
        self, key: tuple[str, str] | None, context: list[int], continuation: list[int]
    ) -> tuple[dict[str, Any], bool]:
        """Return a pair as a request has it, and whether its beginning was cut off.

        As `hf` does, keep the last max_length + 1 ids of both, of which the last is
        never fed; an encoder reads the last max_length ids of the context.
        """
        if not 0 < len(continuation) <= self.max_length:
            raise UsageError(
                f"the continuation of {describe_texts(key)} has {len(continuation)} "
                f"tokens; it must have from 1 to max_length, {self.max_length}"
            )
        if self.backend == "seq2seq":
            prompt = context[-self.max_length :]
            body = {"prompt": prompt, "decoder_prompt": continuation}
            return body, len(prompt) < len(context)
        whole = context + continuation
        prompt = whole[-(self.max_length + 1) :]
        return {"prompt": prompt}, len(prompt) < len(whole)

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Generate one text a request, up to its stop strings."""
        plans = [self._plan_generation(*request.args) for request in requests]
        self._warn_of_cuts(sum(plan.is_cut for plan in plans), len(requests))
        bodies = [plan.body for plan in plans]

        def parse_text(index: int, choice: dict[str, Any]) -> str:
            text = plans[index].decode_text(choice, self.tokenizer)
            self.cache_hook.add_partial("generate_until", requests[index].args, text)
            return text

        return answer_all(
            self.engine,
            bodies,
            parse_text,
            lambda i: describe_texts(requests[i].args[:1]),
            is_quiet=disable_tqdm,
        )

    def _plan_generation(self, context: str, gen_kwargs: dict[str, Any]) -> Generation:
        # `hf` looks for BOS here, and not for the prefix of scored texts.
        has_bos = has_bos_prefix(context, self.tokenizer.bos_token)
        ids = self.tok_encode(context, not has_bos) or [self.prefix_token_id]
        return plan_generation(
            ids,
            gen_kwargs,
            self.tokenizer,
            max_length=self.max_length,
            max_gen_toks=self.max_gen_toks,
            is_read_apart=self.backend == "seq2seq",
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return messages as a prompt; without a generation prompt the last message goes on."""
        return self._chat.render(
            chat_history, adds_generation_prompt=add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template that lm-eval reports; a string is the name of one of several."""
        if isinstance(chat_template, str):
            self._chat.warn_of_name(chat_template)
        return self._chat.template or super().chat_template(chat_template)

    def _warn_of_cuts(self, num_cut: int, total: int) -> None:
        if num_cut:
            log.warning(
                "%d of %d prompts are longer than max_length, %d tokens, allows; their "
                "beginnings were cut off, as lm-eval asks of a model",
                num_cut,
                total,
                self.max_length,
            )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
