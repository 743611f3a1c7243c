"""What a step of this run takes: a cost of its own, one a prompt token and one a drawn token.

They are fitted to the steps so far, by sums alone. A run's first steps are often all alike and
cannot tell the three apart. So the fit begins at costs that are usual and leaves them as the steps
say otherwise.
"""

from __future__ import annotations

Costs = tuple[float, float, float]

# A step takes about as long as so many tokens of it: its weights are read, its kernels started.
# The CPU's figure is that of llamas of 12 × 768. The GPU's is assumed.
STEP_TOKENS = {"cpu": 40.0, "cuda": 300.0}
# How firm the usual costs are, as about so many steps would make them.
FIRM_STEP, FIRM_PROMPT, FIRM_DRAW = 10.0, 1.0, 20.0


class StepCosts:
    """Costs that are learned from the steps of a run so far.

    Args:
        device_type: cpu or cuda.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._step_tokens = STEP_TOKENS[device_type]
        self._is_warm = False
        self._elapsed_s = 0.0
        self._num_units = 0.0  # what the usual costs count
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3

    def add(self, seconds: float, num_reads: float, num_fed: float, num_drawn: float) -> None:
        """Take note of steps, all together.

        Args:
            num_reads: of steps, and of as many bytes of KV cache as a step takes to read.
        """
        counts = (num_reads, num_fed, num_drawn)
        units = self._step_tokens * num_reads + num_fed + num_drawn
        if not units:
            return
        if not self._is_warm:  # the first step waited for the first lines, and for memory
            self._is_warm = True
            return
        self._elapsed_s += seconds
        self._num_units += units
        # With these weights the fitted total is the measured one.
        for row, count in zip(self._products, counts, strict=True):
            for place, other in enumerate(counts):
                row[place] += count * other / units
        for place, count in enumerate(counts):
            self._targets[place] += count * seconds / units

    def fit(self) -> Costs | None:
        """Return the seconds of a step, of a prompt token and of a drawn one; None: not known."""
        if not self._num_units or self._elapsed_s <= 0:
            return None
        usual = self._elapsed_s / self._num_units
        start = (usual * self._step_tokens, usual, usual)
        matrix = [[*row] for row in self._products]
        rest = [
            target - sum(a * b for a, b in zip(row, start, strict=True))
            for row, target in zip(matrix, self._targets, strict=True)
        ]
        # A drawn token takes about as long as a prompt token beside it.
        matrix[0][0] += FIRM_STEP / self._step_tokens**2
        matrix[1][1] += FIRM_PROMPT + FIRM_DRAW
        matrix[2][2] += FIRM_DRAW
        matrix[1][2] -= FIRM_DRAW
        matrix[2][1] -= FIRM_DRAW
        change = _solve(matrix, rest)
        step, prompt, draw = (max(0.0, a + b) for a, b in zip(start, change, strict=True))
        return self._scaled(step, prompt, draw)

    def _scaled(self, step: float, prompt: float, draw: float) -> Costs:
        """Return costs with which the steps so far take as long as they did."""
        # So many of the first equation and one of each other are the sum over all steps.
        weights = (self._step_tokens, 1.0, 1.0)
        costs = (step, prompt, draw)
        fitted = sum(
            weight * sum(a * b for a, b in zip(row, costs, strict=True))
            for weight, row in zip(weights, self._products, strict=True)
        )
        scale = self._elapsed_s / fitted if fitted > 0 else 1.0
        return step * scale, prompt * scale, draw * scale


def _solve(matrix: list[list[float]], targets: list[float]) -> list[float]:
    """Solve three equations, which are positive definite, in place."""
    for place in range(3):
        for below in range(place + 1, 3):
            times = matrix[below][place] / matrix[place][place]
            for column in range(place, 3):
                matrix[below][column] -= times * matrix[place][column]
            targets[below] -= times * targets[place]
    found = [0.0] * 3
    for place in (2, 1, 0):
        known = sum(matrix[place][column] * found[column] for column in range(place + 1, 3))
        found[place] = (targets[place] - known) / matrix[place][place]
    return found
