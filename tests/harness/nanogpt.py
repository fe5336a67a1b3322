"""A stand-in for nanoGPT: a train.py that takes its flags and prints its lines."""

from __future__ import annotations

from pathlib import Path

# As nanoGPT's configurator.py it knows only some flags, and their types. After its steps it does
# not end by itself where it has evaluated: the benchmark ends it at the loss.
TRAIN_PY = """
import ast, os, pickle, sys, time
import numpy as np
import sizes  # a neighbour
INTS = "log_interval gradient_accumulation_steps batch_size max_iters lr_decay_iters block_size n_layer n_head n_embd"
TYPES = dict.fromkeys((INTS + " warmup_iters eval_interval eval_iters").split(), int)
TYPES |= dict.fromkeys("learning_rate min_lr beta2 weight_decay dropout".split(), float)
TYPES |= dict.fromkeys("compile always_save_checkpoint wandb_log bias".split(), bool)
flags = dict(a[2:].split("=") for a in sys.argv[1:])
for key, text in flags.items():
    assert key in ("device", "dataset", "out_dir", "dtype") or type(ast.literal_eval(text)) is TYPES[key], key
data = os.path.join("data", flags["dataset"])
vocab = pickle.load(open(os.path.join(data, "meta.pkl"), "rb"))["vocab_size"]
tokens = np.memmap(os.path.join(data, "train.bin"), dtype=np.uint16, mode="r")
assert tokens.max() < vocab and len(tokens) > int(flags["block_size"]) and flags["batch_size"] == sizes.BATCH
assert os.path.samefile(os.getcwd(), os.path.dirname(os.path.abspath("configurator.py")))
every = int(flags["eval_interval"])
for step in range(int(flags["max_iters"]) + 1):
    loss = 4.2 - step / 100
    if step % every == 0:
        print(f"step {step}: train loss {loss:.4f}, val loss {loss:.4f}")
    print(f"iter {step}: loss {loss:.4f}, time {5000.0 if step < 5 else 20.0 + step % 2:.2f}ms, mfu 1.00%")
if every < 10**6:
    time.sleep(60)
"""


def nanogpt(folder: Path) -> Path:
    """Write the stand-in; return its folder."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN_PY)
    (folder / "sizes.py").write_text('BATCH = "12"\n')
    (folder / "configurator.py").write_text("")
    return folder
