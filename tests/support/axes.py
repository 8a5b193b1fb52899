"""The protocols of the axes, with the classes that implement them: mypy compares each with its protocol."""

from __future__ import annotations

from atoll.axes.codec import Codec
from atoll.exchange.codecs import BFloat16, Float32
from atoll.memory.home import Home, HostHome
from atoll.memory.lent import LentHome
from atoll.memory.members import Members
from atoll.train.group.members import WorkerMembers
from atoll.train.sync.peers import Peers
from atoll.train.sync.replicas import Replicated
from atoll.train.sync.stores import InTiers, Resident, Store
from atoll.train.sync.strategies import Alone, OverRing, Served, Strategy

STORES: tuple[type[Store], ...] = (Resident, InTiers)
HOMES: tuple[type[Home], ...] = (HostHome, LentHome)
MEMBERS: tuple[type[Members], ...] = (WorkerMembers,)
STRATEGIES: tuple[type[Strategy], ...] = (Alone, OverRing, Served, Peers, Replicated)
CODECS: tuple[type[Codec], ...] = (Float32, BFloat16)
IMPLEMENTATIONS = (*STORES, *HOMES, *MEMBERS, *STRATEGIES, *CODECS)
