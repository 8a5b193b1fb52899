"""Set-up of a shard: each worker's position in the sequence of set-ups, the bringer of values, and waiting
workers."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.points import reach
from atoll.server.common import Common
from atoll.server.door import Door
from atoll.server.heard import Handler, Heard, Life
from atoll.server.model import Model
from atoll.wire import messages
from atoll.wire.messages import Ready, Setup

_START_THE_SAME = "start the same script with the same settings everywhere"
_WHILE_PREPARING = "while session.prepare was called for several models, start the run again"


class SetUps:
    """Handles set-ups. All workers make the same sequence of them; each begins a generation of the log's
    `lines`. `make(setup, generation)` makes the model."""

    def __init__(self, common: Common, door: Door, make: Callable[[Setup, int], Model]) -> None:
        self._lines, self._peers, self._kept = common.lines, common.peers, common.kept
        self._log, self._training, self._tell = common.log, common.training, common.tell
        self._door, self.make = door, make
        self.setter: Life = (-1, 0)  # the worker that brought the Setup
        self._setter_member = 0  # the member of it that sent the Setup last
        self.bases: dict[Life, int] = {}  # generation of a worker's set-up 0
        self.readies: dict[Life, int] = {}  # generation of a worker's latest Ready
        # Unanswered Readys by (worker, incarnation, member), each with its generation.
        self._waiting: dict[tuple[int, int, int], tuple[int, Ready]] = {}
        self._refused = ("", "")  # the digest of the latest Setup if it was refused, and why
        self.handlers: dict[type, Handler] = {
            Setup: Handler(self._handle_setup, "a worker brings the Setup"),
            messages.SetChunk: Handler(self._handle_set_chunk),
            Ready: Handler(self._handle_ready, "workers ask whether a shard is ready"),
        }

    def _next_of(self, who: Life, number: int = 0) -> int:
        """The generation of a worker's Setup and Ready with this number (0: its next). A late worker starts
        with the present generation."""
        latest = max(self._lines.generation, 1)
        if number:
            return self.bases.setdefault(who, latest - number) + number
        return self.readies.get(who, latest - 1) + 1

    def refusal(self, who: Life) -> str:
        """Return why a worker may not take part: it has not prepared the model of the latest set-up. Empty
        for a worker that has, and for a new group, whose members have."""
        if 0 < self.readies.get(who, 0) < self._lines.generation:
            return _set_up_since(who[0])
        return ""

    def _handle_setup(self, heard: Heard) -> str:
        setup, who, model = heard.message, heard.life, self._training.model
        wanted = self._next_of(who, setup.number)
        if model is not None and model.complete and who != self.setter:
            if unlike := self._unlike(heard.worker, setup, model):
                return unlike
            if wanted <= self._lines.generation:  # a first worker that was started again
                if setup.digest != model.setup.digest:
                    return self._trains_another()
                return ""  # the values here count, and the worker pulls them
        lost = model is not None and not model.complete and setup.digest == model.setup.digest
        if setup.number and wanted <= self._lines.generation and (who == self.setter or lost):
            self.setter, self._setter_member = who, heard.hello.member
            return ""  # a duplicate, or of another worker, since the one that brought the model was lost
        made = self._made(setup)
        if isinstance(made, str):
            if model is None:
                self._refuse_alike(setup.digest, f"worker {heard.worker}'s model is refused: {made}")
            return made
        self._begin(made, who)
        self._setter_member = heard.hello.member
        return ""

    def _made(self, setup: Setup) -> Model | str:
        """Return the model, or why none can be made."""
        try:
            return self.make(setup, self._lines.generation + 1)
        except Exception as error:  # the sender's mistake, such as a layout too large for memory
            return (str(error) or type(error).__name__).splitlines()[0]

    def _refuse_alike(self, digest: str, reason: str) -> None:
        """Refuse all workers that wait, or come to wait, for a set-up of this digest: it will not come."""
        self._refused = digest, reason
        for who, (_, ready) in list(self._waiting.items()):
            peer = self._peers.member(*who)
            if ready.digest == digest and peer is not None:
                del self._waiting[who]
                self.readies.pop(who[:2], None)
                self._door.refuse(peer, reason, "Ready")

    def _trains_another(self) -> str:
        line = f"this shard trains another model or optimizer, brought by worker {self.setter[0]}"
        if self._peers.members(*self.setter):
            return line
        return f"{line}, which is not connected any more: if it left {_WHILE_PREPARING}"

    def _begin(self, model: Model, setter: Life) -> None:
        """Train this model from now on; `setter` brings its values."""
        setup, former = model.setup, self._training.model
        for asked in [] if former is None else former.pulls.of_newcomers():  # it answers nobody any more
            peer = self._peers.member(asked.worker, asked.pull.incarnation, asked.member)
            if peer is not None:
                self._door.refuse(peer, _set_up_since(asked.worker), "Pull")
        self._kept.abandon_snapshot()
        self._training.model, self.setter, self._refused = model, setter, ("", "")
        self._lines.begin()
        self._kept.set_up()
        if self._log is not None:
            self._log.set_up(setup, model.holders)
        else:
            self._lines.follow()
        if not self._kept.replaying:
            held = f"{len(model.chunks)} chunks, {model.held_bytes} bytes"
            self._tell.decide(
                "shard",
                f"{held}, {' and '.join(each.name for each in setup.optimizers)}, {setup.consistency}",
                f"worker {setter[0]} describes the model",
            )

    def _handle_set_chunk(self, heard: Heard) -> str:
        model = self._training.model
        if model is None:
            return "Setup comes before SetChunk"
        if heard.life != self.setter:
            return "" if model.complete else f"worker {self.setter[0]} brings this shard's values"
        if heard.message.number and model.complete:
            return ""  # a duplicate
        if not self._kept.replaying:
            reach("shard.setup")
        return model.set_chunk(heard.message, heard.payload)

    def _handle_ready(self, heard: Heard) -> str:
        """Answer a worker's Ready once all values of its set-up have arrived."""
        model, member = self._training.model, heard.hello.member
        brings = heard.life == self.setter and member == self._setter_member
        if model is not None and brings and not model.complete and (reason := model.finish()):
            return reason
        if model is None and heard.message.digest == self._refused[0]:
            return self._refused[1]
        generation = self.readies[heard.life] = self._next_of(heard.life, heard.message.number)
        self._waiting[heard.worker, heard.hello.incarnation, member] = generation, heard.message
        self._answer(model)
        return ""

    def _answer(self, model: Model | None) -> None:
        """Once `model` is complete, answer all workers that wait for its set-up or an earlier one."""
        if model is None or not model.complete:
            return
        for who, (generation, ready) in list(self._waiting.items()):
            if generation > self._lines.generation:
                continue
            del self._waiting[who]
            peer = self._peers.member(*who)
            if ready.digest == model.setup.digest and not self._deals_otherwise(who[0], ready, model):
                self._peers.send(peer, ready)
                continue
            self.readies.pop(who[:2], None)  # it has made no set-up, and brings none
            if peer is not None:
                self._door.refuse(peer, self._differs(who[0], ready, model), "Ready")

    def _unlike(self, worker: int, told: Setup | Ready, model: Model) -> str:
        """Return a message for a worker whose codec, or a setting by which data is dealt, is another than the
        model's; empty for one with the same."""
        if told.codec != model.setup.codec:
            return _unlike_codecs(worker, told.codec, self.setter[0], model.setup.codec)
        return self._deals_otherwise(worker, told, model)

    def _deals_otherwise(self, worker: int, told: Setup | Ready, model: Model) -> str:
        for key, value in told.dealing.items():
            if value != (others := model.setup.dealing.get(key, value)):
                return _unlike_dealing(worker, f"{key} {value}", self.setter[0], others)
        return ""

    def _differs(self, worker: int, ready: Ready, model: Model) -> str:
        if unlike := self._unlike(worker, ready, model):
            return unlike
        if worker == self.setter[0]:
            return (
                f"worker {worker} began again, and has another model, layout or optimizer than it had "
                f"described before: if that was {_WHILE_PREPARING}; else {_START_THE_SAME}"
            )
        return (
            f"worker {worker} has another model, layout or optimizer than worker {self.setter[0]} has "
            f"described; {_START_THE_SAME}"
        )


def _set_up_since(worker: int) -> str:
    """Message for a worker that came late, and has the model of an earlier set-up."""
    return (
        f"the workers have changed their model, or loaded a checkpoint, since worker {worker} came and "
        "prepared its own: start it again, with the model as it is now at session.prepare"
    )


def _unlike_codecs(worker: int, own: str, other: int, others: str) -> str:
    """Message for two workers with different codecs."""
    return (
        f"worker {worker} has sync.codec {own!r}, and worker {other} has {others!r}: a run's gradients are "
        "written by one codec; set sync.codec to the same on all"
    )


def _unlike_dealing(worker: int, own: str, other: int, others: str) -> str:
    """Message for two workers with different settings by which data is dealt."""
    return (
        f"worker {worker} has {own}, and worker {other} has {others}: all workers deal a run's data by one "
        "configuration; give every worker the same"
    )
