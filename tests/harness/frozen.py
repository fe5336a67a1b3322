"""The last import of a fork server: it makes its forks cheap.

Its modules are excluded from the garbage collector of forks: without that each such process would
look through all of torch, and so copy the memory that it shares with the server. And the kernel
puts the memory into huge pages, where it can: to fork is to copy a table of all pages, and to end
is to go through it again, which is most of the time of a short process.
"""

import contextlib
import ctypes
import gc
import multiprocessing

_HUGE = 2 << 20  # bytes of a huge page
_MADV_COLLAPSE = 25  # madvise(2), since Linux 6.1; older ones refuse it, and nothing changes


def collapse() -> None:
    """Put this process' own memory into huge pages."""
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:
        for line in maps.read().splitlines():
            addresses, flags, *_ = words = line.split()
            is_anonymous = len(words) == 5 or words[5] == "[heap]"
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE  # whole ones
            if flags == "rw-p" and is_anonymous and begin < end:
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


# A fork that starts a fork server, for the workers of its DataLoader, starts an ordinary one
multiprocessing.set_forkserver_preload(["__main__"])
gc.collect()
gc.freeze()
with contextlib.suppress(OSError):  # a system without /proc
    collapse()
