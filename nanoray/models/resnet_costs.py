"""Parameters, FLOPs and memory of a ResNet."""

from __future__ import annotations

from nanoray.models.resnet import SIZE, ResNetShape


def convolutions(shape: ResNetShape) -> list[tuple[int, int, int]]:
    """Return (input channels, output channels, rows of the output) of every 3x3 convolution, in the
    model's order.
    """
    layers = [(3, shape.channels[0], SIZE)]
    c_in, size = shape.channels[0], SIZE
    for stage, width in enumerate(shape.channels):
        size = SIZE >> stage
        for _ in range(shape.blocks_per_stage):
            layers += [(c_in, width, size), (width, width, size)]
            c_in = width
    return layers


def convolution_flops(c_in: int, c_out: int, rows: int) -> int:
    """Return the forward FLOPs of a 3x3 convolution for one image: two per weight and pixel of its
    output.
    """
    return 2 * 9 * c_in * c_out * rows**2


def convolution_kept(c_out: int, rows: int) -> int:
    """Return the numbers that a convolution keeps for backward: its output and the ReLU's, of one
    image.
    """
    return 2 * c_out * rows**2


def count_parameters(shape: ResNetShape) -> int:
    """Return the parameters of ResNet(shape) without building it: convolutions, two per norm
    channel, the head.
    """
    convs = sum(9 * c_in * c_out + 2 * c_out for c_in, c_out, _ in convolutions(shape))
    return convs + (shape.channels[-1] + 1) * shape.classes


def flops_per_image(shape: ResNetShape) -> int:
    """Return the FLOPs of forward and backward for one image: 6 per weight of a convolution and
    pixel of its output.

    Forward has two per multiplication and addition; backward has twice as many. Norms and ReLUs are
    left out.
    """
    convs = sum(convolution_flops(*convolution) for convolution in convolutions(shape))
    return 3 * (convs + 2 * shape.channels[-1] * shape.classes)


def activation_memory(shape: ResNetShape, micro_batch_size: int, precision: str) -> dict[str, int]:
    """Return the bytes that one rank keeps for backward, eager, in the compute dtype.

    Per convolution: its output, which the norm keeps, and the ReLU's output, which the ReLU and the
    next convolution share.
    """
    kept = (
        sum(convolution_kept(c_out, rows) for _, c_out, rows in convolutions(shape)) + 3 * SIZE**2
    )
    return {"activations": micro_batch_size * kept * (4 if precision == "fp32" else 2)}
