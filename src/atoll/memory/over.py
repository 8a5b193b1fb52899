"""Parts of a model that only some members share: each group has its own experts, under the same names as the
others'. Source: docs/memory.md, "Groups of workers"."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import msgspec
from torch import nn

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.core.errors import PrepareError, UserError
from atoll.memory.members import Members, told
from atoll.memory.parameters import place_of
from atoll.moves.owners import Groups, Share

_MARK = "_atoll_over"  # an attribute of a parameter: the members that share it


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """One member's report of one list of ranks that its script gave to `over`.

    Attributes:
        members: the ranks.
        names: a checksum of the parameters' names.
        first: the first parameter's name, for people.
        count: the number of parameters.
    """

    members: tuple[int, ...]
    names: int
    first: str
    count: int


def over(part: nn.Module | Iterable[nn.Parameter], ranks: Iterable[int]) -> None:
    """Let only the workers of `ranks`, this one among them, share the parameters of `part`.

    Call it on every worker, before `session.prepare` or `fit`, with the same part of the model. The workers'
    lists form groups of one size; each worker is in one group. Each group has values of its own, and its
    gradients are the mean over its members, by their weights.

    Raises UserError for ranks that are none, for parameters that were given other ranks before, and for
    parameters that lie in chunks already.
    """
    given = list(ranks) if isinstance(ranks, Iterable) else []
    are_ranks = all(type(rank) is int and rank >= 0 for rank in given)
    if not given or not are_ranks or len(set(given)) < len(given):
        raise UserError(
            f"atoll.memory.over: ranks are a list of different whole numbers from 0 on, not {given or ranks}"
        )
    members = tuple(sorted(given))
    parameters = list(part.parameters() if isinstance(part, nn.Module) else part)
    if not parameters or not all(isinstance(parameter, nn.Parameter) for parameter in parameters):
        raise UserError("atoll.memory.over: give it a module that has parameters, or parameters")
    for parameter in parameters:
        if place_of(parameter) is not None:
            raise UserError("atoll.memory.over: this model is prepared already; call it before that")
        if over_of(parameter) not in ((), members):
            raise UserError(
                f"atoll.memory.over: a parameter of shape {tuple(parameter.shape)} is over "
                f"{list(over_of(parameter))} already, and cannot be over {given} too"
            )
    for parameter in parameters:
        setattr(parameter, _MARK, members)


def over_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the members that `over` has given a parameter; empty for all."""
    found: tuple[int, ...] = vars(parameter).get(_MARK, ())
    return found


def features_of(model: nn.Module) -> dict[str, str]:
    """Return a label for each parameter that was given to `over`, by name: one label for each list of ranks.

    Labels are equal on all members, although their lists differ.
    """
    found: dict[tuple[int, ...], str] = {}
    features = {}
    for name, parameter in model.named_parameters():
        members = over_of(parameter)
        if members:
            features[name] = found.setdefault(members, f"over {len(found)}")
    return features


def refuse_apart(model: nn.Module, **facts: str) -> None:
    """Raise PrepareError, naming the first parameter that was given to `over`, if the table of needs refuses
    that.

    Args:
        facts: choices for the table of needs (`axes/needs.py`).
    """
    for name, parameter in model.named_parameters():
        if over_of(parameter):
            check("prepare", Choices({"over": name, "ranks": list(over_of(parameter)), **facts}))


def share_among(model: nn.Module, members: Members) -> Share:
    """Return this member's `Share`, when all members have given `over` the same parts: a collective.

    Raises PrepareError, on all members, if the parts or the lists of ranks do not match.
    """
    own: dict[str, list[str]] = {}
    lists: dict[str, tuple[int, ...]] = {}
    parameters = dict(model.named_parameters())
    for name, feature in features_of(model).items():
        own.setdefault(feature, []).append(name)
        lists[feature] = over_of(parameters[name])
    words = [
        _Word(lists[feature], zlib.crc32("\0".join(names).encode()), names[0], len(names))
        for feature, names in own.items()
    ]
    said = told(members, words, list[_Word], "what the members have given atoll.memory.over")
    _check_alike(said)
    if own and members.replicas:
        refuse_apart(model, fit="replicas")
    apart = {feature: _groups([word[i] for word in said]) for i, feature in enumerate(own)}
    return Share(members.rank, members.count, apart, members.replicas)


def _check_alike(said: Sequence[Sequence[_Word]]) -> None:
    first = [(word.names, word.count) for word in said[0]]
    for member, words in enumerate(said):
        if [(word.names, word.count) for word in words] != first:
            raise PrepareError(
                f"atoll.memory.over: worker {member} has given it {_words(words)}, and worker 0 "
                f"{_words(said[0])}; give it the same parts of the model on all workers"
            )


def _words(words: Sequence[_Word]) -> str:
    parts = [f"{word.count} parameters from {word.first!r} on" for word in words]
    return " and ".join(parts) or "nothing"


def _groups(words: Sequence[_Word]) -> Groups:
    """Return the groups that the members' lists form. Raises PrepareError for lists that form none."""
    what = f"atoll.memory.over of {words[0].first!r}"
    for member, word in enumerate(words):
        given = list(word.members)
        if member not in given:
            raise PrepareError(f"{what}: worker {member} gives {given}, and is not among them itself")
        if given[-1] >= len(words):
            raise PrepareError(f"{what}: worker {member} gives {given}, and there are {len(words)} workers")
        for other in given:
            if words[other].members != word.members:
                theirs = list(words[other].members)
                raise PrepareError(
                    f"{what}: worker {member} gives {given}, and worker {other} {theirs}; all workers of a "
                    "list give the same"
                )
        if len(given) != len(words[0].members):
            raise PrepareError(
                f"{what}: worker {member} gives {given}, and worker 0 {list(words[0].members)}; the lists "
                "are to be equally long"
            )
    return tuple(sorted({word.members for word in words}))
