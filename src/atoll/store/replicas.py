"""Which of a shard's two processes is the primary, and which its standby: the hub's decisions on one shard.

The primary acknowledges nothing that its standby does not hold, once that is in sync; so a standby that is in
sync can take its place at any moment, and one that is not never does. Whoever may hold less than was
acknowledged (who was given up, or began anew) is a standby at most, and takes the primary's state first.
"""

from __future__ import annotations

from typing import Literal

import msgspec

REPLICAS = 2  # the most processes of a shard

Role = Literal["primary", "standby", "third"]


class Half(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of a shard's two processes. `life` is a name of the process alone, `token` its directory's ("": it
    has none)."""

    incarnation: int
    life: str = ""
    token: str = ""


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    """A shard's primary and standby.

    `synced`: the standby holds all that the primary acknowledges. `serves`: the primary knows that it is one.
    `whole`: there was a standby in sync, and so the run may begin. `term` counts what was decided. While
    there is no primary, `keepers` are those who were there last and held all that was acknowledged.
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
        """The half of this life, where it is there."""
        return next((half for half in self.halves() if half.life == life), None)

    def halves(self) -> list[Half]:
        """Return the present halves, the primary first."""
        return [half for half in (self.primary, self.standby) if half is not None]

    def partner_of(self, incarnation: int) -> Half | None:
        """The other one, where both are there."""
        others = [half for half in self.halves() if half.incarnation != incarnation]
        return others[0] if len(others) < len(self.halves()) and others else None

    def refusal(self, since: int) -> str:
        """Why a process may not come that was here as `since`, and was given up; empty where it may."""
        if not since or (self.primary is None and any(half.incarnation == since for half in self.keepers)):
            return ""
        return "it was given up, and may lack what was acknowledged since"

    def role_for(self, token: str, since: int, goes_on: bool) -> Role:
        """Return the role that a process would get on arrival. `goes_on`: its directory holds a journal to
        go on from."""
        if not self.begun:
            return "primary"
        if self.primary is None:
            for half in self.keepers:
                if half.incarnation == since or (goes_on and token and half.token == token):
                    return "primary"
        return "standby" if self.standby is None else "third"

    def come(self, half: Half, since: int, goes_on: bool) -> Role:
        """A process comes, with a new incarnation, and gets what `role_for` says; "third" changes nothing."""
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
        """The primary says that it knows; gives whether that is new."""
        if self.serves or self.primary is None or self.primary.incarnation != incarnation:
            return False
        self.serves = True
        self.term += 1
        return True

    def sync(self, primary: int, standby: int) -> bool:
        """The primary says that this standby holds all from now on; gives whether that is new."""
        if self.synced or self.primary is None or self.standby is None:
            return False
        if (self.primary.incarnation, self.standby.incarnation) != (primary, standby):
            return False
        self.synced = self.whole = True
        self.term += 1
        return True

    def die(self, incarnation: int) -> bool:
        """One of them is no more; gives whether it was there. `promotable` says what may follow."""
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
        """The standby, where the primary is gone and it can take its place."""
        return self.standby if self.primary is None and self.synced else None

    def promote(self) -> Half | None:
        """Let the standby be the primary, if it can: from then on nobody else holds what is acknowledged."""
        half = self.promotable()
        if half is not None:
            self.primary, self.standby, self.synced, self.serves = half, None, False, False
            self.keepers = []
            self.term += 1
        return half
