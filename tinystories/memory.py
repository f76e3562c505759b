"""Keep freed memory in the process.

glibc hands every large tensor back to the system when it is freed, and the next step pays for fresh zeroed pages: a third of
the time of a training step here. Telling malloc to keep the pages changes no result.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # names and numbers of <malloc.h>


def keep_freed_memory() -> None:
    """Serve every allocation from the heap and never trim it; does nothing where the C library is not glibc."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
