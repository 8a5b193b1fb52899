"""The synchronisation round, steps a1 to a6: starting, taking part, and ending."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from atoll.wire.peers import RoundId
from atoll.wire.peerviews import Report

State: TypeAlias = Literal["idle", "waiting", "looking", "turned", "asking", "backing"]
Event: TypeAlias = Literal[
    "wanted", "free", "taken", "freed", "answered", "refused", "late", "lower", "due", "eased", "reset"
]

# A node's own round: the next state after each event in a state, and why. Other events change nothing.
TRANSITIONS: dict[tuple[State, Event], tuple[State, str]] = {
    ("idle", "wanted"): ("waiting", "4: M_i is no newer; what is on its way has its usual time"),
    ("waiting", "due"): ("looking", "4: W has not risen in that time"),
    ("looking", "free"): ("asking", "a2: V is false, so it starts one"),
    ("looking", "taken"): ("turned", "a2: V is true, so it waits for the end of that round"),
    ("turned", "freed"): ("looking", "a2: the other's round is over"),
    ("asking", "answered"): ("waiting", "a6: all have answered"),
    ("asking", "refused"): ("backing", "a5: one that takes part in another's has refused"),
    ("asking", "late"): ("backing", "a3: not all have answered by the deadline"),
    ("asking", "lower"): ("turned", "a4: two starters have met, and the other's is the lower"),
    ("backing", "due"): ("looking", "a5: T is over: begin again at a2"),
    ("turned", "eased"): ("idle", "4: M_i is newer: no round is needed"),
    ("asking", "eased"): ("idle", "4: M_i is newer: no round is needed"),
    ("backing", "eased"): ("idle", "4: M_i is newer: no round is needed"),
    ("waiting", "eased"): ("idle", "4: M_i is newer"),
    ("looking", "eased"): ("idle", "4: M_i is newer"),
    ("turned", "reset"): ("idle", "the view has changed"),
    ("asking", "reset"): ("idle", "the view has changed"),
    ("backing", "reset"): ("idle", "the view has changed"),
    ("waiting", "reset"): ("idle", "the view has changed"),
    ("looking", "reset"): ("idle", "the view has changed"),
}


@dataclass
class Rounds:
    """A node's own round, and its flag V_i: `flag` is another node's round in which it takes part.

    Timers: `until` ends the states "asking" (the round is late), "backing" and "waiting" (the round is due);
    `flag_until` gives up another node's round that its starter has not ended.
    """

    node: int
    state: State = "idle"
    round: RoundId | None = None  # its own, while asking
    began: float = 0.0
    answers: dict[int, Report] = field(default_factory=dict)  # to it, by node
    until: float = math.inf
    flag: RoundId | None = None
    flag_until: float = math.inf
    started: int = 0  # rounds of its own
    over: dict[int, int] = field(default_factory=dict)  # by starter, the latest that it has ended

    def go(self, event: Event, until: float = math.inf) -> str:
        """Handle an event of the node's own round; return why the state changed, or an empty string if it
        did not."""
        if (self.state, event) not in TRANSITIONS:
            return ""
        self.state, why = TRANSITIONS[self.state, event]
        self.until = until
        if self.state != "asking":
            self.answers.clear()
        return why

    def start(self, now: float, iteration: int, until: float) -> RoundId:
        """Start a round (a2, a3): V is false, and a round is needed."""
        self.go("free", until)
        self.started += 1
        self.began = now
        self.round = RoundId(iteration, self.node, self.started)
        return self.round

    def stop(self) -> RoundId | None:
        """Remove and return the node's own round."""
        stopped, self.round = self.round, None
        return stopped

    def take_part(self, asked: RoundId, until: float) -> bool:
        """Test and set V_i, with a timer (a1); return whether to answer. A repeated request is answered
        again and does not restart the timer."""
        if asked.number <= self.over.get(asked.node, 0):
            return False
        flag = self.flag
        if flag is None or (flag.node == asked.node and flag.number < asked.number):
            self.flag, self.flag_until = asked, until
        return self.flag == asked

    def clear(self, ended: RoundId | None) -> bool:
        """Make V_i false after END, ABORT, or (None) its timer; return whether V_i was set for this round."""
        if ended is not None:
            self.over[ended.node] = max(ended.number, self.over.get(ended.node, 0))
        if self.flag is None or (ended is not None and self.flag != ended):
            return False
        self.flag, self.flag_until = None, math.inf
        return True
