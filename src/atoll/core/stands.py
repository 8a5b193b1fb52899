"""Places of workers in their scripts, and the error line for workers at inconsistent places.

Workers that wait for each other exchange their `Stand`. Inconsistent stands show a mistake in the script:
`describe_mismatch` names each worker's place and the remedy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from atoll.core.decoding import decoded
from atoll.core.scriptline import at_script_line

GRADIENTS: Literal["gradients"] = "gradients"
CALL: Literal["call"] = "call"
END: Literal["end"] = "end"

USE = "a use of p.grad"  # a call to which workers come from other calls, and from waits for an iteration
USE_OF = f"{USE} of iteration"  # of a worker whose own script uses it
MOST_BYTES = 2048  # of an encoded Stand
_MOST_NAMES = 6  # of workers at one place; if there are more, the rest is counted
_DIGEST_BYTES = 16
# These calls combine values, so all workers must call from one line. A barrier combines nothing: scripts let
# worker 0 go first, with one barrier for worker 0 and another for the rest.
_WITH_LINE = {"session.reduce", "session.gather"}
_STORES = ("session.save", "session.load", "session.resume")

_EQUAL_STEPS = (
    "every worker must make equally many steps (session.sampler deals equal shares; a worker without a batch "
    "still calls optimizer.step())"
)
_EQUAL_EPOCHS = (
    "batches of different epochs would be trained together: give every worker equally many batches in an "
    "epoch (equal batch sizes and drop_last, no `break` on one worker alone), by session.batches or "
    "session.epoch_of"
)
# Beginnings of `asks` that name the epoch of gradients, by its source:
_EPOCH = "epoch "  # the session's sampler
_LOOP = "its epoch"  # the script's own loop
_PASS = "pass"  # a pass over a DataLoader
_MOST_PLACES = 4  # in a warning
_MIXED = (
    "these batches are trained together, and from here on so may others of different epochs: give every "
    "worker equally many batches in an epoch (session.sampler deals equal shares; a worker without a batch "
    "still calls optimizer.step()); endless loaders may go on as they are"
)
_SAME_ORDER = "all workers must make the same calls in the same order, also one without a batch"
_SKIPPED = (
    "a worker that skips a batch of session.epoch_of leaves the others waiting: train on it with "
    "session.weight(0), or skip it on all workers together (session.reduce tells them)"
)
_ALIKE = {  # properties that must be equal in calls that meet
    "session.reduce": "be of the same operation, shape and dtype",
    "session.gather": "bring tensors, or all bring other values",
}

_Short: TypeAlias = Annotated[str, Meta(max_length=256)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]


class StandError(ValueError):
    """Bytes from another process encode no Stand; the message says why."""


class Stand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's place in its script.

    GRADIENTS is the end of a backward whose gradients go into `step`; `asks` names the model if a session has
    several ("model 2"), or the epoch of the batch. CALL is a call `name`, such as "session.reduce"; `asks`
    names its request, such as "mean of a number". END is the end of the session after `step` steps.

    `line` is the script's line, such as "train.py:28", or "" if unknown.
    """

    kind: Literal["gradients", "call", "end"]
    step: _Count = 0
    name: _Short = ""
    asks: _Short = ""
    line: _Short = ""

    @property
    def key(self) -> tuple[str, ...]:
        """Return the part of a place that must be equal on all workers, besides the line."""
        if self.kind == CALL:
            return self.kind, self.name, self.asks  # workers at their own pace call after unequal steps
        if self.kind == END:
            return (self.kind,)
        return self.kind, str(self.step), self.asks

    @property
    def combined_from(self) -> str:
        """Return the script's line if it must be equal on all workers; "" if any line will do."""
        return self.line if self.kind == CALL and self.name in _WITH_LINE else ""

    def digest(self) -> bytes:
        """Return 16 bytes that are equal on workers with consistent stands.

        A worker that knows no line of its script has another digest than a worker that knows one.
        """
        parts = "\0".join((*self.key, self.combined_from))
        return hashlib.blake2b(parts.encode(), digest_size=_DIGEST_BYTES).digest()

    def __str__(self) -> str:
        if self.kind == GRADIENTS:
            of = f" of {self.asks}" if self.asks else ""
            return at_script_line(f"at the gradients of step {self.step}{of}", self.line)
        if self.kind == END:
            steps = f"{self.step} step{'s' if self.step != 1 else ''}"
            return at_script_line(f"at the end of its session after {steps}", self.line)
        asked = f"({self.asks})" if self.asks else ""
        return at_script_line(f"in {self.name}{asked}", self.line)


def gradients(step: int, line: str, *, model: str = "") -> Stand:
    """Return the place of a worker that waits to reduce its gradients of `step`."""
    return Stand(GRADIENTS, step=step, asks=_cut(model), line=_cut(line))


class Epoch(NamedTuple):
    """The epoch of a worker's batch: its `number`, and its source `by`.

    `by` is SAMPLER, LOOP, or the script's line of a DataLoader's loop. A `number` below 0 is unknown.
    """

    number: int = -1
    by: str = ""

    @property
    def is_dealt(self) -> bool:
        """True if the session's sampler has given the batch, so that the epoch is certain."""
        return self.number >= 0 and self.by == SAMPLER

    def __str__(self) -> str:
        if self.number < 0:
            return ""
        if self.by == SAMPLER:
            return f"{_EPOCH}{self.number}"
        if self.by == LOOP:
            return f"{_LOOP} {self.number}"
        return f"{_PASS} {self.number} over " + (
            f"the DataLoader of {self.by}" if self.by else "its DataLoader"
        )


SAMPLER = "sampler"  # of the session
LOOP = "loop"  # a variable of the script
UNKNOWN = Epoch()


def gradients_in(step: int, line: str, epoch: Epoch) -> Stand:
    """Return the place of a worker that reduces gradients of `step`, with the epoch of its batch."""
    return gradients(step, line, model=str(epoch))


def are_in_one_epoch(stands: Iterable[Stand]) -> bool:
    """True if the session's sampler has dealt all batches from one epoch.

    Places without such an epoch are ignored.
    """
    epochs = {each.asks for each in stands if each.kind == GRADIENTS and each.asks.startswith(_EPOCH)}
    return len(epochs) <= 1


def mixed_epochs(stands: Mapping[int, Stand], noun: str = "worker") -> str:
    """Return the warning that scripts train batches of different epochs together; "" if they do not.

    The epochs are those of the scripts' own loops, or passes over DataLoaders. Passes are compared only if
    the loops are at one line of the script.
    """
    numbers: dict[str, set[str]] = {}
    for each in stands.values():
        if each.kind == GRADIENTS and each.asks.startswith((_LOOP, _PASS)):
            number = next((word for word in each.asks.split() if word.isdecimal()), "")
            numbers.setdefault(each.asks.replace(number, "", 1), set()).add(number)
    if all(len(each) == 1 for each in numbers.values()):
        return ""
    shown = list(dict.fromkeys(map(str, stands.values())))[:_MOST_PLACES]
    named = {name: each for name, each in stands.items() if str(each) in shown}
    return f"{_places(named, noun)}. {_capital(_MIXED.replace('worker', noun))}"


def call(name: str, line: str, *, asks: str = "", step: int = 0) -> Stand:
    """Return the place of a worker inside a call; `name` is the call in the script: "session.save"."""
    return Stand(CALL, step=step, name=_cut(name), asks=_cut(asks), line=_cut(line))


def end(step: int, line: str) -> Stand:
    """Return the place of a worker that has left its session after `step` steps."""
    return Stand(END, step=step, line=_cut(line))


def _cut(text: str) -> str:
    return text if len(text) <= 256 else f"{text[:253]}..."


def encode_stand(stand: Stand) -> bytes:
    return msgspec.msgpack.encode(stand)


_decoder = msgspec.msgpack.Decoder(Stand)


def decode_stand(raw: bytes | bytearray | memoryview) -> Stand:
    """Decode a Stand that another worker sent. Raises StandError for other bytes."""
    if len(raw) > MOST_BYTES:
        raise StandError(f"a place in the script of {len(raw)} bytes, where {MOST_BYTES} is the most")
    stand = decoded(_decoder, raw, StandError, "no place in the script")
    for text in (stand.name, stand.asks, stand.line):
        if not text.isprintable():
            raise StandError(f"no place in the script: it has the unprintable text {text[:40]!r}")
    return stand


def are_consistent(stands: Iterable[Stand]) -> bool:
    """True if workers at these places can go on together.

    Lines are compared only between workers that know the lines of their scripts.
    """
    known = list(stands)
    lines = {stand.combined_from for stand in known} - {""}
    return len({stand.key for stand in known}) <= 1 and len(lines) <= 1


def describe_mismatch(stands: Mapping[int, Stand] | Mapping[str, Stand], noun: str = "worker") -> str:
    """Return one line that names each worker's place, and the change that the script needs.

    Args:
        stands: the workers' places by name, in the order to print. Workers at one place are named together.
        noun: "worker", or "node" if users count nodes.
    """
    return f"{_places(stands, noun)}. {_advice(list(stands.values()), noun)}"


def _places(stands: Mapping[int, Stand] | Mapping[str, Stand], noun: str) -> str:
    places: dict[str, list[str]] = {}
    for name, stand in stands.items():
        places.setdefault(str(stand), []).append(str(name))
    return "; ".join(f"{_names(names, noun)} {place}" for place, names in places.items())


def _names(names: Sequence[str], noun: str) -> str:
    if len(names) == 1:
        return f"{noun} {names[0]} is"
    if len(names) > _MOST_NAMES:
        kept = _MOST_NAMES - 1
        return f"{noun}s {', '.join(names[:kept])} and {len(names) - kept} others are"
    return f"{noun}s {', '.join(names[:-1])} and {names[-1]} are"


def _advice(stands: Sequence[Stand], noun: str) -> str:
    return _capital(_advice_to_worker(stands).replace("worker", noun))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _advice_to_worker(stands: Sequence[Stand]) -> str:
    calls = list(dict.fromkeys(stand.name for stand in stands if stand.kind == CALL))
    elsewhere = any(stand.kind != CALL for stand in stands)
    if not calls:
        if not are_in_one_epoch(stands):
            return _EQUAL_EPOCHS
        models = {stand.asks for stand in stands if stand.kind == GRADIENTS}
        if len({stand.step for stand in stands}) == 1 and len(models) > 1:
            return "every worker must train the same models in the same order"
        return _EQUAL_STEPS
    if elsewhere and "session.epoch_of" in calls:
        return _SKIPPED
    stored = next((name for name in calls if name in _STORES), "")
    if stored and (elsewhere or len(calls) > 1):
        return f"every worker calls {stored}: take it out of `if session.is_main`"
    if elsewhere and calls[0].startswith("session."):
        return f"every worker calls {calls[0]}, and calls it after equally many steps: take it out of " + (
            "`if session.is_main`, or deal equal shares with session.sampler"
        )
    if elsewhere or len(calls) > 1:
        return _SAME_ORDER
    if len({stand.asks for stand in stands}) > 1:
        return f"all calls of {calls[0]} that meet must {_ALIKE.get(calls[0], 'ask for the same')}"
    return f"calls of {calls[0]} meet only from one line of the script: {_SAME_ORDER}"
