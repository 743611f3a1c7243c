"""Whether a run may write an output: its claim, from the moment that it takes it until it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fminfer.core.errors import InUseError, OutputError
from fminfer.files.claims import Claim, Claims, look_at, remove_dead
from fminfer.files.journal import journal_path
from fminfer.files.ordered_output import draft_path


class Hold:
    """One output, which this run may write while it holds the claim.

    Args:
        claims: from which the output's is taken when it is needed.
        claim: of the output, if it is this run's already.
    """

    def __init__(self, output: Path, claims: Claims, claim: Claim | None = None) -> None:
        self.claim = claim
        self.is_lost = False  # to another run, or given up: nothing more is written
        self._output = output
        self._claims = claims

    def check_free(self) -> None:
        """See that no other run has the output.

        Raises:
            InUseError: one has.
        """
        if self.claim is None and any(not claim.is_dead for claim in look_at(self._output)):
            raise self._in_use()

    def take(self) -> None:
        """Claim the output, if it is not claimed yet.

        Raises:
            InUseError: another run has it.
            OutputError: the folder cannot be written.
        """
        self.claim = self.claim or self._claims.take(self._output)
        if self.claim is None:
            raise self._in_use()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Claim the output for a moment; a claim that was there before stays."""
        was_held = self.claim is not None
        self.take()
        try:
            yield
        finally:
            if not was_held:
                self.release()

    def remove_dead(self) -> None:
        """Remove the claims of processes that are gone, if the output is this run's now.

        Do so once its journal is open: whoever slept with the journal open is to find its claim.
        """
        if self.claim is not None:
            remove_dead(self._output)

    def holds(self) -> bool:
        """Tell whether the claim is still this run's, which may have slept for long."""
        return self.claim is None or self.claim.holds()

    def lose(self) -> None:
        """Write no more; the output is another run's, or free for one."""
        self.is_lost = True
        self.release()

    def release(self) -> None:
        """Give the claim back."""
        if self.claim is not None:
            self.claim.release()
            self.claim = None

    def settle(self) -> None:
        """Leave nothing beside an output that is complete: no claim, and no draft of a journal.

        A run that was killed may have left them. Those of a living run stay.
        """
        draft = draft_path(journal_path(self._output))
        with suppress(InUseError, OutputError, OSError):  # it may be read only
            if draft.exists():
                self.take()  # so that no other run is writing it
                draft.unlink(missing_ok=True)
        remove_dead(self._output)
        self.release()

    def _in_use(self) -> InUseError:
        return InUseError(
            f"{self._output} is another run's to answer at the moment. Wait for it or end it; its "
            "finished rows are kept"
        )
