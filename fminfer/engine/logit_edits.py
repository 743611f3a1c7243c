"""What a request changes in its logits: logit_bias, and penalties for earlier tokens.

Each affected token has a column. Columns are updated as tokens are drawn, so a step sends them
without counting anew. `fminfer.compute.sampling.sampler` applies them.
"""

from __future__ import annotations

from fminfer.contract.request import SamplingParams
from fminfer.core.messages import EditColumns


class LogitEdits:
    """The columns of one sequence.

    Args:
        prompt_ids: repetition_penalty counts them as seen; the other penalties do not.
    """

    def __init__(self, params: SamplingParams, prompt_ids: list[int]) -> None:
        self._params = params
        self._place: dict[int, int] = {}  # token id -> its place in the columns
        self._num_drawn: dict[int, int] = {}
        self.columns = EditColumns()
        for token_id, bias in params.logit_bias:
            self.columns.bias[self._find(token_id)] = bias
        if params.repetition_penalty != 1:
            for token_id in prompt_ids:
                self.columns.factor[self._find(token_id)] = params.repetition_penalty

    def count(self, token_id: int) -> None:
        """Note one more drawn token."""
        params = self._params
        if not params.has_penalties:
            return
        place = self._find(token_id)
        num_drawn = self._num_drawn[token_id] = self._num_drawn.get(token_id, 0) + 1
        self.columns.factor[place] = params.repetition_penalty
        self.columns.minus[place] = params.frequency_penalty * num_drawn + params.presence_penalty

    def _find(self, token_id: int) -> int:
        """Return the token's place; a new place changes nothing yet."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self.columns.token_id):
            self.columns.add(token_id)
        return place
