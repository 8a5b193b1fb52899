"""Print the results in benchmarks/results as the tables of docs/benchmarks.md.

python benchmarks/tables.py [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import MIB, RESULTS, ROOT, milliseconds

Record = Mapping[str, Any]
VERDICTS = {None: "none", True: "met", False: "missed"}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first to the right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def where(record: Record) -> str:
    """What ran it, in a sentence."""
    it = record["machine"]
    quick = "A quick run, beside other work, only to show the form. " if record["quick"] else ""
    return (
        f"{quick}{record['date']}: {it['processor']}, {it['cores']} cores, {it['memory_gib']} GiB, "
        f"{it['system']} {it['kernel']}, Python {it['python']}, torch {it['torch']}."
    )


def ratios(record: Record) -> str:
    heads = [
        "case",
        "workers",
        "rival",
        "median ratio",
        "95 % bound",
        "p10",
        "p90",
        "step",
        "CPU time",
        "target",
    ]
    return table(heads, [_ratio_row(case) for case in record["cases"]])


def _ratio_row(case: Record) -> list[str]:
    numbers = [case["ratio"][key] for key in ("median", "bound95", "p10", "p90")]
    step = f"{milliseconds(case['seconds'])} / {milliseconds(case['rival_seconds'])}"
    own = [case["name"], str(case["workers"]), case["rival"]]
    return [
        *own,
        *(f"{number:.3f}" for number in numbers),
        step,
        f"{case['cpu_ratio']:.3f}",
        VERDICTS[case["met"]],
    ]


def step_costs(record: Record) -> str:
    """The ratios, the least CPU time of both, and by cause the microseconds of a step."""
    cases = record["cases"]
    causes = sorted({cause for case in cases for cause in case["causes"]})
    least = ", ".join(f"{case['least_cpu_ratio']:.3f} with {case['workers']}" for case in cases)
    heads = ["where", *(f"us, {case['workers']} workers" for case in cases)]
    rows = [
        [cause, *(f"{1e6 * case['causes'][cause]:.0f}" if cause in case["causes"] else "" for case in cases)]
        for cause in causes
    ]
    said = f"Least CPU time of any block, Atoll's over the rival's: {least}."
    return f"{ratios(record)}\n\n{said}\n\n{table(heads, rows)}"


def footprint(record: Record) -> str:
    heads = ["model", "optimizer", "workers", "peak, MiB", "formula, MiB", "off by", "rivals, MiB", "target"]
    return table(heads, [_footprint_row(case) for case in record["cases"]])


def _footprint_row(case: Record) -> list[str]:
    rivals = ", ".join(f"{name} {peak / MIB:.0f}" for name, peak in case["rivals"].items())
    own = [case["model"], case["optimizer"], str(case["workers"])]
    peaks = [f"{case['peak'] / MIB:.0f}", f"{case['formula'] / MIB:.0f}", f"{case['off']:+.1%}"]
    return [*own, *peaks, rivals, "met" if case["met"] else "missed"]


def memory(record: Record) -> str:
    """The steps, then what the plan said of them, then what was stepped during backward."""
    heads = [
        "case",
        "copies / compute",
        "to the device",
        "to the host",
        "chunk",
        "predicted",
        "measured",
        "off by",
        "target",
    ]
    rows = [_plan_row(case) for case in record["cases"] if "copies" in case]
    early = [case for case in record["cases"] if "room" in case]
    return "\n\n".join([ratios(record), table(heads, rows), *map(_early_words, early)])


def _early_words(case: Record) -> str:
    early = f"{case['stepped']:.1f} of {case['room']} chunks in a step, {case['rolled_back']} in vain in all"
    predicted, plain = milliseconds(case["predicted"]), milliseconds(case["plain"])
    return f"{case['name']}: {early}; {predicted} predicted; plain PyTorch {plain}."


def _plan_row(case: Record) -> list[str]:
    moved = [
        f"{case['step_nbytes'][way] / MIB:.1f} MiB in {case['step_moves'][way]}"
        for way in ("to_device", "to_host")
    ]
    chunk = f"{case['chunk_bytes'] / 2**10:.0f} KiB, {case['cache_blocks']} blocks"
    times = [milliseconds(case["predicted"]), milliseconds(case["seconds"]), f"{case['off']:+.1%}"]
    return [case["name"], f"{case['copies']:.2f}", *moved, chunk, *times, VERDICTS[case["predicted_met"]]]


def served(record: Record) -> str:
    """The exchanges, then the workers of uneven speed."""
    exchanges = {**record, "cases": [case for case in record["cases"] if "ratio" in case]}
    heads = ["consistency", "samples/s", "by worker", "sum of their speeds", "part of it", "target"]
    rows = [_speed_row(case) for case in record["cases"] if "speeds" in case]
    return f"{ratios(exchanges)}\n\n{table(heads, rows)}"


def _speed_row(case: Record) -> list[str]:
    each = ", ".join(f"{speed:.0f}" for speed in case["speeds"])
    sums = [f"{sum(case['speeds']):.0f}", each, f"{sum(case['alone']):.0f}", f"{case['part']:.3f}"]
    return [case["consistency"], *sums, VERDICTS[case["met"]]]


def consistency(record: Record) -> str:
    heads = ["task", "consistency", "held-out loss", "by seed", "against bsp", "steps", "staleness", "target"]
    return table(heads, [_consistency_row(case) for case in record["cases"]])


def _consistency_row(case: Record) -> list[str]:
    seeds = ", ".join(f"{loss:.4f}" for loss in case["held_out"])
    steps = "{} to {}".format(*case["steps"])
    numbers = [f"{case['mean']:.4f}", seeds, f"{case['off']:+.1%}", steps, f"{case['staleness']:.2f}"]
    return [case["task"], case["consistency"], *numbers, VERDICTS[case["met"]]]


def staleness(record: Record) -> str:
    heads = [
        "case",
        "held-out loss",
        "by seed",
        "against bsp",
        "steps",
        "staleness",
        "the slowest's",
        "target",
    ]
    return table(heads, [_staleness_row(case) for case in record["cases"]])


def _staleness_row(case: Record) -> list[str]:
    seeds = ", ".join(f"{loss:.4f}" for loss in case["held_out"])
    steps = "{} to {}".format(*case["steps"])
    stale = [f"{case[key]:.2f}" for key in ("staleness", "slowest")]
    return [
        case["name"],
        f"{case['mean']:.4f}",
        seeds,
        f"{case['off']:+.1%}",
        steps,
        *stale,
        VERDICTS[case["met"]],
    ]


def grouped_staleness(record: Record) -> str:
    heads = ["strategy", "case", "held-out loss", "by seed", "against bsp", "steps", "in groups", "staleness"]
    heads += ["the slow group's", "95 % at most", "most", "target"]
    return table(heads, [_grouped_staleness_row(case) for case in record["cases"]])


def _grouped_staleness_row(case: Record) -> list[str]:
    seeds = ", ".join(f"{loss:.4f}" for loss in case["held_out"])
    steps = "{} to {}".format(*case["steps"])
    losses = [f"{case['mean']:.4f}", seeds, f"{case['off']:+.1%}", steps]
    stale = [f"{case[key]:.2f}" for key in ("staleness", "slowest", "slowest_p95", "slowest_most")]
    grouped = f"{case['grouped']:.0%}" if case["strategy"] == "ps-hra" else ""
    return [case["strategy"], case["name"], *losses, grouped, *stale, VERDICTS[case["met"]]]


def lab(record: Record) -> str:
    heads = ["what", "asked", "measured", "off by", "allowed", "target"]
    return table(heads, [_lab_row(case) for case in record["cases"]])


def _lab_row(case: Record) -> list[str]:
    shown = [f"{case[key]:.5g} {case['unit']}" for key in ("asked", "measured")]
    allowed = "" if case["limit"] is None else f"{case['limit']:.3g}"
    return [case["name"], *shown, f"{case['off']:+.3g} {case['off_unit']}", allowed, VERDICTS[case["met"]]]


def survival(record: Record) -> str:
    heads = ["system", "kills", "steps/s", "no step for", "at most", "back after", "lost for each kill"]
    heads += ["ended by themselves", "unlike parameters"]
    return table(heads, [_survival_row(case) for case in record["cases"]])


def _survival_row(case: Record) -> list[str]:
    back = f"{case['back_median']:.1f} s" if case["back_median"] is not None else "never"
    if case["not_back"]:
        back += f" ({case['not_back']} not before the next kill)"
    lost = f"{case['lost_steps_for_each_kill']:.0f} steps, {case['lost_seconds_for_each_kill']:.1f} s"
    stalls = [f"{case['stall_median']:.2f} s", f"{case['stall_most']:.2f} s"]
    own = [case["name"], str(case["kills"]), f"{case['steps_per_second']:.0f}", *stalls]
    return [*own, back, lost, str(case["ended_by_themselves"]), str(case["unequal_steps"])]


def readiness(record: Record) -> str:
    """Steps, what confirms them, and memory."""
    times = {**record, "cases": [case for case in record["cases"] if "confirmation" in case]}
    heads = [
        "case",
        "workers",
        "a confirmation",
        "p90",
        "its CPU time",
        "for each step",
        "of all time",
        "heartbeats",
    ]
    rows = [_confirmation_row(case) for case in times["cases"]]
    peaks = ["model", "optimizer", "workers", "ring", "peak, MiB", "formula, MiB", "off by", "target"]
    held = [_peak_row(case) for case in record["cases"] if "peak" in case]
    return f"{ratios(times)}\n\n{table(heads, rows)}\n\n{table(peaks, held)}"


def _confirmation_row(case: Record) -> list[str]:
    it = case["confirmation"]
    times = [f"{1e6 * it[key]:.0f} us" for key in ("seconds", "p90", "cpu_seconds")]
    own = [case["name"], str(case["workers"]), *times, f"{it['confirmations']:g}", f"{it['share']:.2%}"]
    return [*own, f"{it['heartbeats']:.2%} of a core"]


def _peak_row(case: Record) -> list[str]:
    own = [case["model"], case["optimizer"], str(case["workers"]), case["ring"]]
    peaks = [f"{case['peak'] / MIB:.0f}", f"{case['formula'] / MIB:.0f}", f"{case['off']:+.1%}"]
    return [*own, *peaks, VERDICTS[case["met"]]]


def stragglers(record: Record) -> str:
    """Samples/s, the time to DDP's loss, and the groups of each contestant's last round."""
    heads = [
        "workers",
        "contestant",
        "samples/s",
        "DDP's",
        "ratio",
        "least to most",
        "at most",
        "start",
        "DDP's",
    ]
    speeds = table([*heads, "target"], [_uneven_row(case) for case in record["cases"]])
    learnt = [case for case in record["cases"] if "to_loss" in case]
    heads = [
        "workers",
        "contestant",
        "DDP's held-out loss",
        "DDP's time",
        "part of it",
        "least to most",
        "target",
    ]
    losses = table(heads, [_to_loss_row(case) for case in learnt])
    heads = [
        "workers",
        "contestant",
        "group",
        "steps",
        "staleness",
        "95 % at most",
        "most",
        "computing",
        "ring",
    ]
    heads += ["exchange", "other"]
    groups = [row for case in record["cases"] for row in _group_rows(case)]
    return "\n\n".join([speeds, losses, table(heads, groups)])


def _uneven_row(case: Record) -> list[str]:
    it = case["ratio"]
    speeds = [f"{case['samples_per_second']:.1f}", f"{case['rival_samples_per_second']:.1f}"]
    ratio = [f"{it['median']:.2f}", f"{it['least']:.2f} to {it['most']:.2f}", f"{case['most']:.2f}"]
    starts = [f"{case['start']:.1f} s", f"{case['rival_start']:.1f} s"]
    return [case["name"], case["contestant"], *speeds, *ratio, *starts, VERDICTS[case["met"]]]


def _to_loss_row(case: Record) -> list[str]:
    it = case["to_loss"]
    losses = f"{min(it['rival_held_out']):.3f} to {max(it['rival_held_out']):.3f}"
    own = [case["name"], case["contestant"], losses, f"{it['rival_seconds']:.0f} s"]
    part = it["part"]
    shown = (
        ["never", ""]
        if part is None
        else [f"{part['median']:.2f}", f"{part['least']:.2f} to {part['most']:.2f}"]
    )
    if it["not_reached"]:
        shown[1] += f" ({it['not_reached']} of {len(it['parts'])} not)"
    return [*own, *shown, VERDICTS[it["met"]]]


def _group_rows(case: Record) -> list[list[str]]:
    rows, groups = [], case["each"][-1]["groups"]
    whole = sum(group["seconds"] for group in groups)
    for group in (group for group in groups if group["seconds"] > 0.1 * whole):  # not those of the probe
        stale = group.get("staleness") or {}
        staleness = [f"{stale[key]:g}" if key in stale else "" for key in ("median", "p95", "most")]
        waits = [group[part] / group["seconds"] for part in ("ring", "exchange", "other")]
        own = [case["name"], case["contestant"], " ".join(map(str, group["workers"])), str(group["steps"])]
        rows.append([*own, *staleness, *(f"{part:.0%}" for part in (1 - sum(waits), *waits))])
    return rows


def links(record: Record) -> str:
    """Samples/s of each way to group, and what the joint chooser said in the last round."""
    heads = ["grouped by", "samples/s", "joint's ratio to it", "least to most", "groups of the last round"]
    said = record["cases"][-1]["each"][-1]
    told = [f"> links: {line}" for line in said["links"][:1]] + [f"> groups: {said['groups'][0]}"]
    return "\n\n".join([table([*heads, "target"], map(_way_row, record["cases"])), "\n>\n".join(told)])


def _way_row(case: Record) -> list[str]:
    it = case["joint_ratio"]
    groups = "; ".join(line.partition(" (")[0] for line in case["each"][-1]["groups"] if "stay" not in line)
    ratio = [f"{it['median']:.2f}", f"{it['least']:.2f} to {it['most']:.2f}"]
    shown = groups.replace("workers ", "").replace(" | ", ", ")
    return [case["name"], f"{case['samples_per_second']:.1f}", *ratio, shown, VERDICTS[case["met"]]]


def peers(record: Record) -> str:
    """Samples/s of each part's contestants, the device's time, and what DistributedDataParallel hid."""
    heads = [
        "what",
        "contestant",
        "samples/s",
        "of no synchronisation",
        "least to most",
        "of DDP",
        "exchange",
    ]
    heads += ["waiting", "staleness", "most", "target"]
    speeds = table(heads, map(_peers_row, record["cases"]))
    heads = [
        "what",
        "link",
        "a step's mean",
        "full exchange",
        "all-reduce",
        "DDP's bare step",
        "hidden by DDP",
    ]
    exchanges = [_exchange_row(case) for case in record["cases"] if "hidden" in case]
    return f"{speeds}\n\n{table(heads, exchanges)}"


def _peers_row(case: Record) -> list[str]:
    last = case["each"][-1]
    own = [case["about"], case["contestant"], f"{case['samples_per_second']:.1f}"]
    of_alone, of_ddp = case["of_alone"], case["of_ddp"]
    ratios = ["", ""]
    if of_alone:
        ratios = [f"{of_alone['median']:.3f}", f"{of_alone['least']:.3f} to {of_alone['most']:.3f}"]
    device = ["", "", "", ""]
    if stale := last["staleness"]:
        device = [f"{last['exchange_share']:.2%}", f"{last['waiting_share']:.1%}", f"{stale['mean']:.2f}"]
        device.append(str(stale["most"]))
    missed = [name for name, verdict in case.get("verdicts", {}).items() if not verdict["met"]]
    verdict = f"missed: {', '.join(missed)}" if missed else VERDICTS[case.get("met")]
    return [*own, *ratios, f"{of_ddp['median']:.2f}" if of_ddp else "", *device, verdict]


def _exchange_row(case: Record) -> list[str]:
    link, it = case["link"], case["exchanges"]
    times = [case["computing"]["mean"], it["full"], it["all-reduce"], it["bare step"]]
    own = [case["about"], f"{link['rate']}, {link['delay']}, {link['tcp']}", *map(milliseconds, times)]
    return [*own, f"{case['hidden']['median']:.0%}"]


def peers_rivals(record: Record) -> str:
    heads = ["peers", "system", "to the loss", "peers' time to it", "a step", "last loss, median", "runs"]
    return table(heads, map(_rival_row, record["cases"]))


def _rival_row(case: Record) -> list[str]:
    own, runs = [case["setting"], case["system"]], str(len(case["held_out"]))
    if case["failed"]:
        runs += f"; {len(case['failed'])} failed: {case['failed'][0]}"
    if case["seconds_step"] is None:
        return [*own, "", "", "", "", runs]
    to = f"{case['seconds']:.1f} s" if case["seconds"] is not None else "never"
    if case["not_reached"]:
        to += f" ({case['not_reached']} not)"
    ratio = f"{case['peers_ratio']['median']:.2f}" if case["peers_ratio"] else ""
    last = f"{median(case['held_out']):.4f}"
    return [*own, to, ratio, milliseconds(case["seconds_step"]), last, runs]


def memory_rivals(record: Record) -> str:
    """Ratios: Atoll's step over the rival's."""
    rivals = list(dict.fromkeys(name for case in record["cases"] for name in case["against"]))
    own = ["system", "workers", "a step", "CPU time", "a process, MiB", "arenas, MiB", "losses within"]
    heads = [*own, *rivals, "target"]
    return table(heads, [_sharded_row(case, rivals) for case in record["cases"]])


def _sharded_row(case: Record, rivals: Sequence[str]) -> list[str]:
    own = [case["system"], str(case["workers"])]
    if case["seconds"] is None:
        return [*own, f"did not run: {case['failed'][0]}", "", "", "", "", *("" for _ in rivals), ""]
    peaks = f"{case['peak'] / MIB:.0f}", " + ".join(f"{n / MIB:.0f}" for n in case["arenas"].values())
    off = "" if case["off"] is None else f"{case['off']:.1g}" + ("" if case["alike"] else ", unlike")
    against = [f"{case['against'][name]['median']:.2f}" if name in case["against"] else "" for name in rivals]
    verdict = "" if case["met"] is None else VERDICTS[case["met"]]
    times = milliseconds(case["seconds"]), milliseconds(case["cpu"])
    return [*own, *times, *peaks, off, *against, verdict]


def memory_gpu(record: Record) -> str:
    heads = ["model", "system", "tokens/s", "to device, MiB", "at best", "to host, MiB", "idle", "GPU, MiB"]
    gpu = next((each["device"] for case in record["cases"] for each in case["each"]), "")
    rows = [_gpu_row(case) for case in record["cases"]]
    return f"GPU: {gpu}.\n\n{table([*heads, 'host, MiB'], rows)}"


def _gpu_row(case: Record) -> list[str]:
    own = [case["model"], case["system"]]
    if not case["each"]:
        return [*own, f"did not run: {case['failed'][0]}", *[""] * 6]

    def mib(nbytes: float | None) -> str:
        return "" if nbytes is None else f"{nbytes / MIB:.0f}"

    ways, best = case["copied"] or {}, case["figures"].get("optimum_nbytes")
    idle = "" if case["idle"] is None else f"{case['idle']:.0%}"
    moved = mib(ways.get("to_device")), mib(best), mib(ways.get("to_host"))
    peaks = mib(case["device_peak"]), mib(case["host_peak"])
    return [*own, f"{case['tokens_second']:.0f}", *moved, idle, *peaks]


def udp(record: Record) -> str:
    """Flat out, then at 1 Gb/s."""
    heads = [
        "flat out",
        "Gb/s",
        "least to most",
        "lost",
        "sender's core",
        "receiver's",
        "Gb/s a core",
        "target",
    ]
    flat = [_engine_row(case) for case in record["cases"] if not case["paced"]]
    paced = [_engine_row(case)[:-1] for case in record["cases"] if case["paced"]]
    return f"{table(heads, flat)}\n\n{table(['at 1 Gb/s', *heads[1:-1]], paced)}"


def _engine_row(case: Record) -> list[str]:
    rates = case["gbps"]
    shown = [f"{rates['median']:.2f}", f"{rates['least']:.2f} to {rates['most']:.2f}", f"{case['lost']:.2%}"]
    shares = [f"{case['sender']:.0%}", f"{case['receiver']:.0%}", f"{case['per_core']:.1f}"]
    target = f"{case['target']:g}: {VERDICTS[case['met']]}" if case["target"] else VERDICTS[case["met"]]
    return [case["name"], *shown, *shares, target]


def fec(record: Record) -> str:
    """Encoding and restoring, by how many datagrams of parity, or lost ones, to 32 of data."""
    heads = ["of 32", "", "with", "MB/s", "us", "to the best rival"]
    return table(heads, map(_fec_row, record["cases"]))


def _fec_row(case: Record) -> list[str]:
    ratio = case["against_best_rival"]
    shown = [
        f"{case['median'] / 1e6:,.0f}",
        f"{case['microseconds']:.1f}",
        "" if ratio is None else f"{ratio:.1f}",
    ]
    return [case["what"], str(case["parity"]), case["contestant"], *shown]


def transport(record: Record) -> str:
    """Each link's contestants: times until usable against the bytes at the link's rate and a round trip."""
    heads = ["link", "by", "until usable", "ratio", "worst", "sent again", "transfers", "target"]
    return table(heads, map(_transport_row, record["cases"]))


def incast(record: Record) -> str:
    heads = ["eight answers of", "by", "slowest, median", "ratio", "p10", "p90", "worst", "rounds", "target"]
    rows = []
    for case in record["cases"]:
        slowest = sorted(case["slowest"])
        times = [f"{case['ratio'] * case['least']:.3f} s", f"{case['ratio']:.2f}"]
        spread = [f"{each:.2f}" for each in (*case["spread"], case["worst_ratio"])]
        verdict = VERDICTS[case["met"]]
        rows.append([f"{case['size'] / 1e6:g} MB", case["way"], *times, *spread, str(len(slowest)), verdict])
    return table(heads, rows)


def ring_order(record: Record) -> str:
    heads = ["workers", "step by rank", "step as chosen", "ratio", "chosen", "joined after", "target"]
    rows = []
    for case in record["cases"]:
        steps = [f"{1e3 * median(case['seconds'][order]):.0f} ms" for order in ("natural", "measured")]
        joined = f"{case['joined']['measured']:.1f} s / {case['joined']['natural']:.1f} s"
        chosen = case["decision"][0].partition(": ")[0] if case["decision"] else "by rank"
        if chosen == "natural":
            chosen = ": ".join(case["decision"][0].split(": ")[:2])
        rows.append([case["name"], *steps, f"{case['ratio']:.2f}", chosen, joined, VERDICTS[case["met"]]])
    return table(heads, rows)


def strangers(record: Record) -> str:
    heads = [
        "attack",
        "rate of the attacked run to the other's",
        "pairs of rounds",
        "CPU ms an iteration",
        "a client is let in after",
        "target",
    ]
    rows = []
    for case in record["cases"]:
        pairs = ", ".join(f"{each:.2f}" for each in case["ratios"])
        spent = [median([each["milliseconds"][at] for each in case["rounds"]]) for at in (0, 1)]
        waits = [wait for each in case["rounds"] for wait in each["let_in"]]
        let_in = f"{median(waits):.2f} s, at most {max(waits):.2f} s" if waits else ""
        target = VERDICTS[case["met"]] + ("" if case["target"] is None else f" ({case['target']:g})")
        rows.append(
            [case["case"], f"{case['ratio']:.3f}", pairs, f"{spent[0]:.1f} / {spent[1]:.1f}", let_in, target]
        )
    return table(heads, rows)


def fairness(record: Record) -> str:
    heads = ["flows", "queue", "Jain's index", "least", "most", "Mbit/s, median", "queued, median", "target"]
    rows = []
    for case in record["cases"]:
        shares = (share * 200 for share in case["share_of_link"])
        rates = ", ".join(f"{flow} {rate:.0f}" for flow, rate in zip(case["flows"], shares, strict=True))
        delays = ", ".join(f"{flow} {1e3 * delay:.0f} ms" for flow, delay in case["queueing_delay"].items())
        index = [f"{each:.2f}" for each in (case["jain"], *case["spread"])]
        verdict = VERDICTS[case["met"]]
        rows.append([case["mix"], f"{case['queue']:g}", *index, rates, delays, verdict])
    return table(heads, rows)


def _transport_row(case: Record) -> list[str]:
    way, _, by = case["name"].partition(": ")
    times = [f"{case['median']:.3f} s", f"{case['ratio']:.2f}", f"{case['worst_ratio']:.2f}"]
    return [way, by, *times, str(case["again"]), str(case["transfers"]), VERDICTS[case["met"]]]


def tunnel(record: Record) -> str:
    """Messages and steps, by link and contestant."""
    heads = ["link", "by", "100 B there and back", "99 %", "such messages, many at once", "step", "90 %"]
    return table(heads, map(_tunnel_row, record["cases"]))


def _tunnel_row(case: Record) -> list[str]:
    times = [f"{case[name]:.1f} ms" for name in ("ping", "ping_p99", "step", "step_p90")]
    return [case["link"], case["kind"], *times[:2], f"{case['messages']:,}/s", *times[2:]]


def wan(record: Record) -> str:
    """Each link's contestants, a row for each link; below it what ours were to reach and did not."""
    cases = record["cases"]
    contestants = list(dict.fromkeys(case["contestant"] for case in cases))
    links: dict[str, dict[str, Record]] = {}
    for case in cases:
        links.setdefault(case["name"].rsplit(": ", 1)[0], {})[case["contestant"]] = case
    heads = ["link: median / 99th percentile", "least", *contestants, "short", "to the best", "target"]
    return table(heads, [_wan_row(link, contestants, made) for link, made in links.items()])


def _wan_row(link: str, contestants: Sequence[str], made: Mapping[str, Record]) -> list[str]:
    shown = [_wan_ratios(made.get(contestant)) for contestant in contestants]
    ours = made.get("ltp", {})
    best = ours.get("best", {})
    to_it = " / ".join(f"{best[key]['to_it']:.2f}" for key in ("median", "p99") if key in best)
    missed = [name for name, met in ours.get("verdicts", {}).items() if not met]
    verdict = f"missed: {', '.join(missed)}" if missed else VERDICTS[ours.get("met")]
    least = f"{next(iter(made.values()))['least']:.3f} s"
    short = f"{ours['short']} of {ours['transfers']}" if ours else ""
    return [link, least, *shown, short, to_it, verdict]


def _wan_ratios(case: Record | None) -> str:
    if case is None:
        return ""
    if case["transfers"]:
        return f"{case['ratio']:.2f} / {case['p99_ratio']:.2f}"
    return f"> {case['more_than'] / case['least']:.1f}" if case["more_than"] else "lost"


def muon(record: Record) -> str:
    """The ratios, and how even the owners' work is."""
    beside = [case for case in record["cases"] if "rival" in case]
    (owners,) = (case for case in record["cases"] if "rival" not in case)
    busiest = f"The busiest of {owners['workers']} owners in tiers: {owners['ratio']:.3f} of the mean."
    return f"{ratios({**record, 'cases': beside})}\n\n{busiest}"


def losstime(record: Record) -> str:
    """Each way of training: the time to the loss with which DDP ends, and how its own runs end."""
    heads = [
        "trained by",
        "to DDP's loss",
        "part of DDP's time",
        "rounds that came to it",
        "all samples",
        "held-out loss",
    ]
    return table(heads, [_losstime_row(case) for case in record["cases"]])


def _losstime_row(case: Record) -> list[str]:
    to_it = "" if case["seconds_to_loss"] is None else f"{case['seconds_to_loss']:.1f} s"
    part = "" if case["of_ddp"] is None else f"{case['of_ddp']:.2f}"
    reached = f"{case['reached']} of {case['rounds']}"
    return [case["name"], to_it, part, reached, f"{case['seconds']:.1f} s", f"{case['held_out']:.3f}"]


def uneven(record: Record) -> str:
    """Workers of unlike speed: the part of the sum of their speeds that each way of training uses."""
    heads = [
        "workers",
        "DDP",
        "ring, even",
        "ring, auto",
        "least to most",
        "server, auto",
        "target",
        "over DDP",
    ]
    return table([*heads, "over even"], [_by_speed_row(case) for case in record["cases"]])


def _by_speed_row(case: Record) -> list[str]:
    turns, target = case["all"]["auto"], case["target"]
    served = f"{case['server']:.3f}" if "server" in case else ""
    goal = "none"
    if target is not None:
        is_met = min(case["auto"], case.get("server", 1.0)) >= target
        goal = f"{target:.2f}: {'met' if is_met else 'missed'}"
    used = [f"{case[kind]:.3f}" for kind in ("DDP", "even", "auto")]
    over = [f"{case['over DDP']:.2f}x", f"{case['over even']:.3f}x"]
    return [case["case"], *used, f"{min(turns):.3f} to {max(turns):.3f}", served, goal, *over]


def tables(folder: Path) -> dict[str, str]:
    """Each benchmark's tables, with what ran it; those without results are left out."""
    shown = {}
    shows = {
        "overhead": ratios,
        "ring": ratios,
        "muon": muon,
        "ring_order": ring_order,
        "step": step_costs,
        "footprint": footprint,
        "server": served,
        "consistency": consistency,
        "staleness": staleness,
        "staleness-ps-hra": grouped_staleness,
        "staleness-peers": staleness,
        "lab": lab,
        "survival": survival,
        "readiness": readiness,
        "journal": ratios,
        "stragglers": stragglers,
        "losstime": losstime,
        "uneven": uneven,
        "links": links,
        "udp": udp,
        "fec": fec,
        "transport": transport,
        "incast": incast,
        "fairness": fairness,
        "strangers": strangers,
        "tunnel": tunnel,
        "wan": wan,
        "peers": peers,
        "peers_rivals": peers_rivals,
        "memory": memory,
        "memory_rivals": memory_rivals,
        "memory_gpu": memory_gpu,
    }
    for name, show in shows.items():
        path = folder / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text(encoding="utf-8"))
            shown[name] = f"{where(record)}\n\n{show(record)}"
    return shown


def write(shown: Mapping[str, str], document: Path) -> None:
    """Put the tables between their marks; a mark that is missing is an error."""
    text = document.read_text(encoding="utf-8")
    for name, body in shown.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        text, count = marks.subn(lambda found, body=body: f"{found[1]}\n{body}\n\n{found[2]}", text)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{document}: holds {count} places marked <!-- {name} -->, in place of one")
    document.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put them into docs/benchmarks.md")
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    shown = tables(args.folder)
    if args.write:
        write(shown, ROOT / "docs" / "benchmarks.md")
    else:
        print("\n\n".join(shown.values()) or f"{args.folder}: no results; run make bench")
    return 0


if __name__ == "__main__":
    sys.exit(main())
