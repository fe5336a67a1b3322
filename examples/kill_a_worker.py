"""Kill a rank in the middle of a step and watch the run recover. Every flag of nanoray.launch works here too.

Rank 1 gets a SIGKILL in the backward pass of step 30. The driver names the rank, step and phase and starts a new rank
1, which takes the run's state from rank 0's memory; step 30 is done again, and no other. The losses after it are the
ones you would have seen without the kill. `--recovery restart` shows the other way: all ranks, from a checkpoint.
"""

import sys

from nanoray.launch import main

if __name__ == "__main__":
    raise SystemExit(main(["--preset", "tiny", "--faults", "kill@rank=1,step=30,phase=backward", *sys.argv[1:]]))
