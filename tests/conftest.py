"""One thread per process: tests run side by side, and spinning threads slow each other down."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
