"""One thread per process: the suite runs many processes on few cores, where torch's own threads only wait."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it
