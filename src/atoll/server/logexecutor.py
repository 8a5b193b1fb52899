"""Steps of a shard's model: log entries are carried out chunk by chunk, and each finished chunk is sent at
once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.core.points import reach
from atoll.server.checks import no_share
from atoll.server.common import Common
from atoll.server.heard import NOT_SET_UP, Handler, Heard
from atoll.server.model import Model
from atoll.store.entries import AnyEntry
from atoll.store.pulls import AnyPull, PullRequest
from atoll.wire import messages
from atoll.wire.messages import Hello


class LogExecutor:
    """Carries out log entries on the model, and answers pulls."""

    def __init__(self, common: Common) -> None:
        self._peers, self._kept, self._training = common.peers, common.kept, common.training
        self._active: list[PullRequest] = []  # pulls that get each chunk as it finishes
        self._done: list[int] | None = None  # finished chunks of the entry being applied
        pull = Handler(self.handle_pull)
        self.handlers: dict[type, Handler] = {
            messages.Pull: pull,
            messages.PullMean: pull,
            messages.PullState: Handler(self._handle_pull_state),
        }

    @property
    def _model(self) -> Model:
        return self._training.there

    def apply(self, entry: AnyEntry, meanwhile: Callable[[], None]) -> None:
        """Carry out an entry and send each finished chunk to those whose pulls the entry makes ready.
        `meanwhile` is called between two chunks to serve others."""
        model = self._model
        if not self._kept.replaying:
            reach("shard.logged", getattr(entry, "iteration", -1))
        actions = model.state.handle_entry(entry)
        self._active = model.pulls.take_ready()
        done = self._done = []

        def finish(chunk: int) -> None:
            """Send a finished chunk to all active pulls, then let `meanwhile` serve others."""
            done.append(chunk)
            for asked in self._active:
                self._answer(asked, chunk)
            meanwhile()

        for action in actions:
            model.act(action, self._kept.before_change, finish)
        for chunk in model.chunks:
            if chunk not in done:
                finish(chunk)
        self._active, self._done = [], None

    def join(self, asked: PullRequest) -> None:
        """Answer a pull that became ready while an entry is carried out: finished chunks now, the others as
        they finish."""
        for chunk in self._done or ():
            self._answer(asked, chunk)
        self._active.append(asked)

    def handle_pull(self, heard: Heard) -> str:
        """Answer a pull with all chunks if it is ready; else it waits for an entry. Returns why it is
        refused."""
        model, pull = self._training.model, heard.message
        if model is None or not (model.complete or model.has_values_at_once):
            return NOT_SET_UP
        model.freshen(pull)
        if pull.share >= pull.shares:
            return no_share(pull.share, pull.shares)
        reason = model.state.refusal(heard.worker, pull.incarnation)
        asked = PullRequest(heard.worker, pull, heard.hello.member)
        if not reason and self.is_ready(asked):
            for chunk in model.chunks:
                self._answer(asked, chunk)
        return reason

    def may_pull(self, hello: Hello, pull: AnyPull) -> bool:
        """True if this pull may be answered between two chunks."""
        return (
            self._done is not None
            and (self._model.complete or self._model.has_values_at_once)
            and hello.role == "worker"
            and hello.incarnation == pull.incarnation
            and pull.share < pull.shares
            and not self._model.state.refusal(hello.worker, pull.incarnation)
        )

    def is_ready(self, asked: PullRequest) -> bool:
        """True if the pull can be answered now; if not, it is queued."""
        return self._model.pulls.ask(asked)

    def _answer(self, asked: PullRequest, chunk: int) -> None:
        """Send one chunk, or the requested share of it, to a waiting peer."""
        model, pull, worker = self._model, asked.pull, asked.worker
        if pull.chunks and chunk not in pull.chunks:
            return
        peer = self._peers.member(worker, pull.incarnation, asked.member)
        if peer is None:
            return
        run = model.checks.run_bytes(chunk, pull.share, pull.shares)
        if isinstance(pull, messages.PullMean):
            if model.mean is not None and model.mean.iteration == pull.iteration:
                self._send_mean(peer, worker, chunk, pull, run)
                reach("shard.answered", pull.iteration)
            return
        self._peers.send(
            peer,
            messages.Parameters(
                clock=model.state.clock_of(worker),
                chunk=chunk,
                version=model.state.versions[chunk],
                staleness=model.state.staleness_of(worker),
                share=pull.share,
                shares=pull.shares,
                asked=pull.clock,
                lost=model.lost_of(worker, pull, chunk),
                consumed=model.consumed,
            ),
            model.lend(chunk)[run],
        )
        reach("shard.answered", pull.clock - 1)

    def _send_mean(self, peer: bytes, worker: int, chunk: int, pull: messages.PullMean, run: slice) -> None:
        mean = self._model.mean
        assert mean is not None
        payload, shortened = mean.payload(chunk, run, sparse=chunk in self._model.sparse)
        self._peers.send(
            peer,
            messages.Mean(
                iteration=mean.iteration,
                chunk=chunk,
                present=mean.chunks[chunk][1],
                weight=mean.weight,
                samples=mean.samples,
                share=pull.share,
                shares=pull.shares,
                lost=self._model.lost_of(worker, pull, chunk),
                shortened=shortened,
            ),
            payload,
        )

    def _handle_pull_state(self, heard: Heard) -> str:
        """Send the optimizer's state, of all chunks or of one, for a checkpoint."""
        model = self._training.model
        if model is None:
            return NOT_SET_UP
        model.send_state(heard.message, partial(self._peers.send, heard.peer))
        return ""
