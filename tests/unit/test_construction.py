"""Objects get their collaborators and their callbacks in the constructor; nobody sets them afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "atoll"
ROOMS = ("train", "memory", "cpuside", "exchange", "hub", "server")
# A class with one of these as a base, or made a dataclass, is data: it may be put down anywhere.
DATA = {"Struct", "Message", "NamedTuple", "Enum", "Exception", "TypedDict"}
CALLABLES = {"Callable", "Handler", "Subscriber"}

# What the checker finds, and why it is no fault.
ALLOWED = {
    "a node's life: what it is at changes as the worker says, or others decide; its parts look there": [
        "cpuside/acting.py: Acting._change_view: stage.entering.first",
        "cpuside/acting.py: Acting._fetch_state: stage.entering.taker",
        "cpuside/comingin.py: ComingIn.poll: stage.node",
        "cpuside/settingup.py: SettingUp.introduce: stage.entering",
        "cpuside/settingup.py: SettingUp.introduce: stage.node",
        "cpuside/settingup.py: SettingUp.set_up: stage.trained",
        "cpuside/stage.py: Stage.leave: self.entering",
    ],
    "a script prepares its model when it likes, and until then there is none": [
        "memory/observing.py: Observation.take: self._fitted",
        "server/revival.py: Revival.stand_as: self._training.model",
        "server/setups.py: SetUps._begin: self._training.model",
        "train/data/sharereports.py: ShareReports.follow: self._sampler",
        "train/data/sharereports.py: ShareReports.follow: self._schedule",
        "train/sync/peers.py: Peers.build_model: self._model",
        "train/sync/peersintiers.py: LentTiers.fit: place.fitted",
    ],
    "the CPU side gives memory as a model is set up, and other memory after it has come back": [
        "train/sync/peersparameters.py: Lent.attach: self._memory",
        "train/sync/peersparameters.py: LocalParameters.attach: self.memory",
    ],
    "a gradient moves, and who has the proxy reads it where it lies now": [
        "memory/gradients.py: GradientSlot.leave: proxy.source",
        "memory/lent.py: LentSlot.leave: proxy.source",
        "memory/proxies.py: GradientProxy.of: proxy.source",
        "memory/sharedgradients.py: _SharedSlot.leave: proxy.source",
    ],
    "a journal is replayed before anybody is asked": [
        "server/sitemodel.py: SiteModel.go_on: self._above",
    ],
    "each backward's gradients have their own moment at which they become the mean": [
        "memory/untilread.py: Hiding.begin: self._until",
        "train/gradients/unread.py: UnreadGradients._unread: unread.until",
        "train/gradients/unread.py: UnreadGradients.become: unread.until",
    ],
    "an argument of one wait, let go as it ends": [
        "server/site.py: SiteShard.run: self._until",
        "train/group/standing.py: Standing.begin: self._where",
    ],
    "objects of torch's and Python's, which are changed in no other way": [
        "memory/interrupts.py: begin: _KEPT.handler",
        "train/api/schedulers.py: _count_made: kind.__init__",
        "train/api/uncaught.py: show_errors_as_one_line: hook.before",
        "train/api/uncaught.py: show_errors_as_one_line: sys.excepthook",
        "train/gradients/unread.py: UnreadGradient.over: made.of",
    ],
    "values, where another class has an attribute of that name that acts": [
        "exchange/feedback.py: Feedback.restore: self._residuals[chunk].values",
        "hub/book.py: Book.restore: self.leases.state",
        "hub/groups.py: Groups.restore: self._formation.state",
        "hub/journal.py: HubJournal.__init__: self._file.end",
        "hub/placement.py: Placement.restore: self._planner.sites",
        "hub/placement.py: Placement.take_links: planner.server",
        "memory/fitted.py: _Stationary.__init__: parameter.data",
        "memory/fitted.py: _Stationary.close: parameter.data",
        "memory/former.py: Former.pin: parameter.data",
        "memory/former.py: Former.unpin: parameter.data",
        "memory/initialising.py: _Room._evict: parameter.data",
        "memory/initialising.py: _Room.pin: parameter.data",
        "memory/initialising.py: end_place: parameter.data",
        "memory/initialising.py: leave_in: parameter.data",
        "memory/initialising.py: let_go: parameter.data",
        "memory/initialising.py: take: parameter.data",
        "memory/parameters.py: _assign: parameter.data",
        "memory/parameters.py: give_back: parameter.data",
        "memory/parameters.py: put: parameter.data",
        "memory/plainstate.py: PlainState._show: self._optimizer.state",
        "memory/plainstate.py: PlainState.give_back: self._optimizer.state",
        "memory/plainstate.py: PlainState.leave: self._optimizer.state",
        "memory/segments.py: run_step: copy.state",
        "memory/sharing.py: Sharing._staged: stage.holds",
        "server/logkeeper.py: LogKeeper.set_up: log.grouping",
        "server/logkeeper.py: LogKeeper.set_up: self.state.log",
        "server/model.py: Model._hold: optimizer.origins",
        "server/shard.py: Shard._see_to_links: self._hub.steps",
        "server/standby.py: Standby._look_after: self._hub.steps",
        "train/api/loads.py: StateLoads.end: prepared.reducer.steps",
        "train/data/peersdealing.py: PeerDeal.made: state.used",
        "train/data/sampler.py: DealtSampler._set_deal: self._deal",
        "train/gradients/agreement.py: Ballot.agreed: agreed.steps",
        "train/gradients/buckets.py: Buckets.drop_kept: chunk.kept",
        "train/group/rounds.py: Ring._open: self._seat.place",
        "train/members/hub_client.py: HubClient.join: self.notices.worker",
        "train/members/regrouping.py: Regrouping._move_to: parts.attendance.contributor",
        "train/sync/server.py: Server._send: out.grouping",
        "train/sync/strategies.py: Served.build_model: model.exchange.steps",
        "train/sync/strategies.py: ServedModel.fetch_parameters: self.exchange.steps",
    ],
}


def annotated(node: ast.expr | None) -> set[str]:
    """The types that an annotation names, in a text too: of a container its own, and not those in it."""
    if node is None:
        return set()
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp):
        return annotated(node.left) | annotated(node.right)
    return {named(node)}


def named(node: ast.expr) -> str:
    return ast.unparse(node).split("[")[0].split("(")[0].split(".")[-1]


@dataclass
class Sources:
    """The trees of the source, and of it the names of classes with behaviour, and of attributes that hold
    instances of them, or callables."""

    trees: dict[str, ast.Module]
    kinds: set[str] = field(default_factory=set)
    holders: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        classes = [n for tree in self.trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        bases = {each.name: {named(base) for base in each.bases} for each in classes}
        data = set(DATA)
        while more := {name for name, above in bases.items() if above & data} - data:
            data |= more
        data |= {
            each.name for each in classes if any(named(how) == "dataclass" for how in each.decorator_list)
        }
        self.kinds = {each.name for each in classes} - data | CALLABLES
        for each in classes:
            self.holders |= {name for name, names in declared(each) if names & self.kinds}


def declared(holder: ast.ClassDef) -> Iterator[tuple[str, set[str]]]:
    """The attributes of a class that are annotated, or take an annotated parameter, and the names in it."""
    for each in holder.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, annotated(each.annotation)
    for method in (each for each in holder.body if isinstance(each, ast.FunctionDef)):
        given = parameters(method)
        for each in ast.walk(method):
            if isinstance(each, ast.AnnAssign) and is_own(each.target):
                yield each.target.attr, annotated(each.annotation)
            for target, value in assigned(each):
                if is_own(target) and isinstance(value, ast.Name) and value.id in given:
                    yield target.attr, given[value.id]


def parameters(method: ast.FunctionDef) -> dict[str, set[str]]:
    every = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
    return {each.arg: annotated(each.annotation) for each in every}


def assigned(node: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Each attribute that a statement assigns, with its value where that is one by itself."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    for target in targets:
        if isinstance(target, ast.Attribute):
            yield target, node.value  # type: ignore[attr-defined]
        elif isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)  # type: ignore[attr-defined]
            for each, value in zip(target.elts, values, strict=True):
                if isinstance(each, ast.Attribute):
                    yield each, value


def is_own(target: ast.expr) -> bool:
    """Whether it is an attribute of `self`."""
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id in ("self", "cls")
    )


def is_behaviour(value: ast.expr | None, kinds: set[str], functions: set[str]) -> bool:
    """Whether a value is a callable or an object with behaviour, as far as the text shows."""
    if isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in {"self", *functions}):
        return True
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        return value.attr in functions
    return isinstance(value, ast.Call) and named(value.func) in {"partial", *kinds}


def set_later(sources: Sources, name: str) -> Iterator[str]:
    """Each callable or collaborator of a file that is set late, as "file: class.method: target".

    From outside: an attribute of another object than `self`. From inside: a method other than `__init__`
    that keeps a parameter of its own.
    """
    tree = sources.trees[name]
    functions = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    for method, owner in methods(tree):
        given = parameters(method)
        for node in ast.walk(method):
            for target, value in assigned(node):
                where = f"{name}: {owner}{method.name}: {ast.unparse(target)}"
                if isinstance(value, ast.Constant):
                    continue
                if is_own(target):
                    keeps = isinstance(value, ast.Name) and given.get(value.id, set()) & sources.kinds
                    if keeps and method.name not in ("__init__", "__post_init__", "__new__"):
                        yield where
                elif target.attr in sources.holders or is_behaviour(value, sources.kinds, functions):
                    yield where


def methods(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Every function and method that is in no other one, with its class's name and a dot."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, ""
        elif isinstance(node, ast.ClassDef):
            yield from ((each, f"{node.name}.") for each in node.body if isinstance(each, ast.FunctionDef))


def sources() -> Sources:
    return Sources(
        {
            path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(SOURCE.rglob("*.py"))
        }
    )


@pytest.mark.check
def test_nothing_that_acts_is_set_after_construction() -> None:
    read = sources()
    found = {where for name in read.trees if name.split("/")[0] in ROOMS for where in set_later(read, name)}
    allowed = {where for places in ALLOWED.values() for where in places}
    assert sorted(found - allowed) == []
    assert sorted(allowed - found) == []  # a place that is no more


@pytest.mark.check
def test_no_class_is_more_than_three_deep() -> None:
    """Of ours: what a class does is found in few places."""
    classes = [n for tree in sources().trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    bases = {each.name: {named(base) for base in each.bases} for each in classes}

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in bases[name] & bases.keys() - {name}), default=0)

    assert {name: depth(name) for name in bases if depth(name) > 3} == {}


def test_the_checker_finds_what_is_planted() -> None:
    planted = """
class Ring:
    def __init__(self, told: Callable[[str], None]) -> None:
        self._told, self.judge, self.number = told, None, 0
        self.judge: Judge | None = None

    def trains(self, told: Callable[[str], None]) -> None:
        self._told = told

    def count(self, number: int) -> None:
        self.number = number

class Judge:
    def judge(self) -> None:
        ring.judge = self
        ring.number, ring.told = 1, self.judge
        ring.other = lambda: None
"""
    read = Sources({"train/ring.py": ast.parse(planted)})
    assert [each.split(": ", 1)[1] for each in set_later(read, "train/ring.py")] == [
        "Ring.trains: self._told",
        "Judge.judge: ring.judge",
        "Judge.judge: ring.told",
        "Judge.judge: ring.other",
    ]
