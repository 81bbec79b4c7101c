"""What the QUIC engines of this machine move without Felix above them. See cli.benchmark.raw_quic for how.

PYTHONPATH=. python benchmarks/raw_quic.py [--engine qh3] [--chunk 16384] [--total 67108864]
"""

from __future__ import annotations

import sys

from cli.benchmark.raw_quic import main

if __name__ == "__main__":
    sys.exit(main())
