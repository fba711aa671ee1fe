"""A measurement of this machine beside other work, in a process that gives way to every other.

``python -m kvkeep.plan.background DEVICE DTYPE THREADS`` is that process. It ends when its standard input does, and so
with the process that started it, however that ends.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

PASSIVE = ("OMP_WAIT_POLICY", "passive")
"""For the environment before torch is imported: threads that spin while they wait slow down each other's measurements.
"""
BUSY = 3
"""The exit code where another process measures already."""


def main() -> None:
    """Measure, after giving way to all other processes. An error is one line on standard error."""
    with suppress(OSError, AttributeError):  # what a system lacks or refuses is left out
        os.nice(19)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory is short, this process is the first to end
    threading.Thread(target=_end_with_parent, daemon=True).start()
    device, dtype, threads = sys.argv[1:]
    os.environ.setdefault(*PASSIVE)

    import torch

    from kvkeep.plan.calibrate import measure_here
    from kvkeep.plan.rates import BusyError

    torch.set_num_threads(int(threads))
    try:
        measure_here(device, getattr(torch, dtype))
    except BusyError:
        sys.exit(BUSY)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}".partition("\n")[0])


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
