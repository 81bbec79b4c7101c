"""The URLs that a region's data may be copied to: checked when a stream is created or altered, and again before anything is
copied.

Copied segments stay sealed under this region's keys, but leave this region's machines. So the destination must not be the
decision of an identity that may write a stream's settings: the region's operator sets it, in region.yaml.
"""

from __future__ import annotations

from felix.errors import Code, RequestError
from region.log.fsspec_store import check_absolute, check_package, check_parts, is_allowed


def check_offload(url: str, allowed: tuple[str, ...]) -> None:
    """Raises RequestError: FORBIDDEN where the region does not allow the URL, CONFIG_INVALID where it is no store here.

    Blocks: it may import the package of the URL's scheme, and does so only for a URL that the operator has allowed.
    """
    check_parts(url)
    if not is_allowed(url, allowed):
        raise RequestError(
            f"This region does not allow its data to be copied to {url[:200]}.",
            code=Code.FORBIDDEN,
            hint="The operator names the places that are allowed as storage.offload_allow in region.yaml.",
        )
    check_absolute(url)
    check_package(url)
