"""The places of the run's shards, each kept by one process or by two, and of the sites' shards."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from atoll.store.admission import Admission
from atoll.store.replicas import Half, Pair
from atoll.store.roll import Member, Roll

# So many times the patience a site's shard that keeps a journal may be away, or a site's workers.
RETURN_PATIENCES = 3.0


def _missing(index: int, starting: Mapping[int, str]) -> str:
    if index in starting:
        return f"shard {index} has not come yet: {starting[index]}"
    return f"shard {index} is not there: start `atoll server --shard {index}`"


class Shards:
    """A run's `count` shards, by index.

    Args:
        replicas: processes that hold each shard; with 2 see store/replicas.py.

    Attributes:
        members: shards that are one process, by index.
        halves: the processes of shards that are held twice, by incarnation.
        pairs: shards that are held twice, by index.
    """

    def __init__(self, roll: Roll, count: int, replicas: int) -> None:
        self._roll, self.count, self.replicas = roll, count, replicas
        self.members: dict[int, Member] = {}
        self.halves: dict[int, Member] = {}
        self.pairs = {index: Pair() for index in range(count)} if replicas > 1 else {}

    def _refusal(self, shard: int, address: str, before: int) -> str:
        """Return why no shard of this index may come; empty if one may.

        Args:
            before: the incarnation that it says it had before; 0 for none.
        """
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
        """Admit a shard that is one process.

        Args:
            before: the incarnation of its forerunner, if it was started again; 0 for none.
            token: its forerunner's token, if it was started again.
        """
        if refused := self._refusal(shard, address, before):
            return Admission(refused=refused)
        there = self.members.get(shard)
        elsewhere = there is not None and there.address != address
        # The forerunner leaves. It may have been killed before it noted the incarnation that it was given.
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
        """Admit one of a shard's two processes.

        Args:
            life: the process's own name.
            since: the incarnation that it was given in this life; 0 for none.
            before: the incarnation that its directory has from an earlier life; 0 for none.
        """
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
        """Remove a shard, or one of its two processes. Return its index, or None if it is not there."""
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
        """Return the address of a process of a shard that is held twice; empty if it is not there."""
        there = self.halves.get(incarnation)
        return there.address if there is not None else ""

    def pair_of(self, incarnation: int) -> int | None:
        """Return the index of the shard of which this is one of two processes; None if it is none."""
        there = self.halves.get(incarnation)
        return there.place if there is not None else None

    def elsewhere(self, shard: int, address: str) -> int | None:
        """Return the incarnation of a shard that is there at another address; None if none is."""
        there = self.members.get(shard)
        return there.incarnation if there is not None and there.address != address else None

    def live(self) -> list[int]:
        """Return the indices of shards that are there; one that is held twice is, while either process is."""
        return sorted([*self.members, *(index for index, pair in self.pairs.items() if pair.halves())])

    def incarnations(self) -> list[int]:
        """Return the incarnations of the present shards; of both processes if a shard has two."""
        return [member.incarnation for member in (*self.members.values(), *self.halves.values())]

    def addresses(self) -> list[str] | None:
        """Return all shards' addresses, by index, or None while one is missing.

        Shards that are held twice have addresses once each has had a standby in sync, while each has a
        primary that knows it.
        """
        if self.pairs:
            primaries = [pair.primary for pair in self.pairs.values() if pair.whole and pair.serves]
            there = [self.halves[each.incarnation].address for each in primaries if each is not None]
            return there if len(there) == self.count else None
        if len(self.members) < self.count:
            return None
        return [self.members[index].address for index in range(self.count)]

    def missing(self, starting: Mapping[int, str] = MappingProxyType({})) -> list[str]:
        """Return, in words, what is to be done for each shard because of which `addresses` returns None.

        Args:
            starting: what shards that are being started do, in words, by index.
        """
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
        """Replace all shards by these."""
        self.members, self.halves = members, halves
        self.pairs = pairs or self.pairs


class Sites:
    """The run's sites, if it has levels. Each site has a shard of its own.

    Attributes:
        workers: the number of workers of each site.
        members: the sites' shards, by site.
        ended: sites that have ended.
    """

    def __init__(self, roll: Roll, workers: Mapping[str, int]) -> None:
        self._roll, self.workers = roll, dict(workers)
        self.members: dict[str, Member] = {}
        self.ended: set[str] = set()

    def admit(self, now: float, site: str, address: str, token: str) -> Admission:
        """Admit a site's shard. It keeps its incarnation when it comes back, here or elsewhere: to the logs
        it is the same one."""
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
        """Return the patience, in seconds, with a site's shard that keeps a journal; None for the usual
        one."""
        return RETURN_PATIENCES * self._roll.patience if member.token else None

    def leave(self, incarnation: int) -> str:
        """End a site whose workers have all left. Return its name; empty if this is no site's shard."""
        member = self._roll.get(incarnation, "site")
        if member is None:
            return ""
        site = list(self.workers)[member.place]
        del self.members[site]
        self._roll.remove(member)
        self.ended.add(site)
        return site

    def address(self, site: str) -> str:
        """Return the address of a site's shard; empty while the shard is absent."""
        there = self.members.get(site)
        return there.address if there is not None else ""

    def restore(self, members: dict[str, Member], ended: set[str]) -> None:
        """Replace all sites' shards by these."""
        self.members, self.ended = members, ended
