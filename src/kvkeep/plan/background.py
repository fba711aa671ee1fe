"""Measure this machine in the background, in a process of the lowest priority.

``python -m kvkeep.plan.background DEVICE DTYPE THREADS`` starts it. The process exits at the end of its standard input,
so it never outlives the process that started it.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

PASSIVE = ("OMP_WAIT_POLICY", "passive")
"""Environment variable to set before torch is imported: threads that spin while they wait distort measurements."""
BUSY = 3
"""Exit code if another process is already measuring."""


def main() -> None:
    """Lower the priority of this process, then measure. An error is one line on standard error."""
    with suppress(OSError, AttributeError):  # the system may lack or refuse it
        os.nice(19)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel kills this process first when memory runs out
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
