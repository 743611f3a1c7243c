"""Every error that fminfer raises on purpose. Its class is its kind, which also travels."""

from __future__ import annotations

import unicodedata
from typing import Literal

ErrorCode = Literal[
    "invalid_json",
    "invalid_utf8",
    "not_an_object",
    "missing_prompt",
    "invalid_type",
    "out_of_range",
    "context_length_exceeded",
    "token_out_of_range",
    "unsupported_parameter",
    "duplicate_custom_id",
    "out_of_memory",
    "nan_logits",
    "internal_error",
    "refused_by_server",
    "server_failed",
    "constraint_broken",
]
# What each says of a request; the docs' table is made of these.
ERROR_CODES: dict[ErrorCode, str] = {
    "invalid_json": (
        "The line is not JSON, its row cannot be read, or its file breaks off there."
    ),
    "invalid_utf8": "The line is not UTF-8.",
    "not_an_object": "The line is JSON, and no object.",
    "missing_prompt": (
        "It has no prompt, messages or input; or a template fails on its row."
    ),
    "invalid_type": "A field has a value of another type.",
    "out_of_range": "A value is beyond its limits.",
    "context_length_exceeded": "Prompt and max_tokens do not fit the model's context.",
    "token_out_of_range": "A token id is not in the vocabulary.",
    "unsupported_parameter": (
        "A field asks for what fminfer, this model or this run does not do."
    ),
    "duplicate_custom_id": "An earlier line has this custom_id.",
    "out_of_memory": "The row cannot run even alone within --budget.",
    "nan_logits": "A logit is nan or +inf.",
    "internal_error": "A fault of fminfer in this line.",
    "refused_by_server": "A server of --engine refuses the request.",
    "server_failed": "Servers of --engine failed at the request, and answered others.",
    "constraint_broken": "A server's answer is not what the request says it must be.",
}
# Of a request that was right, which this run could not answer and another might.
RETRYABLE: tuple[ErrorCode, ...] = (
    "out_of_memory",
    "nan_logits",
    "internal_error",
    "server_failed",
    "constraint_broken",
)
# What made a run stop: Ctrl-C, SIGTERM, a closed terminal, a deadline or a
# scheduler's warning.
StopReason = Literal["interrupted", "terminated", "hung_up", "out_of_time"]


class FminferError(Exception):
    """Base of all errors of this package; its text is meant for the user."""

    is_reported_elsewhere = False  # whether another process tells the user of it

    @property
    def kind(self) -> str:
        """The name of its class, from which `make_error` makes it in another process."""
        return type(self).__name__


class UsageError(FminferError):
    """The caller asked for something that cannot be: a missing file, a clash of flags."""


class InUseError(UsageError):
    """Another run is answering into an output; its finished rows are kept."""


class CheckpointError(FminferError):
    """A model folder, config, tokenizer or weight file that cannot be used.

    The text quotes such files, which may hold anything. Beyond 1,800 characters, its middle is
    left out.
    """

    def __init__(self, text: str) -> None:
        if (num_more := len(text) - 1800) > 0:
            text = (
                f"{text[:1000]} … {num_more:,} characters … {text[1000 + num_more :]}"
            )
        super().__init__(text)


class PipelineError(FminferError):
    """A rank failed, died, fell silent or never came: which, and whose fault it is."""


class OutputError(FminferError):
    """Rows that cannot be written: a full disk, a folder that is gone. Earlier ones are kept."""


class MachineError(FminferError):
    """No room for temporary files, no memory, a failing disk: never a row's error."""


class ServerError(FminferError):
    """A server of --engine, or all of them, cannot go on with the run: which, and why."""


class SchedulerError(FminferError):
    """A cluster's sbatch, bsub, squeue or bjobs failed; its own words are told."""


class OutOfMemoryError(FminferError):
    """Memory for the smallest step cannot be had."""


class StoppedError(FminferError):
    """The run was told to stop, and rows are left; the same command goes on from there."""

    def __init__(self, message: str, reason: StopReason = "interrupted") -> None:
        super().__init__(message)
        self.reason: StopReason = reason

    @property
    def status(self) -> Literal["cancelled", "expired"]:
        """What the status file says of a run that stopped so."""
        return "expired" if self.reason == "out_of_time" else "cancelled"


class StepLimitError(FminferError):
    """The run did all the steps that it was allowed, and rows are left."""


class DamagedInputError(FminferError):
    """An input file that breaks off: what is wrong, and the piece in which it was noticed."""

    def __init__(self, message: str, rest: bytes = b"") -> None:
        super().__init__(message)
        self.rest = rest


class UncompiledError(FminferError):
    """A request's grammar must be compiled first; its preparation does not wait."""


class RequestError(FminferError):
    """What is wrong with one line, which costs it alone."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.param = param

    def __reduce__(
        self,
    ) -> tuple[type[RequestError], tuple[ErrorCode, str, str | None]]:
        """Let it travel between processes."""
        return RequestError, (self.code, self.message, self.param)

    @property
    def is_retryable(self) -> bool:
        """Tell whether the request was right and this run could not answer it."""
        return self.code in RETRYABLE

    @property
    def type(self) -> str:
        """The OpenAI error object's `type`: whose fault it is."""
        return "server_error" if self.is_retryable else "invalid_request_error"


PLAIN_KINDS = (
    UsageError,
    InUseError,
    CheckpointError,
    PipelineError,
    OutputError,
    MachineError,
    ServerError,
    SchedulerError,
    OutOfMemoryError,
    StepLimitError,
)


def make_error(kind: str, text: str) -> FminferError:
    """Return another process's error, from its kind and its text."""
    return next((each for each in PLAIN_KINDS if each.__name__ == kind), FminferError)(
        text
    )


def line_error(error: Exception, what: str) -> RequestError:
    """Return what an exception costs the line, called `what`, that was being prepared.

    Raises:
        FminferError: it is no fault of the line's, and ends the run.
    """
    if isinstance(error, RequestError):
        error.__context__ = None  # frames hold the request, which may be large
        return error.with_traceback(None)
    if isinstance(error, FminferError):
        raise error
    if isinstance(error, OSError | MemoryError):
        reason = str(error) or "no memory was left"
        raise MachineError(
            f"the machine failed while {what} was prepared: {reason}. Finished rows are "
            "kept; mend that, and run the same command again"
        ) from error
    # A fault of ours must not cost the other lines.
    text = f"fminfer failed on this line ({type(error).__name__}: {error}); please report it"
    return RequestError("internal_error", text)


def make_printable(text: str) -> str:
    """Spell out the characters of a text that control a terminal, or are no text."""
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs")
        else char
        for char in text
    )
