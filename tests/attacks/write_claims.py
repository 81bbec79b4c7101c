"""Write the tables of docs/claims.md anew: `PYTHONPATH=tests python -m attacks.write_claims`."""

from __future__ import annotations

from attacks.claims import render
from attacks.test_claims import BEGIN, PAGE

if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().split(BEGIN)[0] + BEGIN + render())
