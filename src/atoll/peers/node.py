"""A node: what it has made, what it holds, what may be applied, and what it waits for."""

from __future__ import annotations

import numpy as np

from atoll.peers.outputs import Output
from atoll.peers.settings import Settings
from atoll.wire.peers import Key, PeerMessage
from atoll.wire.peerviews import Life, View


class Node:
    """A node of a run under strategy `peers`. Each call takes `now` (seconds of a clock that only rises) and
    gives what is to be done, in order; `deadline` says when `poll` is due at the latest.

    Payloads are the runtime's, under their keys. Iterations are numbered without ever going back: where a
    script loads an earlier checkpoint the runtime keeps the difference. Source: S0.
    """

    view: View
    life: Life  # of a joiner: incarnation 0, until it is in a view
    iteration: int  # k: that this node makes next
    applied: int  # W_i: iterations whose Apply is done (handle_applied)
    met: int  # meetings that have taken place here
    deadline: float  # when to call `poll`; infinity: no need to
    is_member: bool  # False: a joiner that is in no view yet, or one that was removed

    def __init__(
        self, life: Life, view: View, settings: Settings, rng: np.random.Generator, now: float
    ) -> None:
        """A founding member of `view`; `poll` makes it begin. Its first iteration is its `first` in the view,
        and so is its W. Raises ValueError where it is not in `view`."""
        raise NotImplementedError

    @classmethod
    def joining(
        cls,
        node: int,
        token: str,
        address: str,
        contacts: list[int],
        settings: Settings,
        rng: np.random.Generator,
        now: float,
    ) -> Node:
        """One that asks to be in the next view, at any of `contacts` (node ids), until it is: then it hands
        out ViewChanged, and FetchState. `token` is a name that no other process has."""
        raise NotImplementedError

    # -- the devices --------------------------------------------------------------------------------------

    def handle_contributed(self, now: float, iteration: int) -> list[Output]:
        """The node's own contribution is in M_i, whole; k becomes `iteration` + 1. Raises ValueError where it
        is not this node's next."""
        raise NotImplementedError

    def handle_wanted(self, now: float, iteration: int, least: int) -> list[Output]:
        """The devices wait: to compute `iteration` they need parameters of global iteration `least` or later
        (iteration - stale_max; more, where the script wants all applied). Answered by a Grant, now or later,
        and while there is none a synchronisation round is started by the rules. Said again: the latest
        counts. Raises ValueError for a `least` above `iteration`."""
        raise NotImplementedError

    def handle_applied(self, now: float, iteration: int) -> list[Output]:
        """An Apply is done: W_i is `iteration` + 1."""
        raise NotImplementedError

    def handle_met(self, now: float, number: int, at: int) -> list[Output]:
        """The node's own part in its `number`-th meeting is in M_i. `at` is the iteration whose beginning the
        script was last at: of members that joined later, those take part whose first is `at` or before.
        A joiner's first `number` is what the others' scripts were at when they came to its first iteration.
        Raises ValueError where it is not this node's next."""
        raise NotImplementedError

    def handle_finished(self, now: float) -> list[Output]:
        """The script has ended: no other iteration and no other meeting. Finished is handed out when every
        member has all that this one has made (or has gone), or `linger` seconds have passed."""
        raise NotImplementedError

    # -- the network --------------------------------------------------------------------------------------

    def handle_message(self, now: float, sender: int, message: PeerMessage) -> list[Output]:
        """A message from a node, by its id (WITNESS: the hub). One of an old view changes nothing, and is
        answered by the newest; one of another incarnation than the view's is dropped."""
        raise NotImplementedError

    def refusal(self, key: Key) -> str:
        """Why the payload of `key` is not taken now, in one line; empty where it is: ask before anything is
        allocated. What is refused for want of room is asked for again in time; iteration W_i never is."""
        raise NotImplementedError

    def handle_part(self, now: float, key: Key, since: int = 0) -> list[Output]:
        """The payload of `key` is here, whole, from whomever. `since`, of a part in a meeting: the first
        number of its node's meetings (0, but for joiners). What nobody needs comes back in a Drop."""
        raise NotImplementedError

    def handle_state(self, now: float, iteration: int) -> list[Output]:
        """A joiner: the state is here, and stands at global iteration `iteration`, which is W_i now."""
        raise NotImplementedError

    def handle_state_failed(self, now: float, source: int, reason: str) -> list[Output]:
        """A joiner: `source` does not give its state (in time)."""
        raise NotImplementedError

    # -- time ---------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Output]:
        """What is due by `now`."""
        raise NotImplementedError

    def waiting_for(self) -> list[str]:
        """Whom and what this node waits for, a line each; empty where it waits for nobody."""
        raise NotImplementedError

    def held(self) -> list[Key]:
        """The keys whose payloads must be kept, own ones too: at most `most_held(members)` of iterations,
        and two meetings' parts of each member."""
        raise NotImplementedError
