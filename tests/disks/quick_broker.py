"""`felix` whose broker opens again soon what its disk stopped: for plays. `python -m disks.quick_broker WORDS`."""

from __future__ import annotations

import felix.reopening
from cli.main import main
from keys import reopening
from region.metadata import embedded

if __name__ == "__main__":
    felix.reopening.REOPEN_MS_MIN, felix.reopening.REOPEN_MS_MAX = 400, 1_000
    embedded.SOUND_ALONE_MS = reopening.SOUND_ALONE_MS = 1_000
    main()
