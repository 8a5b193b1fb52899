"""`atoll memory plan`: the placement of a script's model under its budgets, found in its first steps."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from atoll.core.errors import AtollError, RunError, UserError
from atoll.core.options import RATE_OR_ZERO, Mark
from atoll.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from atoll.memory.observing import ObservedScript
    from atoll.moves.owners import Groups
    from atoll.moves.search import MemoryPlan

_WAYS = {
    "to_device": "to the device",
    "to_host": "to the host",
    "from_disk": "from disk",
    "to_disk": "to disk",
    "from_members": "from other members",
    "from_groups": "from other groups",
}


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The script and the links of a plan; the budgets are options of their own.

    Args:
        script: A training script that calls atoll.memory.fit, or a session.
        arguments: Its arguments.
        as_json: Print it as one object, in bytes and seconds.
        workers: Plan for one of this many equal workers of a ring.
        link: Rate between workers, each way, such as 10Gbit/s.
        groups: Number of groups of workers, strategy hierarchical.
        between: Rate between groups, each way; by default that of --link.
    """

    script: Annotated[str, Mark("SCRIPT", is_argument=True)]
    arguments: Annotated[list[str], Mark("ARGS", is_argument=True)] = []
    as_json: Annotated[bool, Mark(flag="--json")] = False
    workers: Annotated[int, Mark(least=1)] = 1
    link: Annotated[float, RATE_OR_ZERO] = 0.0
    groups: Annotated[int, Mark(least=1)] = 1
    between: Annotated[float, RATE_OR_ZERO] = 0.0


def show_plan(options: PlanOptions) -> None:
    """Run SCRIPT up to its third step under its budgets, and print the plan with its predicted cost.

    The script ends there; its output goes to standard error. With --workers it still runs alone, and the plan
    is that of the first worker.
    """
    workers, groups, link, between = options.workers, options.groups, options.link, options.between
    if link and workers == 1:
        raise UserError("--link is the rate between several workers; give --workers too")
    if between and groups == 1:
        raise UserError("--between is the rate between several groups; give --groups too")
    from atoll.axes.needs import check_groups
    from atoll.groups.hierarchy import arrange

    check_groups(groups, workers)
    replicas = arrange([""] * workers, groups).grouping.groups if groups > 1 else ()
    seen = _run(options.script, options.arguments, workers, replicas, (link, between or link))
    if options.as_json:
        print(json.dumps(_as_object(seen), indent=2))
        return
    for line in _lines(options.script, seen, workers, groups):
        print(line)


def _run(
    script: str, arguments: list[str], workers: int, replicas: Groups, rates: tuple[float, float]
) -> ObservedScript:
    from atoll.launch.worker import describe
    from atoll.memory.observing import EnoughSeen, Observation

    path = Path(script)
    if not path.is_file():
        raise UserError(f"{script}: {'is no file' if path.exists() else 'there is no such script'}")
    argv, first, out = sys.argv, sys.path[0], sys.stdout
    sys.argv, sys.path[0], sys.stdout = [script, *arguments], str(path.resolve().parent), sys.stderr
    try:
        with Observation(workers, replicas, *rates) as observation:
            runpy.run_path(script, run_name="__main__")
    except EnoughSeen:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise UserError(f"{script} ended by itself with status {end.code}") from None
    except AtollError:
        raise
    except Exception as error:
        print(describe(error, script), file=sys.stderr)
        raise RunError(f"{script} failed before its plan was known: {type(error).__name__}") from None
    finally:
        sys.argv, sys.path[0], sys.stdout = argv, first, out
    if observation.seen is None:
        raise UserError(
            f"{script} ended without a call of atoll.memory.fit, or of session.prepare with memory=...: "
            "there is no plan without budgets"
        )
    return observation.seen


def _lines(script: str, seen: ObservedScript, workers: int, groups: int) -> Iterator[str]:
    plan = seen.plan or seen.first
    predicted = plan.predicted
    yield f"{script}: {seen.budgets.describe()}"
    blocks = f"{plan.blocks} blocks of {format_bytes(plan.chunk_bytes)}"
    if plan.fits:
        yield f"  device      {blocks}: everything fits, nothing moves"
    else:
        yield f"  device      {blocks}: {plan.cache_blocks} of them a cache, {len(plan.resident)} chunks stay"
    yield f"  optimizer   {_steps_on(plan)}"
    sharding = "none: one member" if workers == 1 else f"{plan.sharding}: one of {workers} workers"
    sharding += f", in {groups} groups" if groups > 1 else ""
    yield f"  sharding    {sharding}"
    yield (
        f"  peaks       device {format_bytes(predicted.device_peak)}, "
        f"host {format_bytes(predicted.host_peak)}, disk {format_bytes(predicted.disk_peak)}"
    )
    moved = [
        f"{format_bytes(predicted.nbytes[way])} {name}"
        + (f" ({predicted.moves[way]} moves)" if way in predicted.moves else "")
        for way, name in _WAYS.items()
        if predicted.nbytes.get(way)
    ]
    yield f"  a step      {', '.join(moved) or 'no moves'}"
    if seen.plan is None or seen.as_run is None:
        yield "  time        not predicted: the script ended before its third step, which is recorded"
    else:
        yield (
            f"  time        {format_seconds(predicted.seconds)} a step, "
            f"{format_seconds(predicted.computing)} of it compute"
        )
        yield (
            f"  as run      chunks of {format_bytes(seen.first.chunk_bytes)}: "
            f"{format_seconds(seen.as_run.predicted.seconds)} predicted, "
            f"{format_seconds(seen.seconds)} measured"
        )
    yield f"  reason      {plan.reason}"
    yield f"  to pin it   {_pins(plan, seen.budgets.pins.resident)}"


def _steps_on(plan: MemoryPlan) -> str:
    if plan.fits:
        return "on the device"
    if not plan.steps_on_device:
        return "on the host"
    there = f"{len(plan.steps_on_device)} chunks, {plan.steps_share:g} of the trained bytes"
    return f"on the device for {there}, else on the host"


def _pins(plan: MemoryPlan, resident: float | None) -> str:
    """Return the keys of `[memory]` that pin this plan; `resident` is the pinned share, if any."""
    if plan.fits:
        return f"memory.chunk = {plan.chunk_bytes}"
    step = f"{plan.steps_share:g}" if plan.steps_on_device else "host"
    pins = f'memory.chunk = {plan.chunk_bytes}, memory.cache = {plan.cache_blocks}, memory.step = "{step}"'
    return pins if resident is None else f'{pins}, memory.resident = "{resident}"'


def _as_object(seen: ObservedScript) -> dict[str, Any]:
    plan = seen.plan or seen.first
    return {
        "budgets": msgspec.to_builtins(seen.budgets),
        "plan": msgspec.to_builtins(plan),
        "measured": seen.plan is not None,
        "as_run": None
        if seen.as_run is None
        else {
            "chunk_bytes": seen.first.chunk_bytes,
            "predicted_seconds": seen.as_run.predicted.seconds,
            "measured_seconds": seen.seconds,
        },
        "bandwidths": msgspec.to_builtins(seen.bandwidths),
    }
