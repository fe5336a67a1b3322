"""Kill a rank in the middle of a step and watch the run recover. Takes every nanoray.launch flag.

Rank 1 gets SIGKILL in the backward pass of step 30. The driver names the rank, step and phase and
starts a new rank 1, which receives the run's state from rank 0's memory. The ranks do the
interrupted step again, and the losses equal those of a run without the kill. With
`--recovery restart` all ranks start again from a checkpoint instead.
"""

import sys

from nanoray.launch.__main__ import main

# The fault plan: which rank is killed, and in which phase of which step
FAULTS = "kill@rank=1,step=30,phase=backward"

if __name__ == "__main__":
    raise SystemExit(main(["--preset", "tiny", "--faults", FAULTS, *sys.argv[1:]]))
