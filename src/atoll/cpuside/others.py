"""The other nodes of a run, and the hub as their witness."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.errors import DeadlineError, GivenUpError, UserError
from atoll.cpuside.entering import Entering
from atoll.cpuside.network import Network
from atoll.cpuside.telling import Telling
from atoll.cpuside.witnesslink import WitnessLink
from atoll.net.endpoint import NOTHING_LISTENS, Client
from atoll.wire import device as d
from atoll.wire.nodes import Stands
from atoll.wire.peers import WITNESS, PeerMessage
from atoll.wire.peerviews import Accepted, Outbid, Promised, View, ViewDecided, ViewMember

_OF_VIEWS = (Promised, Accepted, Outbid, ViewDecided)  # messages of a witness
_NOBODY_SECONDS = 20.0  # longest wait for any of the nodes known from an earlier start to listen


class Others:
    """The nodes that node `begin.node` knows, and the connections to them.

    Attributes:
        network: the connections to nodes.
        nodes: the known nodes, without this one.
        finished: numbers of nodes that have reached the end of their scripts.
    """

    def __init__(self, begin: d.Begin, telling: Telling) -> None:
        self._begin, self._telling = begin, telling
        self.network = Network(begin, telling.told)
        self.nodes: list[d.NodeAt] = []
        self.finished: set[int] = set()
        self._known_from = ""  # the folder with the nodes' addresses, if nobody has introduced them
        self._witness = self._open_witness() if begin.hub else None

    def _open_witness(self) -> WitnessLink:
        begin, network = self._begin, self.network
        return WitnessLink(
            begin.hub,
            network.keys,
            run=begin.run,
            node=begin.node,
            incarnation=begin.incarnation,
            token=network.life,
        )

    @property
    def clients(self) -> list[Client]:
        """Connections to watch in addition to those of the nodes."""
        return [] if self._witness is None else [self._witness.client]

    def introduce(self, message: d.Introduce) -> None:
        """Take the nodes of the run from the worker's message, and connect to them."""
        self.nodes = [each for each in message.nodes if each.node != self._begin.node]
        self._known_from = message.known_from
        for each in self.nodes:
            self.network.link_to(each)

    # -- messages -----------------------------------------------------------------------------------------

    def say(self, to: int, message: PeerMessage) -> None:
        """Send a message of the decisions to a node, or to the hub (WITNESS)."""
        if to != WITNESS:
            self.network.say(to, message)
        elif self._witness is not None:
            self._witness.say(message)

    def say_stands(self, view: View, stands: Stands) -> None:
        """Send the digest of the global parameters after an iteration to the other members."""
        for each in view.members:
            if each.life.node != self._begin.node:
                self.network.send(each.life.node, stands)

    def hear_witness(self) -> Sequence[PeerMessage]:
        """Return the hub's messages about views; reports a hub that refuses, and forgets it."""
        witness = self._witness
        if witness is None:
            return []
        messages = [message for message in witness.take() if isinstance(message, _OF_VIEWS)]
        if witness.refusal:
            self._telling.told("witness", "", f"{witness.refusal}: it does not vote in views of two nodes")
            witness.close()
            self._witness = None
        return messages

    # -- members ------------------------------------------------------------------------------------------

    def see(self, old: View | None, view: View) -> None:
        """Adopt a view after `old`: connect to its members, and drop chunks for nodes that left."""
        for each in view.members:
            if each.life.node != self._begin.node:
                self.network.link_to(d.NodeAt(each.life.node, self._process_of(each), each.address))
        here = {each.life.node for each in view.members}
        for gone in [] if old is None else [each.life.node for each in old.members]:
            if gone not in here:
                self.network.drop_unsent(gone)

    def _process_of(self, member: ViewMember) -> int:
        """Return the incarnation by which the network knows a member's process; 0 if unknown.

        A view may give a process that is already connected a new incarnation: the connections stay.
        """
        known = {each.node: each for each in self.network.nodes}.get(member.life.node)
        return known.incarnation if known is not None and known.address == member.address else 0

    @property
    def known(self) -> list[d.NodeAt]:
        """All known nodes, with this one last."""
        network = self.network
        return [*network.nodes, d.NodeAt(network.node, network.incarnation, network.address)]

    def removed_by(self, view: View) -> None:
        """Keep the members of the view that removed this node, to ask them, and drop all unsent chunks."""
        members = [
            d.NodeAt(each.life.node, 0, each.address)
            for each in view.members
            if each.life.node != self._begin.node
        ]
        self.nodes = members or self.nodes
        for each in self.network.nodes:
            self.network.drop_unsent(each.node)

    # -- checks -------------------------------------------------------------------------------------------

    def check_refused(self, *, late: bool) -> None:
        """Raise UserError with another node's reason to refuse this one; for use before Ready.

        A `late` node raises only once all known nodes have refused it.
        """
        refusals = self.network.refusals([each.node for each in self.nodes])
        if refusals and (not late or len(refusals) == len(self.nodes)):
            raise UserError(f"node {self._begin.node}: {refusals[0]}")

    def check_somebody_is_there(self, entering: Entering) -> None:
        """Raise an error if no node can let this one in any more.

        GivenUpError if all others have finished, DeadlineError if the time is up or nobody listens.
        """
        node, network = self._begin.node, self.network
        others = [each.node for each in self.nodes]
        if entering.first is None and others and self.finished.issuperset(others):
            raise GivenUpError(f"node {node} cannot come in: {_have_finished(others)}")
        waited = f"node {node} waited {entering.waited:.1f} s for {entering.lacks()}"
        limit, timeout = "", f"deadline sync.timeout, {entering.timeout:g} s"
        nobody = self._known_from and not network.has_answered
        if entering.waited > entering.timeout:
            limit = timeout
        elif nobody and entering.waited > _NOBODY_SECONDS and all(map(network.is_deaf, others)):
            limit = f"{NOTHING_LISTENS}; {timeout}"
        if not limit:
            return
        where = f"none of the nodes known from {self._known_from} answers; if the run is over, start in a "
        where += "new run.directory, and go on with session.resume(folder)"
        why = "; ".join([waited, *([where] if nobody else []), *network.refusals(others)])
        raise DeadlineError(f"{why} ({limit})")

    def check_not_finished(self, node: int, gone: list[int]) -> None:
        """Raise GivenUpError if all nodes in `gone`, for which this node waits, have finished."""
        if gone and self.finished.issuperset(gone):
            raise GivenUpError(f"node {node} is behind: {_have_finished(gone)}")

    def close(self) -> None:
        self.network.close()
        if self._witness is not None:
            self._witness.close()


def _have_finished(nodes: list[int]) -> str:
    names = " and ".join(f"node {node}" for node in nodes)
    return f"the others have finished ({names}), so what it waits for does not come any more"
