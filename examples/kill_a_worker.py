"""Kill a rank in the middle of a step and watch the run recover. Every flag of nanoray.launch works here too.

Rank 1 gets a SIGKILL in the backward pass of step 30. The driver names the rank, step and phase, ends the other rank,
and restarts both from the checkpoint of step 20. The losses after it are the ones you would have seen without the kill.
"""

import sys

from nanoray.launch import main

if __name__ == "__main__":
    raise SystemExit(main(["--preset", "tiny", "--fault", "kill:rank=1,step=30,phase=backward", *sys.argv[1:]]))
