"""Takes a sequence one token further: text, stop criteria, finish reason (contract, section 5)."""

from __future__ import annotations

from fminfer.engine.sequence import Sequence, TokenReport
from fminfer.engine.stopping import find_stop


def advance(sequence: Sequence, token: TokenReport, eos_ids: frozenset[int]) -> None:
    """Append a drawn token; afterwards `finish_reason` tells whether the sequence is done."""
    params = sequence.prompt.params
    detokenizer = sequence.detokenizer
    assert detokenizer is not None, "a sequence that generates nothing drew a token"
    offset = len(sequence.text)
    sequence.tokens.append(TokenReport(token.token_id, token.logprob, token.top, offset))
    if token.token_id in eos_ids and not params.ignore_eos:
        _add_text(sequence, detokenizer.flush())
        sequence.ended_by_eos = True
        sequence.finish_reason = "stop"
        return
    _add_text(sequence, detokenizer.add(token.token_id))
    if sequence.finish_reason is None and len(sequence.tokens) >= params.max_tokens:
        _add_text(sequence, detokenizer.flush())
        sequence.finish_reason = sequence.finish_reason or "length"


def _add_text(sequence: Sequence, new: str) -> None:
    """Append text; at a stop string cut it, and the tokens that start at the cut or later."""
    if not new:
        return
    sequence.text += new
    cut = find_stop(sequence.text, sequence.prompt.params.stop, len(new))
    if cut is not None:
        sequence.text = sequence.text[:cut]
        sequence.num_cut = sum(token.offset >= cut for token in sequence.tokens)
        sequence.finish_reason = "stop"
