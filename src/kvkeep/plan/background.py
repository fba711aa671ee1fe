"""A measurement of this machine beside other work: a process that runs when nobody else wants the processor.

``python -m kvkeep.plan.background DEVICE DTYPE THREADS`` is that process. It ends when its standard input does, and so
with the process that started it, however that ends.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

PASSIVE = ("OMP_WAIT_POLICY", "passive")
"""For the environment before torch is imported: threads that spin while they wait measure each other."""
BUSY = 3
"""The exit code where another process measures already."""


def main() -> None:
    """Measure, after giving way to all other processes; what goes wrong is one line on standard error."""
    _give_way()
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


def _give_way() -> None:
    """Take the processor only when it is idle, and be the first process to end where memory is short. What a system
    lacks or refuses is left out."""
    with suppress(OSError, AttributeError):
        os.nice(19)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
