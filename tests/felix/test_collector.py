"""What is there when a process has started is not walked by later searches for cycles; cycles that are none of it are found as ever."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json, weakref
from felix.collector import start_kept

class Cycle:
    def __init__(self):
        self.own = self

before = weakref.ref(Cycle())
held = [[number] for number in range(10_000)]
whole = []
gc.callbacks.append(lambda phase, info: whole.append(phase) if info["generation"] == 2 else None)
with start_kept():
    held += [[number] for number in range(200_000)]
    meanwhile = len(whole)
gc.disable()
walked = len(gc.get_objects())
after = weakref.ref(Cycle())
is_left = after() is not None
gc.collect()
print(json.dumps({"meanwhile": meanwhile, "kept": gc.get_freeze_count(), "walked": walked, "before": before() is None, "is_left": is_left, "after": after() is None}))
"""


def test_what_is_there_is_kept_and_what_comes_later_is_still_collected() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["meanwhile"] == 0
    assert told["kept"] > 10_000 and told["walked"] < 100
    assert told["before"], "what was garbage already is not kept"
    assert told["is_left"] and told["after"]
