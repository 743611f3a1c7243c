"""Takes a sequence one token further: text, stop criteria, finish reason (contract, section 5)."""

from __future__ import annotations

from fminfer.engine.sequence import Sequence, TokenReport
from fminfer.engine.stop_strings import find_stop
from fminfer.text.detokenizer import Detokenizer


def advance(sequence: Sequence, token: TokenReport) -> None:
    """Append a drawn token; afterwards `finish_reason` tells whether the sequence is done."""
    params = sequence.prompt.params
    detokenizer = sequence.detokenizer
    assert detokenizer is not None, "a sequence that generates nothing drew a token"
    sequence.tokens.append(token)
    if sequence.edits is not None:
        sequence.edits.count(token.token_id)
    if token.token_id in sequence.prompt.end_ids and len(sequence.tokens) > params.min_tokens:
        _end(sequence, token.token_id)
        return
    _add_token(sequence, detokenizer)
    if sequence.finish_reason is None and len(sequence.tokens) >= params.max_tokens:
        _add_text(sequence, detokenizer.flush())
        sequence.finish_reason = sequence.finish_reason or "length"


def _end(sequence: Sequence, token_id: int) -> None:
    """Finish at EOS or a stop token, which has no part in the text unless that was asked for."""
    params, detokenizer = sequence.prompt.params, sequence.detokenizer
    assert detokenizer is not None
    if params.include_stop_str_in_output:
        _add_token(sequence, detokenizer)
        rest = detokenizer.flush() if sequence.finish_reason is None else ""
    else:
        rest = detokenizer.flush()
        sequence.tokens[-1].offset = len(sequence.text) + len(rest)
    _add_text(sequence, rest)
    sequence.ended_by_token = True
    sequence.finish_reason = "stop"
    if sequence.stop_reason is None:
        sequence.stop_reason = sequence.prompt.stop_reasons.get(token_id)


def _add_token(sequence: Sequence, detokenizer: Detokenizer) -> None:
    """Append the newest token's text, and say where it and those before it start."""
    new = detokenizer.add(sequence.tokens[-1].token_id)
    starts = detokenizer.starts
    for token, start in zip(sequence.tokens[-len(starts) :], starts, strict=True):
        token.offset = start
    _add_text(sequence, new)


def _add_text(sequence: Sequence, new: str) -> None:
    """Append text; at a stop string cut it, and the tokens that start at the cut or later."""
    if not new:
        return
    params = sequence.prompt.params
    sequence.text += new
    if len(sequence.tokens) <= params.min_tokens:
        return
    found = find_stop(sequence.text, params.stop, len(new))
    if found is not None:
        cut, stop = found
        cut += len(stop) if params.include_stop_str_in_output else 0
        sequence.text = sequence.text[:cut]
        sequence.num_cut = sum(token.offset >= cut for token in sequence.tokens)
        sequence.finish_reason, sequence.stop_reason = "stop", stop
