"""The last import of a fork server: it excludes its modules from the garbage collector of forks.

Without it each such process would look through all of torch, and so copy the memory that it shares
with the server.
"""

import gc
import multiprocessing

# A fork that starts a fork server, for the workers of its DataLoader, starts an ordinary one
multiprocessing.set_forkserver_preload(["__main__"])
gc.collect()
gc.freeze()
