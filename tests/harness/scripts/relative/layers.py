"""What the module beside it imports by a dot."""

from torch import nn


def layer() -> nn.Module:
    return nn.Linear(4, 1)
