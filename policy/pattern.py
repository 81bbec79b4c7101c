"""How name patterns relate to each other: one covers another, or two overlap.

`NamePattern.matches` answers for one name; a grant with a wildcard stands for many names, and whether a
rule holds for all of them or for some is decided here, on the patterns alone.
"""

from __future__ import annotations

from felix.names import NamePattern


def covers(wide: NamePattern, narrow: NamePattern) -> bool:
    """True where every name that `narrow` matches is matched by `wide` too."""
    for outer, inner in zip(wide.text.split("/"), narrow.text.split("/"), strict=True):
        if outer.endswith("*"):
            if not inner.rstrip("*").startswith(outer[:-1]):
                return False
        elif outer != inner:
            return False
    return True


def overlap(one: NamePattern, other: NamePattern) -> bool:
    """True where some name is matched by both."""
    for left, right in zip(one.text.split("/"), other.text.split("/"), strict=True):
        left_open, right_open = left.endswith("*"), right.endswith("*")
        left_stem, right_stem = left.rstrip("*"), right.rstrip("*")
        if left_open and right_open:
            if not (left_stem.startswith(right_stem) or right_stem.startswith(left_stem)):
                return False
        elif left_open:
            if not right.startswith(left_stem):
                return False
        elif right_open:
            if not left.startswith(right_stem):
                return False
        elif left != right:
            return False
    return True
