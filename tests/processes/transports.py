"""Which transport the faults of survival's tests are survived over: `make soak` runs them over both."""

from __future__ import annotations

import os

from atoll.core.config import LinkOptions

LINK = LinkOptions(transport=os.environ.get("ATOLL_TEST_TRANSPORT", "tcp"))  # type: ignore[arg-type]
LINK_TABLE = f"[link]\ntransport = '{LINK.transport}'\n"  # the same, as a configuration file has it
