"""How a rule is switched off, and which seed misses it: what the twins of all simulated worlds share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import pytest

E = TypeVar("E", bound=Exception)


class Switch(Protocol):
    """A rule of some world. `off` switches it off until the patch is undone; `seed` missed it when it was last looked for."""

    @property
    def seed(self) -> int | None: ...

    @property
    def off(self) -> Callable[[pytest.MonkeyPatch], None]: ...


def patched(owner: object, name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


@contextmanager
def switched_off(twin: Switch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        twin.off(patch)
        yield


def missed(
    twin: Switch,
    play: Callable[[int], Any],
    failure: type[E] | tuple[type[E], ...],
    seeds_max: int,
    *,
    anew: bool,
) -> E | None:
    """How a seed fails without the rule: the remembered one, which only saves time, else the first of `seeds_max`; `anew`: the first."""
    with switched_off(twin):
        for seed in (*([] if anew or twin.seed is None else [twin.seed]), *range(seeds_max)):
            try:
                play(seed)
            except failure as error:
                if not anew and seed != twin.seed is not None:
                    warnings.warn(
                        f"Without this rule seed {seed} fails, and {twin.seed} no more: remember it, so that nobody looks for it again. {error}",
                        stacklevel=2,
                    )
                return error
    return None
