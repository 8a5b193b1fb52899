"""What a site's shard finds in its folder when it is started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.core.errors import CheckpointError, UserError
from atoll.server.journal import Folder, Journal
from atoll.server.logkeeper import LogKeeper
from atoll.server.model import CONTRIBUTION, ModelState, SiteState
from atoll.server.records import HandledMessage, StatePayload
from atoll.server.recovery import ShardImage, encode_image, find_site
from atoll.store.shard import ShardState
from atoll.wire.messages import Meet, encode
from support.setups import SETUP


def image(clock: int) -> ShardImage:
    state: Any = LogKeeper(1, None, lambda *_: None).state  # type: ignore[arg-type]
    model = ModelState(
        setup=SETUP,
        iterations=clock,
        held=ShardState.begin([0], "bsp", 0, 2, 0),
        mean=None,
        replaced=[],
        payloads=[1],
        handles=1,
        site=SiteState(between=SETUP, hyperparameters=[{"lr": 0.2}], clock=clock),
    )
    return ShardImage(generation=1, next_entry=3, setter=(0, 1), bases={}, readies={}, model=model, log=state)


def told(number: int) -> HandledMessage:
    return HandledMessage("worker", 0, 1, msgspec.Raw(encode(Meet(incarnation=1, number=number, what="x"))))


def begin(path: Path, number: int = 0) -> tuple[Folder, Journal]:
    folder = Folder(path, "run", 0, "paris")
    return folder, Journal(folder, number)


def end(folder: Folder, journal: Journal) -> None:
    journal.close()
    folder.close()


def test_a_folder_is_of_one_site(tmp_path: Path) -> None:
    Folder(tmp_path, "run", 0, "paris").close()
    Folder(tmp_path, "run", 0, "paris").close()
    with pytest.raises(UserError) as caught:
        Folder(tmp_path, "run", 0, "berlin")
    assert str(caught.value) == (
        f"{tmp_path}: holds the shard of site 'paris' of run 'run'; this is the shard of site 'berlin' of "
        "run 'run': give it another --directory, or remove that one"
    )
    with pytest.raises(UserError, match="this is shard 0 of run 'run'"):
        Folder(tmp_path, "run", 0)


def test_it_goes_on_from_the_latest_whole_state(tmp_path: Path) -> None:
    folder, journal = begin(tmp_path)
    assert find_site(folder) is None
    journal.begin_segment(fresh=True)
    journal.append(told(0))
    journal.begin_segment(encode_image(image(4)), [(StatePayload(CONTRIBUTION, 1), b"gradient")])
    journal.append(told(1))
    journal.append(told(2))
    end(folder, journal)

    folder = Folder(tmp_path, "run", 0, "paris")
    found = find_site(folder)
    assert found is not None
    assert found.image == image(4)
    assert bytes(found.parts[CONTRIBUTION][1]) == b"gradient"
    assert [each for each, _ in found.told] == [told(1), told(2)]
    journal = Journal(folder, found.next_segment)
    journal.begin_segment()  # the next life of it
    journal.append(told(3))
    # It dies as it writes its next state, which lacks a part.
    journal.begin_segment(encode_image(image(9)), [(StatePayload(CONTRIBUTION, 1), b"x" * 1000)])
    end(folder, journal)
    last = sorted(tmp_path.glob("journal-*.bin"))[-1]
    last.write_bytes(last.read_bytes()[:-500])

    folder = Folder(tmp_path, "run", 0, "paris")
    found = find_site(folder)
    assert found is not None
    assert found.image == image(4)
    assert [each for each, _ in found.told] == [told(1), told(2), told(3)]
    folder.close()


def test_without_its_beginning_a_journal_is_refused(tmp_path: Path) -> None:
    folder, journal = begin(tmp_path, 3)
    journal.begin_segment()
    journal.append(told(0))
    journal.begin_segment()
    journal.append(told(1))
    end(folder, journal)
    folder = Folder(tmp_path, "run", 0, "paris")
    with pytest.raises(CheckpointError) as caught:
        find_site(folder)
    assert str(caught.value) == (
        f"{tmp_path}: holds a part of a site's journal, and no state that it goes on from; the site's shard "
        "cannot go on from it"
    )
    folder.close()
