"""The hub's decisions on one shard that two processes hold: which of them is the primary, and which the
standby.

Once its standby is in sync, the primary acknowledges nothing that the standby does not hold. So a standby in
sync can take the primary's place at any moment, and one that is not in sync never does. A process that may
hold less than was acknowledged (it was given up, or began anew) becomes a standby at most, and takes the
primary's state first.
"""

from __future__ import annotations

from typing import Literal

import msgspec

REPLICAS = 2  # most processes of a shard

Role = Literal["primary", "standby", "third"]


class Half(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of a shard's two processes.

    Attributes:
        life: the process's own name.
        token: its directory's name; empty if it has none.
    """

    incarnation: int
    life: str = ""
    token: str = ""


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    """A shard's primary and standby.

    Attributes:
        synced: True if the standby holds all that the primary acknowledges.
        serves: True if the primary knows that it is one.
        begun: True once a process has come.
        whole: True once there was a standby in sync, so that the run may begin.
        term: counts decisions.
        keepers: while there is no primary, the last processes that held all that was acknowledged.
    """

    primary: Half | None = None
    standby: Half | None = None
    synced: bool = False
    serves: bool = False
    begun: bool = False
    whole: bool = False
    term: int = 0
    keepers: list[Half] = []

    def known(self, life: str) -> Half | None:
        """Return the process of this life, if it is there."""
        return next((half for half in self.halves() if half.life == life), None)

    def halves(self) -> list[Half]:
        """Return the present processes, the primary first."""
        return [half for half in (self.primary, self.standby) if half is not None]

    def partner_of(self, incarnation: int) -> Half | None:
        """Return the other process, if both are there."""
        others = [half for half in self.halves() if half.incarnation != incarnation]
        return others[0] if len(others) < len(self.halves()) and others else None

    def refusal(self, since: int) -> str:
        """Return why a process that was given up as incarnation `since` may not come; empty if it may."""
        if not since or (self.primary is None and any(half.incarnation == since for half in self.keepers)):
            return ""
        return "it was given up, and may lack what was acknowledged since"

    def role_for(self, token: str, since: int, goes_on: bool) -> Role:
        """Return the role that a process would get on arrival.

        Args:
            since: the incarnation that it had in this life; 0 for none.
            goes_on: True if its directory holds a journal to go on from.
        """
        if not self.begun:
            return "primary"
        if self.primary is None:
            for half in self.keepers:
                if half.incarnation == since or (goes_on and token and half.token == token):
                    return "primary"
        return "standby" if self.standby is None else "third"

    def come(self, half: Half, since: int, goes_on: bool) -> Role:
        """Take in a process, with a new incarnation, in the role of `role_for`. "third" changes nothing."""
        role = self.role_for(half.token, since, goes_on)
        if role == "third":
            return role
        if role == "primary":
            self.primary, self.serves, self.synced, self.begun = half, False, False, True
            self.keepers = []
        else:
            self.standby, self.synced = half, False
        self.term += 1
        return role

    def serve(self, incarnation: int) -> bool:
        """Note that the primary knows that it is one. False if that is not new."""
        if self.serves or self.primary is None or self.primary.incarnation != incarnation:
            return False
        self.serves = True
        self.term += 1
        return True

    def sync(self, primary: int, standby: int) -> bool:
        """Note that this standby holds everything from now on, as the primary says. False if that is not
        new."""
        if self.synced or self.primary is None or self.standby is None:
            return False
        if (self.primary.incarnation, self.standby.incarnation) != (primary, standby):
            return False
        self.synced = self.whole = True
        self.term += 1
        return True

    def die(self, incarnation: int) -> bool:
        """Remove a process. False if it was not there. `promotable` says what may follow."""
        if self.primary is not None and self.primary.incarnation == incarnation:
            self.keepers = self.halves() if self.synced else [self.primary]
            self.primary, self.serves = None, False
        elif self.standby is not None and self.standby.incarnation == incarnation:
            self.standby, self.synced = None, False
        else:
            return False
        self.term += 1
        return True

    def promotable(self) -> Half | None:
        """Return the standby, if the primary is gone and the standby can take its place."""
        return self.standby if self.primary is None and self.synced else None

    def promote(self) -> Half | None:
        """Make the standby the primary, if it can be. From then on nobody else holds what is acknowledged."""
        half = self.promotable()
        if half is not None:
            self.primary, self.standby, self.synced, self.serves = half, None, False, False
            self.keepers = []
            self.term += 1
        return half
