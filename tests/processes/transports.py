"""Which transport the faults of survival's tests are survived over: `make soak` runs them over both."""

from __future__ import annotations

import os

from atoll.core.config import Config, Link, LinkOptions, Run

LINK = Link(transport=os.environ.get("ATOLL_TEST_TRANSPORT", "tcp"))  # type: ignore[arg-type]
LINK_TABLE = f"[link]\ntransport = '{LINK.transport}'\n"  # the same, as a configuration file has it


def site_link() -> LinkOptions:
    """The way of a site's shard to the global ones."""
    return Config(run=Run(strategy="server"), link=LINK).link_options
