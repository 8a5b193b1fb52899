"""What a worker tells people, for tests to look at."""

from __future__ import annotations

from atoll.core.events import AnyEvent, Warned
from atoll.observe.notices import Notices


def lines_of(notices: Notices) -> list[str]:
    """The lines from now on, as they come."""
    lines: list[str] = []

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Warned):
            lines.append(event.message)

    notices.bus.subscribe(hear)
    return lines
