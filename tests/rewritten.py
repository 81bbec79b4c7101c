"""Test files compiled with pytest's assertions, once: for the processes of one `make test` in a new clone.

Each process collects all tests, so each would compile all files at the same time as the others, 20 s of a processor. Each compiles a share of its own first instead, and reads
those of the others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parent


def compile_share(config: pytest.Config, number: int, of: int) -> None:
    """Compile every `of`-th test file that was never compiled, from the `number`-th on."""
    state = config.stash.get(rewrite.assertstate_key, None)
    if state is None or state.hook is None or sys.dont_write_bytecode:
        return
    for path in sorted(ROOT.rglob("test_*.py"))[number::of]:
        folder = rewrite.get_cache_dir(path)
        compiled = folder / f"{path.stem}{rewrite.PYC_TAIL}"
        if not compiled.exists():
            os.makedirs(folder, exist_ok=True)
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source_hash, compiled)
