"""The members of groups that wait for answers of the log."""

from __future__ import annotations

from atoll.store.outcomes import Request

_MOST = 16  # unanswered requests kept of a worker; the oldest go first


class Askers:
    """The members of each worker that have sent a request to the log, until the log answers.

    The members of a group have connections of their own, between which messages keep no order: the leader's
    commit may come after another member's part in a meeting. Two members may send one request, after their
    ring broke. So an answer goes to all members that asked for it, whoever has spoken since.
    """

    def __init__(self) -> None:
        self._members: dict[int, dict[tuple[int, Request], set[int]]] = {}  # by worker

    def add(self, worker: int, incarnation: int, member: int, request: Request) -> None:
        """Note that a member has sent this request, for this incarnation of its worker."""
        asked = self._members.setdefault(worker, {})
        asked.setdefault((incarnation, request), set()).add(member)
        if len(asked) > _MOST:
            del asked[next(iter(asked))]

    def take(self, worker: int, incarnation: int, request: Request) -> list[int]:
        """Return the members that have sent this request, in their order, and forget them."""
        return sorted(self._members.get(worker, {}).pop((incarnation, request), ()))

    def forget(self, worker: int) -> None:
        """Forget the requests of a worker none of whose members is connected."""
        self._members.pop(worker, None)
