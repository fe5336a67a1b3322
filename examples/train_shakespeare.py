"""Train a small GPT on Shakespeare, on Ray; takes every flag of nanoray.launch (`make train`).

python examples/train_shakespeare.py
python examples/train_shakespeare.py --preset shakespeare-char --workers 4
ray job submit --working-dir . -- python examples/train_shakespeare.py
"""

from nanoray.launch.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
