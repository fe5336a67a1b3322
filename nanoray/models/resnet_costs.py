"""Count the parameters and FLOPs of a ResNet without building it."""

from __future__ import annotations

from nanoray.models.resnet import SIZE, ResNetShape


def convolutions(shape: ResNetShape) -> list[tuple[int, int, int]]:
    """Return (c_in, c_out, rows of the output) of every 3x3 convolution, in the model's order."""
    c_in = shape.channels[0]
    layers = [(3, c_in, SIZE)]  # the stem
    for stage, c_out in enumerate(shape.channels):
        rows = SIZE >> stage  # each stage halves the image
        for _ in range(shape.blocks_per_stage):
            layers.append((c_in, c_out, rows))
            layers.append((c_out, c_out, rows))
            c_in = c_out
    return layers


def convolution_flops(c_in: int, c_out: int, rows: int) -> int:
    """Return a convolution's forward FLOPs for an image: two per weight and output pixel."""
    return 2 * 9 * c_in * c_out * rows**2


def count_parameters(shape: ResNetShape) -> int:
    """Return the parameters of ResNet(shape): convolutions, two per channel of a norm, the head."""
    convs = sum(9 * c_in * c_out + 2 * c_out for c_in, c_out, _ in convolutions(shape))
    return convs + (shape.channels[-1] + 1) * shape.classes


def flops_per_image(shape: ResNetShape) -> int:
    """Return the FLOPs of forward and backward for one image: 6 per weight and pixel of its output.

    Forward has two per multiplication and addition; backward has twice as many. Norms and ReLUs are
    left out.
    """
    convs = sum(convolution_flops(*convolution) for convolution in convolutions(shape))
    return 3 * (convs + 2 * shape.channels[-1] * shape.classes)
