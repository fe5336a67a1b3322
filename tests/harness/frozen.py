"""What a fork server imports last: the garbage collector of the processes that it forks leaves its
modules alone.

Without it each such process would look through all of torch, and so copy the memory that it shares
with the server.
"""

import gc

gc.collect()
gc.freeze()
