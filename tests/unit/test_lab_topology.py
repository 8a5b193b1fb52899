"""A lab's file: what a right one comes to, and the one line that each mistake in a wrong one gets."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from atoll.cli.app import main
from atoll.core.errors import ConfigError
from atoll.core.units import format_rate, parse_bytes, parse_rate, parse_seconds
from atoll.lab.topology import HubPlace, Phase, Site, Topology, load_topology, parse_topology

EXAMPLES = Path(__file__).parents[2] / "examples" / "lab"

SITES = '[[site]]\nname = "paris"\n[[site]]\nname = "berlin"\n'
LINK = SITES + '[[link]]\nbetween = ["paris", "berlin"]\nrate = "8Mbit/s"\ndelay = "20ms"\n'
NO_LINK = SITES + "[[link]]\n"
ONE_WAY = SITES + '[[link]]\nfrom = "paris"\nto = "berlin"\nrate = "8Mbit/s"\ndelay = "20ms"\n'


def phases(text: str) -> tuple[Phase, ...]:
    return parse_topology(text).links[0].phases


def first(**keys: object) -> Phase:
    """The first phase of a link with these keys (their values written as JSON, which TOML shares)."""
    lines = [f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in keys.items()]
    return phases(ONE_WAY + "".join(lines))[0]


def test_the_defaults() -> None:
    topology = parse_topology(LINK)
    assert topology.seed == 0
    assert topology.hub is None
    assert topology.sites == (
        Site("paris", 1, workers=1, speeds=(1.0,), address="10.77.1.1"),
        Site("berlin", 2, workers=1, speeds=(1.0,), address="10.77.2.1"),
    )
    assert [(link.source, link.target) for link in topology.links] == [(0, 1), (1, 0)]
    expected = Phase(
        at=0.0, rate=1e6, delay=0.02, jitter=0.0, distribution="normal", queue=2**16, loss=0.0, burst=1.0,
        reorder=0.0, reorder_by=0.002, duplicate=0.0, corrupt=0.0, down=False,
    )  # fmt: skip
    assert [link.phases for link in topology.links] == [(expected,), (expected,)]


def test_every_key_of_a_link() -> None:
    phase = first(
        jitter="2ms", distribution="pareto", queue="50ms", loss=0.03, burst=8, reorder=0.01, reorder_by="1ms",
        duplicate=0.001, corrupt=1e-4,
    )  # fmt: skip
    assert phase == Phase(0.0, 1e6, 0.02, 0.002, "pareto", 50_000, 0.03, 8.0, 0.01, 0.001, 0.001, 1e-4, False)


def test_one_direction_alone_and_two_that_differ() -> None:
    back = '[[link]]\nfrom = "berlin"\nto = "paris"\nrate = "1Mbit/s"\n'
    links = parse_topology(ONE_WAY + back).links
    assert [(link.source, link.target, link.phases[0].rate) for link in links] == [
        (0, 1, 1e6),
        (1, 0, 1.25e5),
    ]
    assert len(parse_topology(ONE_WAY).links) == 1


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({}, 2**16),  # 20 ms at 1 MB/s are 20 kB: the least default
        ({"delay": "1s"}, 1_000_000),  # one bandwidth-delay product
        ({"queue": "5MB"}, 5_000_000),
        ({"queue": 3000}, 3000),
        ({"queue": "250ms"}, 250_000),
    ],
)
def test_the_queue_is_a_size_or_a_time_or_the_bandwidth_delay_product(
    keys: dict[str, object], size: int
) -> None:
    delay = f'delay = "{keys.pop("delay", "20ms")}"\n'
    lines = "".join(f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in keys.items())
    assert phases(ONE_WAY.replace('delay = "20ms"\n', delay) + lines)[0].queue == size


def test_a_queue_given_as_a_time_and_the_defaults_follow_a_change() -> None:
    text = ONE_WAY + 'queue = "50ms"\n[[link.change]]\nat = "1s"\nrate = "80Mbit/s"\ndelay = "100ms"\n'
    before, after = phases(text)
    assert (before.queue, after.queue) == (50_000, 500_000)
    assert (before.reorder_by, after.reorder_by) == (0.002, pytest.approx(0.01))


def test_changes_and_outages_become_phases_in_order() -> None:
    text = ONE_WAY + (
        '[[link.change]]\nat = "10s"\nloss = 0.1\n[[link.change]]\nat = 31\nrate = "4Mbit/s"\n'
        '[[link.outage]]\nat = "30s"\nfor = "2s"\n[[link.outage]]\nat = "32s"\nfor = 1\n[[link.outage]]\n'
        'at = "1min"\nfor = "500ms"\n'
    )
    told = [(phase.at, phase.rate, phase.loss, phase.down) for phase in phases(text)]
    assert told == [
        (0.0, 1e6, 0.0, False),
        (10.0, 1e6, 0.1, False),
        (30.0, 1e6, 0.1, True),
        (31.0, 5e5, 0.1, True),  # a change in the middle of an outage; at 32 nothing becomes different
        (33.0, 5e5, 0.1, False),
        (60.0, 5e5, 0.1, True),
        (60.5, 5e5, 0.1, False),
    ]


def test_an_outage_from_the_start() -> None:
    told = [(phase.at, phase.down) for phase in phases(ONE_WAY + "[[link.outage]]\nat = 0\nfor = 2\n")]
    assert told == [(0.0, True), (2.0, False)]


def test_times_that_are_equal_for_a_reader_are_equal() -> None:
    """0.1 + 0.2 is not 0.3 in floating point; a phase of 10^-17 s would be nobody's wish."""
    text = ONE_WAY + '[[link.change]]\nat = 0.3\nloss = 0.1\n[[link.outage]]\nat = 0.1\nfor = "200ms"\n'
    assert [phase.at for phase in phases(text)] == [0.0, 0.1, 0.3]


def test_a_change_that_changes_nothing_makes_no_phase() -> None:
    assert len(phases(ONE_WAY + '[[link.change]]\nat = "1s"\nrate = "8000kbit/s"\n')) == 1


def test_workers_speeds_and_hub() -> None:
    topology = parse_topology(
        'seed = 9223372036854775807\n[[site]]\nname = "a"\nworkers = 3\nspeed = [1, 0.5, 0.25]\n'
        '[[site]]\nname = "b-2"\nworkers = 2\nspeed = 0.1\n[[site]]\nname = "hubs"\nworkers = 0\n'
        '[hub]\nsite = "hubs"\nshards = 0\n'
    )
    assert [site.speeds for site in topology.sites] == [(1.0, 0.5, 0.25), (0.1, 0.1), ()]
    assert topology.hub == HubPlace(site=2, shards=0)
    assert topology.seed == 2**63 - 1
    assert parse_topology(SITES + '[hub]\nsite = "berlin"\n').hub == HubPlace(site=1, shards=1)
    text = '[hub]\nsite = "paris"\ngroups = 2\ngroup_by = "site"\ngroup_links = "2s"\n'
    assert parse_topology(SITES + text).hub == HubPlace(0, 1, "2", "site", 2.0)


def test_the_examples() -> None:
    found = {path.stem: load_topology(path) for path in EXAMPLES.glob("*.toml")}
    assert set(found) == {"two-sites", "three-continents", "bad-link", "two-by-three"}
    clean = found["two-sites"].links[0].phases
    assert [(phase.rate, phase.loss) for phase in clean] == [(1.25e8, 0.0)]
    assert len(found["three-continents"].sites) == 3
    bad = found["bad-link"].links[0].phases[0]
    assert (bad.delay, bad.loss, bad.burst) == (0.15, 0.03, 8.0)


def test_a_topology_goes_to_another_process_as_json() -> None:
    topology = load_topology(EXAMPLES / "three-continents.toml")
    assert msgspec.json.decode(msgspec.json.encode(topology), type=Topology) == topology


# What is wrong with a file, as the error says it after the file's name.
WRONG = [
    ("", "names no site; write [[site]] and below it name ="),
    ("# only a comment\n", "names no site"),
    ("[[site]\n", "not TOML: "),
    ("seed = 1\nseed = 2\n", "not TOML: "),
    (f"seed = {'9' * 5000}\n", "not TOML: "),
    (f"seed = {'[' * 5000}{']' * 5000}\n", "not TOML"),
    # Keys and tables
    ("[[sites]]\n", "no key 'sites'; did you mean 'site'?"),
    ("[[site]]\nname = 'a'\nworker = 2\n", "site 1: no key 'worker'; did you mean 'workers'?"),
    (LINK + "los = 0.1\n", "link 1: no key 'los'; did you mean 'loss'?"),
    (LINK + "mtu = 9000\n", "link 1: no key 'mtu'; known: between, from, to, rate, "),
    (LINK + '"two\\nlines" = 1\n', "link 1: no key 'two\\nlines'; known: "),
    (LINK + "'" + "k" * 5000 + "' = 1\n", "link 1: no key 'kkkkk"),
    ("[site]\nname = 'a'\n", "site: write each one as [[site]], in two brackets"),
    ("site = [1, 2]\n", "site: write each one as [[site]], in two brackets"),
    (SITES + "[link]\n", "link: write each one as [[link]], in two brackets"),
    ("hub = 'paris'\n" + SITES, "hub: 'paris' stands where a table should"),
    # Seed, hub
    ("seed = -1\n" + SITES, "seed: -1 is not a whole number from 0 to 2^63 - 1"),
    ("seed = 1.5\n" + SITES, "seed: 1.5 is not a whole number"),
    (
        'congestion_control = "Cubic!"\n' + SITES,
        "congestion_control: 'Cubic!' is not TCP's congestion control",
    ),
    (SITES + '[hub]\nsite = "paris"\npatience = 0\n', "hub: patience: 0: must be more than 0"),
    ("congestion_control = 1\n" + SITES, "congestion_control: 1 is not TCP's congestion control"),
    ("seed = true\n" + SITES, "seed: True is not a whole number"),
    (f"seed = 0x{'f' * 5000}\n" + SITES, "seed: a number of over 30 digits is not a whole number"),
    (SITES + "[hub]\n", 'hub: names no site; write site = "paris"'),
    (SITES + "[hub]\nsites = 'paris'\n", "hub: no key 'sites'; did you mean 'site'?"),
    (SITES + "[hub]\nsite = 'brelin'\n", "hub: site: no site is named 'brelin'; did you mean 'berlin'?"),
    (SITES + "[hub]\nsite = 'paris'\nshards = -1\n", "hub: shards: -1 is not a whole number from 0 to 64"),
    (
        SITES + "[hub]\nsite = 'paris'\ngroups = 3\n",
        "hub: groups: 3 is not a number of groups; write one from 1 to 2",
    ),
    (SITES + "[hub]\nsite = 'paris'\ngroups = 'all'\n", "hub: groups: 'all' is not a number of groups"),
    (SITES + "[hub]\nsite = 'paris'\nshards = 0\ngroups = 2\n", "hub: groups: groups meet at shards"),
    (SITES + "[hub]\nsite = 'paris'\ngroup_by = 'site'\n", "hub: group_by: says how workers are grouped"),
    (
        SITES + "[hub]\nsite = 'paris'\ngroups = 2\ngroup_by = 'sites'\n",
        "hub: group_by: no such choice 'sites'; did you mean 'site'?",
    ),
    (
        SITES + "[hub]\nsite = 'paris'\ngroups = 2\ngroup_links = '2min'\n",
        "hub: group_links: 2min is too long",
    ),
    # Sites
    ("[[site]]\n", 'site 1: has no name; write name = "paris"'),
    (SITES + "[[site]]\nname = 'paris'\n", "site 3: name: 'paris' is taken by site 1; each site needs"),
    ("[[site]]\nname = 'a'\nworkers = 0\n", "site: no site has workers; one of them needs workers = 1"),
    ("".join(f"[[site]]\nname = 's{i}'\n" for i in range(65)), "site: 65 sites are too many; a lab has at"),
    # Which sites a link joins
    (NO_LINK, 'link 1: does not name its two sites; write between = ["paris", "berlin"], or from and to'),
    (NO_LINK + "from = 'paris'\n", "link 1: does not name its two sites; write between = "),
    (NO_LINK + "between = ['paris']\n", "link 1: between: ['paris'] is not two sites; write between = "),
    (NO_LINK + "between = 'paris'\n", "link 1: between: 'paris' is not two sites; write between = "),
    (LINK + "from = 'paris'\n", "link 1: has both between and from; write between = "),
    (
        NO_LINK + "between = ['paris', 'berlim']\n",
        "link 1: between: no site is named 'berlim'; did you mean 'be",
    ),
    (
        NO_LINK + "from = 'rome'\nto = 'paris'\n",
        "link 1: from: no site is named 'rome'; the sites are paris, be",
    ),
    (NO_LINK + "from = 'paris'\nto = [1]\n", "link 1: to: no site is named [1]; the sites are paris, berlin"),
    (NO_LINK + "between = ['paris', 'paris']\n", "link 1: leads from paris to itself; a link joins two diff"),
    (
        LINK + "[[link]]\nfrom = 'berlin'\nto = 'paris'\nrate = '1Mbit/s'\n",
        "link 2 (berlin -> paris): the direction berlin -> paris is in link 1 already; give each one once",
    ),
    (
        LINK + LINK.removeprefix(SITES),
        "link 2 (paris - berlin): the direction paris -> berlin is in link 1 already; give each one once",
    ),
]

# What is wrong with a site of these lines.
WRONG_SITES = [
    *(
        (f"name = {name}\n", f"site 3: name: {name} is not a site's name; write lower-case letters, digits")
        for name in ("''", "'Paris'", "'new york'", "'-a'", "'a-'", "'1st'", "'a.b'", "'é'", "7")
    ),
    (f"name = '{'a' * 64}'\n", "site 3: name: 'aaaa"),
    ("name = 'localhost'\n", "site 3: name: 'localhost' means each site to itself; choose another name"),
    ("name = 'a'\nworkers = -1\n", "site 3 (a): workers: -1 is not a whole number from 0 to 256"),
    ("name = 'a'\nworkers = 257\n", "site 3 (a): workers: 257 is not a whole number from 0 to 256"),
    ("name = 'a'\nworkers = 'two'\n", "site 3 (a): workers: 'two' is not a whole number from 0 to 256"),
    ("name = 'a'\nworkers = 2\nspeed = [1.0]\n", "site 3 (a): speed: 1 speeds for workers = 2; write one"),
    ("name = 'a'\nspeed = [1.0, 1.0]\n", "site 3 (a): speed: 2 speeds for workers = 1; write one number"),
    *(
        (f"name = 'a'\nspeed = {speed}\n", f"site 3 (a): speed: {shown} is not a speed; write a number from")
        for speed, shown in [("0", "0"), ("-1", "-1"), ("2", "2"), ("nan", "nan"), ("true", "True")]
    ),
    ("name = 'a'\nspeed = ['x']\n", "site 3 (a): speed: 'x' is not a speed; write a number from 0.001 to 1"),
]

# What is wrong with a link with these lines, as the error says it after the link; they may give its rate and
# delay anew.
WRONG_LINKS = [
    ("[link.change]\nat = 1\n", "change: write each one as [[link.change]], in two brackets"),
    ("delay = 'none'\n", "delay: 'none' is not a span of time; write it like 90s, 200ms or 5min"),
    *(
        (f"rate = {given}\n", f"rate: {said}")
        for given, said in [
            ("'0Mbit/s'", "0 bit/s cannot be had; a rate is from 1 kbit/s to 100 Gbit/s, and where nothing"),
            ("'10bit/s'", "10 bit/s cannot be had; a rate is from 1 kbit/s to 100 Gbit/s"),
            ("'5Tbit/s'", "5000 Gbit/s cannot be had; a rate is from 1 kbit/s to 100 Gbit/s"),
            ("'1e999Gbit/s'", "'1e999Gbit/s' is not a rate; write it like 1Gbit/s, 100Mbit/s or 56kbit/s"),
            ("'-1Mbit/s'", "'-1Mbit/s' is not a rate; write it like 1Gbit/s"),
            ("'10MB/s'", "'10MB/s' is not a rate; write it like 1Gbit/s"),
            ("'10Mbps'", "'10Mbps' is not a rate; write it like 1Gbit/s"),
            ("'fast'", "'fast' is not a rate; write it like 1Gbit/s"),
            ("1000", "1000 is not a rate; write it like 1Gbit/s"),
            ("true", "'True' is not a rate; write it like 1Gbit/s"),
            ("[1]", "'[1]' is not a rate; write it like 1Gbit/s"),
            (f"'{'9' * 5000}'", f"'{'9' * 36} ...' is not a rate"),
        ]
    ),
    # Delay, jitter, the queue
    ("delay = -1\n", "delay: -1 is not a span of time; write it like"),
    ("delay = nan\n", "delay: nan is not a span of time; write it like"),
    ("delay = '61s'\n", "delay: 61s is too long; at most 1 min 0 s can be had"),
    (
        "delay = '50s'\nrate = '10Gbit/s'\n",
        "delay: 50s at 10 Gbit/s would keep 58.2 GiB on the way, in this machine's memory; at most 1.0 GiB",
    ),
    ("jitter = '30ms'\n", "jitter: 30ms is more than the delay, 20ms; no packet arrives before it left"),
    ("distribution = 'gauss'\n", "distribution: no such choice 'gauss' (one of: normal, uniform, pareto)"),
    ("distribution = 'Pareto'\n", "distribution: no such choice 'Pareto'; did you mean 'pareto'?"),
    ("distribution = ['normal']\n", "distribution: no such choice ['normal']"),
    ("queue = '5 parsecs'\n", "queue: '5 parsecs' is neither a size nor a time; write it like 5MB, or like"),
    ("queue = '5M'\n", "queue: '5M' is neither a size nor a time; write it like 5MB"),
    ("queue = 0\n", "queue: 0 at 8 Mbit/s is 0 bytes; a queue holds from one packet, 1500 bytes, to 1.0 GiB"),
    ("queue = '1ms'\n", "queue: 1ms at 8 Mbit/s is 1000 bytes; a queue holds from one packet"),
    ("queue = '1e300s'\n", "queue: 1e300s at 8 Mbit/s is 1e+306 bytes; a queue holds from one packet"),
    ("queue = '2GiB'\n", "queue: 2GiB at 8 Mbit/s is 2.147e+09 bytes; a queue holds from one packet"),
    (
        "queue = '500MB'\nrate = '1kbit/s'\n",
        "queue: 500MB at 1 kbit/s is a wait of 1111 h 6 min; at most 24 h 0 min can be had",
    ),
    # Probabilities, bursts, reordering
    *(
        (
            f"{key} = {value}\n",
            f"{key}: {value} is not a probability; write a number from 0 to 1 (3 % is 0.03)",
        )
        for key in ("loss", "reorder", "duplicate", "corrupt")
        for value in ("1.01", "-0.1", "nan", "inf", "'3%'", "2")
    ),
    ("loss = true\n", "loss: True is not a probability"),
    ("burst = 0.5\n", "burst: 0.5 is not a mean length of bursts; write a number of packets from 1 to 1e+06"),
    ("burst = inf\n", "burst: inf is not a mean length of bursts; write a number of packets from 1 to 1e+06"),
    ("loss = 0.9\nburst = 8\n", "loss: 0.9 cannot be had in bursts of 8; between two bursts at least one"),
    ("loss = 1\nburst = 2\n", "loss: 1 cannot be had in bursts of 2; between two bursts at least one packet"),
    (
        "reorder_by = '21ms'\n",
        "reorder_by: 21ms cannot be skipped; it is more than 0 and at most the delay, 20ms",
    ),
    ("reorder = 0.1\nreorder_by = 0\n", "reorder_by: 0 cannot be skipped; it is more than 0 and at most"),
    (
        "delay = 0\nreorder = 0.1\n",
        "reorder: a packet overtakes by skipping a part of the delay; give a delay",
    ),
    # Changes
    ("[[link.change]]\nat = 1\nlos = 0.1\n", "change 1: no key 'los'; did you mean 'loss'?"),
    ("[[link.change]]\nloss = 0.1\n", 'change 1: does not say when; write at = "10s"'),
    ("[[link.change]]\nat = 1\n", "change 1: changes nothing; name what does, one of rate, delay, "),
    ("[[link.change]]\nat = 0\nloss = 0.1\n", "change 1: at: 0.0 ms is not after the start; what holds from"),
    ("[[link.change]]\nat = '8d'\nloss = 0.1\n", "change 1: at: 8d is too long; at most 168 h 0 min can be"),
    (
        "[[link.change]]\nat = 5\nloss = 0.1\n[[link.change]]\nat = 4\nloss = 0.2\n",
        "change 2: at: 4.0 s is not after the change before it, 5.0 s; write them in order",
    ),
    (
        "[[link.change]]\nat = 5\nloss = 0.1\n[[link.change]]\nat = '5s'\nrate = '1Mbit/s'\n",
        "change 2: at: 5.0 s is not after the change before it, 5.0 s; write them in order",
    ),
    (
        "jitter = '5ms'\n[[link.change]]\nat = 5\ndelay = '4ms'\n",
        "change 1: jitter: 5ms is more than the delay, 4ms; no packet arrives before it left",
    ),
    (
        "loss = 0.5\n[[link.change]]\nat = 5\nloss = 0.9\nburst = 4\n",
        "change 1: loss: 0.9 cannot be had in bursts of 4; between two bursts at least one packet gets",
    ),
    # Outages
    ("[[link.outage]]\nat = 1\nfro = 1\n", "outage 1: no key 'fro'; did you mean 'for'?"),
    ("[[link.outage]]\nat = 1\n", 'outage 1: does not say how long; write for = "2s"'),
    ("[[link.outage]]\nfor = 1\n", 'outage 1: does not say when; write at = "10s"'),
    ("[[link.outage]]\nat = 1\nfor = 0\n", "outage 1: for: 0 is not a length; an outage has more than 0 s"),
    ("[[link.outage]]\nat = 1\nfor = '7d'\n", "outage 1: for: '7d' is not a length; an outage has more than"),
    (
        "[[link.outage]]\nat = 5\nfor = 2\n[[link.outage]]\nat = 6\nfor = 2\n",
        "outage 2: at: begins before the one above it ends, at 7.0 s; make them one",
    ),
    (
        "[[link.outage]]\nat = 5\nfor = 2\n[[link.outage]]\nat = 1\nfor = 2\n",
        "outage 2: at: begins before the outage above it; write them in order",
    ),
]


def told(path: Path, text: str) -> str:
    """What is wrong with a file of this text, without the file's name; checked to be one line."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_topology(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    assert len(line) < 500
    return line.removeprefix(f"{path}: ")


@pytest.mark.parametrize(("text", "said"), WRONG, ids=range(len(WRONG)))
def test_a_mistake_is_one_line_that_says_where(tmp_path: Path, text: str, said: str) -> None:
    assert told(tmp_path / "lab.toml", text).startswith(said)


@pytest.mark.parametrize(("lines", "said"), WRONG_SITES, ids=range(len(WRONG_SITES)))
def test_a_mistake_in_a_site(tmp_path: Path, lines: str, said: str) -> None:
    assert told(tmp_path / "lab.toml", f"{SITES}[[site]]\n{lines}").startswith(said)


@pytest.mark.parametrize(("lines", "said"), WRONG_LINKS, ids=range(len(WRONG_LINKS)))
def test_a_mistake_in_a_link(tmp_path: Path, lines: str, said: str) -> None:
    link = f"{NO_LINK}between = ['paris', 'berlin']\n"
    for default in ('rate = "8Mbit/s"\n', 'delay = "20ms"\n'):
        if not re.search(rf"^{default.split()[0]} =", lines.partition("[[")[0], re.MULTILINE):
            link += default
    place, said_of_link = "link 1 (paris - berlin): ", told(tmp_path / "lab.toml", link + lines)
    assert said_of_link.startswith(place + said)


def test_a_link_without_a_rate(tmp_path: Path) -> None:
    line = told(tmp_path / "lab.toml", NO_LINK + "between = ['paris', 'berlin']\n")
    assert line == 'link 1 (paris - berlin): has no rate; write rate = "1Gbit/s"'


def test_the_most_loss_that_a_burst_allows_is_right() -> None:
    assert first(loss=8 / 9, burst=8).loss == 8 / 9
    assert first(loss=1).loss == 1.0


def test_rates() -> None:
    texts = ["1Gbit/s", "100 Mbit/s", "56kbit", "1.5gbit/s", "9600bit/s", "1e2Mbit"]
    assert [parse_rate(text) for text in texts] == [1e9, 1e8, 56e3, 1.5e9, 9600, 1e8]
    assert [format_rate(rate) for rate in (1e9, 1.25e8, 56e3, 300)] == [
        "1 Gbit/s", "125 Mbit/s", "56 kbit/s", "300 bit/s",
    ]  # fmt: skip
    assert parse_seconds("250us") == pytest.approx(250e-6)


@pytest.mark.parametrize(
    "text", ["", "1", "1Gb/s", "1GB/s", "1Gbps", "1Gbit/m", "-1Gbit/s", "1e999bit", "/s"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a rate; write it like 1Gbit/s"):
        parse_rate(text)


def test_a_quantity_beyond_every_number_is_refused() -> None:
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(ConfigError):
            parse("1e999")


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.toml").write_text(LINK)
    (tmp_path / "wrong.toml").write_text(LINK + "loss = 3\n")
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long.toml").write_bytes(b"#" * (2**20 + 1))
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("command", ["show", "run"])
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("wrong.toml", "wrong.toml: link 1 (paris - berlin): loss: 3 is not a probability"),
        ("empty.toml", "empty.toml: names no site"),
        ("binary.toml", "binary.toml: the topology is not UTF-8 text"),
        ("long.toml", "long.toml: the topology is too long: more than 1.0 MiB"),
        ("nope.toml", "nope.toml: cannot read the topology: No such file or directory"),
        ("folder", "folder: cannot read the topology: Is a directory"),
    ],
)
def test_a_wrong_file_ends_both_commands_with_status_2(
    command: str,
    file: str,
    said: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments = ["lab", command, file, *(["--", "true"] if command == "run" else [])]
    assert atoll(monkeypatch, *arguments) == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"atoll: {said}")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lab"], "Missing command"),
        (["lab", "shwo", "lab.toml"], "No such command 'shwo'"),
        (["lab", "show"], "Missing argument 'TOPOLOGY'"),
        (["lab", "show", "lab.toml", "--pictrue", "x.png"], "No such option: --pictrue"),
        (["lab", "show", "lab.toml", "--picture", "x.gif"], "x.gif: a picture's name ends in .png, .svg"),
        (["lab", "show", "lab.toml", "--picture", "no/x.png"], "no/x.png: cannot write the picture: No such"),
        (["lab", "run"], "Missing argument 'TOPOLOGY'"),
        (["lab", "run", "lab.toml"], "Missing argument '-- COMMAND ...'"),
        (["lab", "run", "lab.toml", "--directroy", "d", "--", "true"], "No such option: --directroy"),
        (
            ["lab", "run", "lab.toml", "ping", "-c", "5"],
            "No such option: -c; if it is one of the command's own, write -- before the command\n",
        ),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: list[str],
    said: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert atoll(monkeypatch, *arguments) == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"atoll: {said}")
    assert err.count("\n") == 1
    assert out == ""
