"""The labels of a request as a trie of tokens: what follows a prompt, and what is shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fminfer.core.errors import RequestError

ROOT = 0  # the node of the prompt's end


@dataclass(slots=True)
class LabelNode:
    """A token behind the prompt or behind another node's."""

    parent: int
    token_id: int
    depth: int  # tokens from the prompt's end to its own
    label: int = -1  # the label that ends here; -1: none does
    children: list[int] = field(default_factory=list)


class LabelTrie:
    """The tokens of labels. Nodes are known by their numbers; a child's is above its parent's.

    Of " red", " red wine" and " rose", whose tokens are red, red wine and ro se::

        0 prompt ── 1 red (label 0) ── 2 wine (label 1)
                 └─ 3 ro            ── 4 se (label 2)

    Args:
        spell: returns the tokens of a label behind any prompt; None: no tokens spell it.
        num_listed: of how many labels an answer tells the probability.
    """

    def __init__(
        self,
        labels: Sequence[str],
        num_listed: int,
        spell: Callable[[str], list[int] | None],
    ) -> None:
        self.labels = labels
        self.num_listed = num_listed
        self.nodes = [LabelNode(ROOT, -1, 0)]
        self.ends = [self._add_label(number, spell) for number in range(len(labels))]
        inner = [node_id for node_id, node in enumerate(self.nodes) if node.children]
        # The node that the longest label ends behind, and that label's tokens.
        self.deepest_inner = max(inner, key=lambda node_id: self.nodes[node_id].depth)
        self.num_longest = self.nodes[self.deepest_inner].depth + 1

    def list_path(self, node_id: int) -> list[int]:
        """Return the nodes from the first token to this one, both included."""
        path = list[int]()
        while node_id != ROOT:
            path.append(node_id)
            node_id = self.nodes[node_id].parent
        return path[::-1]

    def _add_label(self, label: int, spell: Callable[[str], list[int] | None]) -> int:
        ids = spell(self.labels[label])
        if not ids:
            raise RequestError(
                "unsupported_parameter",
                f"no tokens of this model spell the label {self.labels[label]!r}. "
                "Write it in another way",
                "structured_outputs",
            )
        node_id = ROOT
        for token_id in ids:
            node_id = self._find_child(node_id, token_id) or self._add_child(
                node_id, token_id
            )
        self.nodes[node_id].label = label
        return node_id

    def _find_child(self, node_id: int, token_id: int) -> int | None:
        for child in self.nodes[node_id].children:
            if self.nodes[child].token_id == token_id:
                return child
        return None

    def _add_child(self, node_id: int, token_id: int) -> int:
        parent = self.nodes[node_id]
        self.nodes.append(LabelNode(node_id, token_id, parent.depth + 1))
        parent.children.append(len(self.nodes) - 1)
        return len(self.nodes) - 1
