"""What must hold at the end of a run of the model of attempts, whatever died when."""

from __future__ import annotations

from attempt_arbiters import edited, stepped_truth
from attempt_members import begin
from attempt_rules import ALL, Rules
from attempt_stores import CHUNKS, DIGIT, EXTENT, WrongError, digits
from attempt_world import STRANGER, Cell, Plan, World


def run(cell: Cell, plan: Plan, rules: Rules = ALL) -> World:
    """Run a cell by a plan and check it. Raises WrongError, with what had happened."""
    world = begin(cell, plan, rules)
    try:
        world.go()
        check(world)
    except WrongError as error:
        raise WrongError(f"{error}; {world.trace}") from None
    return world


def check(world: World) -> None:
    """Raise WrongError where a contribution is lost, counts twice, or is another one elsewhere."""
    _check_data(world)
    _check_shown(world)
    if world.cell.sync == "bsp":
        _check_means(world)
    else:
        _check_pushes(world)


def _own(samples: object) -> set[int]:
    return {sample for sample in samples if sample < STRANGER}  # type: ignore[attr-defined]


def _check_data(world: World) -> None:
    counted: list[int] = []
    for exchange, record in world.arbiter.records.items():
        if exchange[0] != "step":
            counted += [sample for commit in record.values() for sample in _own(commit.samples)]
    if len(counted) != len(set(counted)):
        raise WrongError(f"samples count twice: {sorted(counted)}")
    if world.cell.sync == "replicas":
        counted = list(world.dealer.used)
    for k in sorted(world.alive):
        member = world.members[k]
        lost = set(member.given) - set(counted)
        if lost:
            raise WrongError(f"member {k} went on, and its samples {lost} count nowhere")
        if set(member.hand) & set(counted):
            raise WrongError(f"member {k} still holds a sample that has counted")
    used = set(world.dealer.used)
    # A group that died wholly has told nobody: what it had counted is not used up in the books.
    if used - set(counted) or (set(counted) - used and world.alive >= set(world.members)):
        raise WrongError(f"used up {sorted(used)}, and counted {sorted(counted)}")
    if set(world.dealer.free) & set(counted):
        raise WrongError("a sample has counted, and is dealt again")


def _check_shown(world: World) -> None:
    for what, shown in world.shown.items():
        if world.cell.sync == "asp" and world.cell.store == "parts" and what[0] == "values":
            continue  # who asked the source saw newer values, and its gradient weighed nothing
        if len(set(shown.values())) > 1:
            raise WrongError(f"members show unlike {what}")


def _check_means(world: World) -> None:
    log, codec = world.arbiter, world.cell.codec
    iterations = [exchange[1] for exchange in log.records if exchange[0] == "mean"]
    for shard in log.shards:
        for i in iterations:
            samples = [sample for commit in log.records["mean", i].values() for sample in commit.samples]
            if not codec and any(value != sum(DIGIT**s for s in samples) for value in shard.mean[i]):
                raise WrongError(
                    f"iteration {i}, chunk {shard.chunk}: {list(map(digits, shard.mean[i]))} for {samples}"
                )
        if not codec and any(value != stepped_truth(log, shard.clock) for value in shard.values):
            raise WrongError(f"chunk {shard.chunk} has other values than the records say")
    if codec:
        iterations = [i for i in iterations if 0 in log.records["mean", i]]
        numbers = {("mean", i): log.records["mean", i][0].number for i in iterations}
        sent = {
            (chunk, place): [world.sums[0, i, numbers["mean", i], chunk][place] for i in iterations]
            for chunk in range(CHUNKS)
            for place in range(EXTENT)
        }
        strangers = sum(DIGIT ** (STRANGER + i) for i in iterations) if world.cell.stranger else 0
        applied = {
            key: sum(log.shards[key[0]].mean[i][key[1]] for i in iterations) - strangers for key in sent
        }
        _check_residuals(world, numbers, {key: sum(each) for key, each in sent.items()}, applied)


def _check_residuals(world: World, numbers: dict, sent: dict, applied: dict) -> None:  # type: ignore[type-arg]
    for member in world.members.values():
        member.residuals.settle_all(numbers)
    for key, whole in sent.items():
        held = sum(member.residuals.kept.get(key, 0) for member in world.members.values())
        if applied[key] + held != whole:
            raise WrongError(
                f"element {key}: sent {digits(whole)} is not applied {applied[key]} + held {held}"
            )


def _check_pushes(world: World) -> None:
    arbiter, cell = world.arbiter, world.cell
    values = [arbiter.values(chunk) for chunk in range(CHUNKS)]
    if cell.sync == "replicas":
        _check_replicas(world, values)
        return
    truth = edits = 0
    for exchange, record in arbiter.records.items():
        commit = record[exchange[1]]
        if commit.word == "sum":
            samples = sum(DIGIT**sample for sample in commit.samples)
            mark = 0
            if exchange[1] != 1 or not cell.stranger:
                mark = edited(samples, cell.edits, exchange[2]) - samples
            truth += samples
            edits += mark
    if not cell.codec and any(value != truth + edits for chunk in values for value in chunk):
        raise WrongError(
            f"values {[digits(value) for chunk in values for value in chunk]} are not the records'"
        )
    if cell.codec:
        numbers = {exchange: record[exchange[1]].number for exchange, record in arbiter.records.items()}
        mine = [exchange for exchange in arbiter.records if exchange[1] == 0]
        whole = sum(DIGIT**s for exchange in mine for s in arbiter.records[exchange][0].samples)
        other = sum(DIGIT**s for e in arbiter.records if e[1] == 1 for s in arbiter.records[e][1].samples)
        keys = [(chunk, place) for chunk in range(CHUNKS) for place in range(EXTENT)]
        _check_residuals(
            world, numbers, dict.fromkeys(keys, whole), {key: values[key[0]][key[1]] - other for key in keys}
        )


def _check_replicas(world: World, values: list[list[int]]) -> None:
    """Every used sample is in the global values once, in all elements; residuals take the rest."""
    if world.cell.codec:
        keys = [(chunk, place) for chunk in range(CHUNKS) for place in range(EXTENT)]
        records = world.arbiter.records
        numbers = {exchange: record[exchange[1]].number for exchange, record in records.items()}
        sent = dict.fromkeys(keys, 0)
        for (exchange, chunk, place), value in world.differences.items():
            if exchange in records:
                sent[chunk, place] += value
        applied = {key: strip(values[key[0]][key[1]]) for key in keys}
        _check_residuals(world, numbers, sent, applied)
        return
    for shard in world.arbiter.shards:
        for exchange, row in shard.history.items():
            if any(set(digits(value).values()) - {1} for value in row):
                raise WrongError(f"{exchange} counts samples twice: {list(map(digits, row))}")
    used = sum(DIGIT**sample for sample in world.dealer.used)
    stayed = {
        world.members[k].contributor
        for k in world.alive
        if world.members[k].iteration == world.cell.iterations
    }
    whole = stayed == {member.contributor for member in world.members.values()}
    for chunk, row in enumerate(values):
        for value in row:
            # A group of which nobody is left takes its steps since the latest exchange along.
            found = digits(strip(value))
            lost = whole is False and set(found) <= set(world.dealer.used) and set(found.values()) <= {1}
            if strip(value) != used and not lost:
                raise WrongError(
                    f"chunk {chunk} has {digits(strip(value))}, and {sorted(world.dealer.used)} are used up"
                )


def strip(value: int) -> int:
    """Return a sum without the other contributor's part."""
    return value % DIGIT**STRANGER
