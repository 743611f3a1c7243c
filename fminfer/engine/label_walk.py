"""The probabilities of labels behind one prompt: which branches of their trie are computed.

The first branch is the prompt. What follows it gives each label's first token its probability.
Every branch shares the prompt's blocks by the prefix cache. Branches are computed in waves, the
likeliest first, until no other can reach `MIN_SHARE` of the mass found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fminfer.engine.noise import make_step_noise
from fminfer.engine.sequence import Branch, PromptState, Sequence, TokenReport
from fminfer.text.label_trie import ROOT, LabelTrie

MIN_SHARE = 1e-6  # of the mass found, that a label must reach to be computed
# A wave has the branches that reach this share of the likeliest one. It may find mass by which
# the others are left out.
WAVE_SHARE = 0.01


@dataclass(slots=True)
class LabelAnswer:
    """What is known of all labels at the end."""

    probabilities: list[float]  # one a label; 0.0: too little, it was left out
    mass: float  # the probability of all labels together


class LabelWalk:
    """The search through the labels of one prompt.

    Args:
        prompt: whose choices are labels. It is not computed itself; its branches are.
    """

    def __init__(self, prompt: PromptState, trie: LabelTrie) -> None:
        self._prompt = prompt
        self._trie = trie
        # By node, the log of the probability of all tokens up to it; and that of its own.
        self._logprobs: dict[int, float] = {ROOT: 0.0}
        self._reports: dict[int, TokenReport] = {}
        # Nodes that have a logprob, and children without one.
        self._open = [ROOT]
        self.running: list[PromptState] = []
        # prompts of branches that were computed
        self.computed_ids: list[list[int]] = []
        self.answer: LabelAnswer | None = None

    def make_wave(self) -> list[PromptState]:
        """Return the branches to compute next; none: all labels are known.

        Those before must be computed.
        """
        logprobs = self._logprobs
        least = math.log(MIN_SHARE) + _sum_logprobs(self._list_outer_logprobs())

        left = [node_id for node_id in self._open if logprobs[node_id] > least]
        best = max((logprobs[node_id] for node_id in left), default=-math.inf)
        least_of_wave = best + math.log(WAVE_SHARE)
        wave = [node_id for node_id in left if logprobs[node_id] >= least_of_wave]

        self._open = [node_id for node_id in left if logprobs[node_id] < least_of_wave]
        self.running = [self._make_branch(node_id) for node_id in wave]

        if not wave:
            self.answer = self._make_answer()
        return [*self.running]

    def finish_branch(self, branch_prompt: PromptState) -> None:
        """Add the logprobs that a branch has given."""
        branch = branch_prompt.branch
        assert branch is not None, "no branch"
        self.running.remove(branch_prompt)
        self.computed_ids.append(branch_prompt.ids)
        nodes = self._trie.nodes
        for node_id, report in zip(
            branch.scored_nodes, branch_prompt.reports, strict=True
        ):
            parent = nodes[node_id].parent
            self._reports[node_id] = report
            self._logprobs[node_id] = self._logprobs[parent] + report.logprob
            if nodes[node_id].children and node_id not in branch.fed_nodes:
                self._open.append(node_id)

    def choose_label(self, sequence: Sequence) -> tuple[str, list[TokenReport]]:
        label = self._choose_label(sequence)
        path = self._trie.list_path(self._trie.ends[label])
        reports = [
            self._reports.get(node_id)  # none: no label has any probability
            or TokenReport(self._trie.nodes[node_id].token_id, -math.inf)
            for node_id in path
        ]
        return self._trie.labels[label], [replace(report) for report in reports]

    def _choose_label(self, sequence: Sequence) -> int:
        """Return the likeliest label, or one that is drawn: of equals the first."""
        assert self.answer is not None, "a walk that is over"
        probabilities = self.answer.probabilities
        temperature = sequence.prompt.params.temperature
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        if temperature == 0 or probabilities[best] == 0:
            return best
        weights = [
            (each / probabilities[best]) ** (1 / temperature) for each in probabilities
        ]
        noise = make_step_noise(sequence.noise_key, 0) % 2**64
        point = (noise + 0.5) / 2**64 * math.fsum(weights)
        for label, weight in enumerate(weights):
            point -= weight
            if point < 0 < weight:
                return label
        return best

    def describe_answer(self) -> dict[str, Any]:
        """Return the fields that a choice has of it, the likeliest labels first."""
        assert self.answer is not None, "a walk that is over"
        pairs = zip(self._trie.labels, self.answer.probabilities, strict=True)
        ordered = sorted(pairs, key=lambda pair: -pair[1])
        return {
            "label_probabilities": dict(ordered[: self._trie.num_listed]),
            "label_mass": self.answer.mass,
        }

    def make_longest_branch(self) -> PromptState:
        """Return the branch that needs the most blocks, which is not computed."""
        return self._make_branch(self._trie.deepest_inner)

    def _make_branch(self, node_id: int) -> PromptState:
        """Make the branch that feeds a node, and those behind it as far as there is one way."""
        nodes = self._trie.nodes
        chain = [node_id]
        while len(nodes[chain[-1]].children) == 1:
            child = nodes[chain[-1]].children[0]
            if not nodes[child].children:
                break
            chain.append(child)

        prompt = self._prompt
        path = self._trie.list_path(chain[-1])
        ids = prompt.ids + [nodes[each].token_id for each in path]
        scored = [child for each in chain for child in nodes[each].children]

        last = len(prompt.ids) - 1
        branch = Branch(
            parent=prompt,
            fed_nodes=chain,
            scored_nodes=scored,
            positions=[last + nodes[each].depth - 1 for each in scored],
            target_ids=[nodes[each].token_id for each in scored],
        )

        state = PromptState(
            prompt.owner,
            prompt.index,
            replace(prompt.encoded, ids=ids),
            source=prompt.source,
            branch=branch,
        )
        state.sequences = [Sequence(state, b"", None)]
        return state

    def _list_outer_logprobs(self) -> Iterable[float]:
        """List the known labels' logprobs that no shorter known label is the beginning of."""
        nodes = self._trie.nodes
        outer = dict[int, bool]()  # by node: no label ends at it, or before it
        for node_id in sorted(self._logprobs):
            is_outer = outer.get(nodes[node_id].parent, True)
            if is_outer and nodes[node_id].label >= 0:
                yield self._logprobs[node_id]
            outer[node_id] = is_outer and nodes[node_id].label < 0

    def _make_answer(self) -> LabelAnswer:
        logs = [self._compute_label_logprob(end) for end in self._trie.ends]
        total = _sum_logprobs(logs)
        if total == -math.inf:
            return LabelAnswer([0.0] * len(logs), 0.0)
        mass = min(1.0, math.exp(total))
        return LabelAnswer([math.exp(each - total) for each in logs], mass)

    def _compute_label_logprob(self, end: int) -> float:
        """Return the logprob of a label without what goes on into a longer one."""
        logprob = self._logprobs.get(end, -math.inf)
        if logprob == -math.inf:
            return logprob
        nodes = self._trie.nodes
        share = 0.0
        inner = [*nodes[end].children]
        while inner:
            node_id = inner.pop()
            if node_id not in self._logprobs:
                continue  # left out
            if nodes[node_id].label >= 0:
                share += math.exp(self._logprobs[node_id] - logprob)
            else:
                inner += nodes[node_id].children
        return logprob + math.log1p(-share) if share < 1 else -math.inf


def _sum_logprobs(logs: Iterable[float]) -> float:
    """Return the log of a sum whose parts are given by their logs; -inf: it is 0."""
    parts = [*logs]
    most = max(parts, default=-math.inf)
    if most == -math.inf:
        return most
    return most + math.log(math.fsum(math.exp(each - most) for each in parts))
