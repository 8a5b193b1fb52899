"""The places of the run's shards, each kept by one process or by two, and of the sites' shards."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from atoll.store.admission import Admission
from atoll.store.replicas import Half, Pair
from atoll.store.roll import Member, Roll

# Times the patience: for a site's shard that may be started again to come back, or for a site's workers.
RETURN_PATIENCES = 3.0


def _missing(index: int, starting: Mapping[int, str]) -> str:
    if index in starting:
        return f"shard {index} has not come yet: {starting[index]}"
    return f"shard {index} is not there: start `atoll server --shard {index}`"


class Shards:
    """`count` shards by index. With `replicas` 2 each is held by two processes (store/replicas.py)."""

    def __init__(self, roll: Roll, count: int, replicas: int) -> None:
        self._roll, self.count, self.replicas = roll, count, replicas
        self.members: dict[int, Member] = {}  # by index
        self.halves: dict[int, Member] = {}  # of all pairs, by incarnation
        self.pairs = {index: Pair() for index in range(count)} if replicas > 1 else {}

    def _refusal(self, shard: int, address: str, before: int) -> str:
        """Why no shard of this index, which says that it was `before`, may come; empty where one may."""
        if not self.count:
            return "the run has no shards: its hub was started with --shards 0"
        if not 0 <= shard < self.count:
            return f"there is no shard {shard}: the run has {self.count}, from 0"
        if not address:
            return f"shard {shard} does not say where it is"
        if before > self._roll.newest:
            return (
                f"shard {shard} goes on from a run that this hub knows nothing of, though it has its "
                "name: remove what is in its --directory, or give it another one"
            )
        return ""

    def admit(self, now: float, shard: int, address: str, before: int, token: str) -> Admission:
        """A shard says where it is; one that was started again has its forerunner's incarnation `before`, or
        its token."""
        if refused := self._refusal(shard, address, before):
            return Admission(refused=refused)
        there = self.members.get(shard)
        elsewhere = there is not None and there.address != address
        # Its forerunner is to go; it may have been killed before it noted which incarnation it was given.
        again = (
            there is not None and elsewhere and (before == there.incarnation or there.token == token != "")
        )
        if there is not None and elsewhere and not again:
            return Admission(refused=f"shard {shard} is there already, at {there.address}")
        if there is None or again:
            if there is not None:
                self._roll.remove(there)
            there = self.members[shard] = self._roll.new(now, "shard", shard, address, token)
        self._roll.hear(now, there.incarnation)
        how = "was started again, and " if before or again else ""
        return Admission(incarnation=there.incarnation, reason=f"shard {shard} {how}is at {address}")

    def admit_half(
        self,
        now: float,
        shard: int,
        address: str,
        token: str = "",
        life: str = "",
        since: int = 0,
        before: int = 0,
    ) -> Admission:
        """One of a shard's two processes says Hello; `since` and `before` are what it was given in this life,
        and before its directory was left."""
        if refused := self._refusal(shard, address and life, max(before, since)):
            return Admission(refused=refused)
        pair = self.pairs[shard]
        known = pair.known(life)
        if known is not None:
            self._roll.hear(now, known.incarnation)
            return Admission(incarnation=known.incarnation, reason="it is there already")
        refused = pair.refusal(since)
        if refused:
            return Admission(
                refused=f"shard {shard}, incarnation {since}: {refused}, so it cannot go on; start it again, "
                "and it is the standby"
            )
        if pair.role_for(token, since, before > 0) == "third":
            return Admission(refused=f"shard {shard} has two processes already", waits=True)
        member = self._roll.new(now, "half", shard, address, token)
        role = pair.come(Half(member.incarnation, life, token), since, before > 0)
        self.halves[member.incarnation] = member
        return Admission(incarnation=member.incarnation, reason=f"shard {shard}'s {role} is at {address}")

    def leave(self, incarnation: int) -> int | None:
        """A shard ends, or one of its two processes; gives its index, or None where it is not there."""
        member = self._roll.get(incarnation, "shard", "half")
        if member is None:
            return None
        if member.kind == "half":
            self.pairs[member.place].die(incarnation)
            del self.halves[incarnation]
        else:
            del self.members[member.place]
        self._roll.remove(member)
        return member.place

    def half_at(self, incarnation: int) -> str:
        """The address of a process of a shard that is held twice; empty where it is not there."""
        there = self.halves.get(incarnation)
        return there.address if there is not None else ""

    def pair_of(self, incarnation: int) -> int | None:
        """The shard that this is a process of, where shards are held twice."""
        there = self.halves.get(incarnation)
        return there.place if there is not None else None

    def elsewhere(self, shard: int, address: str) -> int | None:
        """The incarnation of a shard that is there, at another address than this one."""
        there = self.members.get(shard)
        return there.incarnation if there is not None and there.address != address else None

    def live(self) -> list[int]:
        """The shards that are there, by index; one that is held twice while either process is."""
        return sorted([*self.members, *(index for index, pair in self.pairs.items() if pair.halves())])

    def incarnations(self) -> list[int]:
        """Incarnations of the present shards, of both processes where a shard has two."""
        return [member.incarnation for member in (*self.members.values(), *self.halves.values())]

    def addresses(self) -> list[str] | None:
        """All shards' addresses, by index, once all are there; where they are held twice, once each has had a
        standby in sync, and while each has a primary that knows it."""
        if self.pairs:
            primaries = [pair.primary for pair in self.pairs.values() if pair.whole and pair.serves]
            there = [self.halves[each.incarnation].address for each in primaries if each is not None]
            return there if len(there) == self.count else None
        if len(self.members) < self.count:
            return None
        return [self.members[index].address for index in range(self.count)]

    def missing(self, starting: Mapping[int, str] = MappingProxyType({})) -> list[str]:
        """Why `addresses` gives none: for each shard that is not there what is to be done, in words; of those
        that are being started `starting` says what they do."""
        if not self.pairs:
            absent = [index for index in range(self.count) if index not in self.members]
            return [_missing(index, starting) for index in absent]
        words = []
        for index, pair in self.pairs.items():
            again = f"`atoll server --shard {index}`"
            if pair.begun and pair.primary is None:
                words.append(
                    f"shard {index} has no primary, and nobody else holds all that was acknowledged: start "
                    "the one that served last again, in its --directory"
                )
            elif not pair.whole:
                if index in starting:
                    words.append(_missing(index, starting))
                    continue
                missing = {
                    0: f"is not there: start {again} twice",
                    1: f"has one of its two processes: start {again} once more",
                }
                there = len(pair.halves())
                words.append(f"shard {index} {missing.get(there, 'has a standby that is not in sync yet')}")
        return words

    def restore(self, members: dict[int, Member], halves: dict[int, Member], pairs: dict[int, Pair]) -> None:
        """Know these alone."""
        self.members, self.halves = members, halves
        self.pairs = pairs or self.pairs


class Sites:
    """The run's sites, where it has levels: `workers` has the number of workers of each. Each site has a
    shard of its own."""

    def __init__(self, roll: Roll, workers: Mapping[str, int]) -> None:
        self._roll, self.workers = roll, dict(workers)
        self.members: dict[str, Member] = {}  # the sites' shards, by site
        self.ended: set[str] = set()

    def admit(self, now: float, site: str, address: str, token: str) -> Admission:
        """A site's shard says where it is. It keeps its incarnation when it comes back, here or elsewhere: to
        the logs it is the same one."""
        if not self.workers:
            return Admission(refused="the run has no sites; start the hub with --site NAME=WORKERS for each")
        if site not in self.workers:
            return Admission(refused=f"there is no site {site!r}: the run has {', '.join(self.workers)}")
        if site in self.ended:
            return Admission(refused=f"site {site!r} has ended, and cannot come back")
        if not address:
            return Admission(refused=f"the shard of site {site!r} does not say where it is")
        there = self.members.get(site)
        moved = there is not None and there.address != address
        if there is not None and moved and not (token and there.token == token):
            return Admission(refused=f"site {site!r} has a shard already, at {there.address}")
        index = list(self.workers).index(site)
        if there is None:
            there = Member("site", index, self._roll.new_incarnation(), address, token)
            self.members[site] = self._roll.enter(now, there, self.patience(there))
        there.address = address
        self._roll.hear(now, there.incarnation)
        how = "was started again, and " if moved else ""
        return Admission(index, there.incarnation, reason=f"its shard {how}is at {address}")

    def patience(self, member: Member) -> float | None:
        """A site's shard that keeps a journal is waited for while it is started again."""
        return RETURN_PATIENCES * self._roll.patience if member.token else None

    def leave(self, incarnation: int) -> str:
        """All workers of a site have left; gives its name, or nothing where this is no site's shard."""
        member = self._roll.get(incarnation, "site")
        if member is None:
            return ""
        site = list(self.workers)[member.place]
        del self.members[site]
        self._roll.remove(member)
        self.ended.add(site)
        return site

    def address(self, site: str) -> str:
        """Address of a site's shard; empty while the shard is absent."""
        there = self.members.get(site)
        return there.address if there is not None else ""

    def restore(self, members: dict[str, Member], ended: set[str]) -> None:
        """Know these alone."""
        self.members, self.ended = members, ended
