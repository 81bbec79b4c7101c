"""What a region says of the agent's log stops all links to it, and none to another one."""

from __future__ import annotations

from typing import Any, cast

import pytest

from audit.position import LinkShard
from bridge.link_context import LinkContext
from felix.errors import Code, CorruptionError

NOTHING = cast("Any", None)


def link(region: str, stream: str) -> LinkShard:
    return LinkShard("spiffe://us-east.acme/bridge/us-to-eu", "us-east", region, stream, 0, stream)


def test_a_region_that_lies_about_the_agents_log_stops_its_own_links_alone() -> None:
    context = LinkContext(*[NOTHING] * 11)
    said, beside, other = link("eu-west", "acme/a"), link("eu-west", "acme/b"), link("ap-south", "acme/a")
    context.brought_more[said] = CorruptionError("It was rolled back.", code=Code.ROLLED_BACK)
    for asking in (beside, None):
        with pytest.raises(CorruptionError) as caught:
            context.require_whole("eu-west", asking)
        assert caught.value.code is Code.ROLLED_BACK
    # The link itself asks the region once more, and the others go on once it has taken its word back.
    context.require_whole("eu-west", said)
    context.require_whole("ap-south", other)
    context.require_whole("ap-south")
    del context.brought_more[said]
    context.require_whole("eu-west", beside)
