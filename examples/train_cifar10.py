"""Train a ResNet on CIFAR-10, on Ray; takes every flag of nanoray.launch.

Without internet it trains on generated images, and prints that.

python examples/train_cifar10.py
python examples/train_cifar10.py --resnet_depth 8 --num_epochs 1
python examples/train_cifar10.py --config examples/configs/fsdp_resnet_cifar10.yaml --workers 4
"""

import sys
from pathlib import Path

from nanoray.launch.__main__ import main

CONFIG = Path(__file__).resolve().parent / "configs" / "ddp_resnet_cifar10.yaml"

if __name__ == "__main__":
    raise SystemExit(main(["--config", str(CONFIG), *sys.argv[1:]]))
