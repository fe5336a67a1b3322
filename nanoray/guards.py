"""Never train on silently: what may not reach the weights, and whether all ranks still hold the same ones.

    gradient norm ──► judge() ──► found_inf ──► the fused optimizer leaves this update out, on the device, on all ranks
                         └──────► react()   ──► replay the step, name rank, layer and samples; stop | skip | roll back
    weights, state ─► compare() ─► all ranks hash alike? the majority's state heals a minority; no majority: restart

After the all-reduce every rank holds the same gradients, so every rank decides alike without a word. On CPU the host
reads the norm of each step. On a GPU it looks on logged steps, where it waits for the device anyway; until then
the device itself keeps a bad update out, and with `stop` and `rollback` every later one, too.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from nanoray import checkpoint
from nanoray.callbacks import Rewindable
from nanoray.errors import StateDiverged, TrainingDiverged
from nanoray.model import GPT, LMHead
from nanoray.optim import lr_at, optimizer_tensors
from nanoray.precision import autocast
from nanoray.recovery import adopt
from nanoray.saving import restore

if TYPE_CHECKING:
    from nanoray.engine import RuntimeEngine

MOST_SKIPS = 10  # updates in a row that on_nan=skip leaves out before it gives up
MOST_ROLLBACKS = 3  # times that on_nan=rollback returns to one checkpoint
SPIKE, SPIKE_WINDOW, SPIKE_LEAST = 10.0, 100, 20  # times the median; of so many norms; known before any is a spike
_NAMED = 4  # ranks that a message describes


class Finding(NamedTuple):
    """What one rank knows of a step that was not finite."""

    loss: float  # its own, when the step was first done
    layer: str  # where the replay first met something not finite; empty when it met nothing
    samples: str


class Guards:
    """One rank's guards over an engine."""

    def __init__(self, engine: RuntimeEngine) -> None:
        """Watch `engine`, whose device and configuration are known; nothing is computed yet."""
        self.engine = engine
        device, cfg = engine.mesh.device, engine.cfg
        self.reads_each_step = device.type == "cpu"  # no device to wait for
        self._sticky = cfg.on_nan != "skip"  # a replay is exact while the weights are those of the bad step
        self._stuck = torch.zeros((), device=device)
        self._ring = torch.zeros(3, cfg.log_every + 1, device=device)  # left out (0 or 1), own loss, gradient norm
        self._steps: list[int] = []  # the steps in the ring's columns: those since the last look
        self._norms: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._in_spike = False
        self._row = 0  # updates left out in a row
        self._place, self._returns = "", 0  # the checkpoint of the last rollback, and how often it was used
        self._compared = -1
        self.skipped = self.rollbacks = self.healed = self.spikes = 0

    def metrics(self) -> dict[str, int]:
        """Return the counts of this attempt, for a record."""
        return {
            "fault/skipped_steps": self.skipped,
            "fault/rollbacks": self.rollbacks,
            "fault/healed": self.healed,
            "fault/grad_spikes": self.spikes,
        }

    def state(self) -> dict[str, Any]:
        """Return what a rank that takes over this one's memory must know to decide alike."""
        names = ("_steps", "_row", "_place", "_returns", "_compared", "skipped", "rollbacks", "healed", "spikes")
        return {name: getattr(self, name) for name in names} | {
            "ring": self._ring[:, : len(self._steps)].tolist(),
            "stuck": self._stuck.item(),
            "norms": list(self._norms),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Put back what `state` returned."""
        ring, stuck, norms = state.pop("ring"), state.pop("stuck"), state.pop("norms")
        for name, value in state.items():
            setattr(self, name, value)
        self._ring[:, : len(self._steps)] = torch.tensor(ring, device=self._ring.device)
        self._stuck.fill_(stuck)
        self._norms.clear()
        self._norms.extend(norms)

    # What may not reach the weights.

    def judge(self, grad_norm: Tensor, own_loss: Tensor, mean_loss: Tensor | None) -> Tensor | None:
        """Return 1 on the device where this update must be left out, else 0; None when the host knows that it is good.

        `own_loss` is this rank's, `mean_loss` all ranks' where it is known: whatever decides is equal on all ranks. An
        overflow in fp16 is the loss scaler's, and no event. Never waits for a GPU.
        """
        step = self.engine.step + 1
        while self._steps and self._steps[-1] >= step:  # a step that was cut off, and is done again
            self._steps.pop()
        watched = [] if self.engine.scaler.enabled else [grad_norm]
        if mean_loss is not None:
            watched.append(mean_loss)
        bad = torch.zeros_like(self._stuck)
        if watched:
            bad = (~torch.isfinite(torch.stack(watched)).all()).to(self._stuck.dtype)
        if self._sticky:
            self._stuck = bad = torch.maximum(self._stuck, bad)
        self._ring[:, len(self._steps)] = torch.stack([bad, own_loss.float(), grad_norm.float()])
        self._steps.append(step)
        return None if self.reads_each_step and not bad else bad

    def react(self, look: bool) -> bool:
        """Deal with the updates left out since the last look; return whether the run went back to an older step.

        (all ranks) On a GPU nothing is looked at unless `look`. Raises TrainingDiverged with on_nan=stop, or
        where the other ways end.
        """
        if not (look or self.reads_each_step) or not self._steps:
            return False
        seen = list(zip(self._steps, *self._ring[:, : len(self._steps)].tolist(), strict=True))
        self._steps = []
        longest = 0
        for _, flag, _, _ in seen:
            self._row = self._row + 1 if flag else 0
            longest = max(longest, self._row)
        bad = [(step, loss, norm) for step, flag, loss, norm in seen if flag]
        if not bad:
            self._watch(seen[-1][0], seen[-1][3])
            return False
        self._stuck.zero_()
        step, loss, norm = bad[0]
        on_nan = self.engine.cfg.on_nan
        self._compared = -1
        self.compare(
            due=True
        )  # a flipped bit of an exponent makes infinities, too: then this is the cause, and the cure
        why = self._explain(step, loss, norm)
        if on_nan == "rollback":
            self._roll_back(why)
            return True
        if on_nan == "stop":
            raise TrainingDiverged(f"{why}. The update was left out: weights and checkpoints are good")
        if longest > MOST_SKIPS:
            raise TrainingDiverged(f"{why}. More than {MOST_SKIPS} updates in a row were left out with on_nan skip")
        self.skipped += len(bad)
        more = f", and {len(bad) - 1} more after it" if len(bad) > 1 else ""
        self.engine.note(f"warning  {why}. The update was left out{more}; training goes on")
        return False

    def _explain(self, step: int, loss: float, norm: float) -> str:
        """Do the bad step again with hooks, and say what all ranks found. (all ranks)"""
        engine = self.engine
        start = engine.samples - (engine.step - step + 1) * engine.batch.global_size  # the step's first sample
        layer, micro = self._replay(step, start)
        findings = engine.mesh.all_gather(Finding(loss, layer, self._samples(start, micro)))
        named = [(r, f) for r, f in enumerate(findings) if f.layer or not math.isfinite(f.loss)]
        mean = sum(f.loss for f in findings) / len(findings)
        if any(f.layer for f in findings):
            verdict = "it is not finite again: lower lr, set grad_clip, or look at that data"
        else:
            verdict = "it is finite this time: a transient error of the machine, or an injected fault"
        whose = "; ".join(
            f"rank {r}: own loss {f.loss:.4g}, samples {f.samples}" + (f", first in {f.layer}" if f.layer else "")
            for r, f in named[:_NAMED]
        ) + (f"; and {len(named) - _NAMED} more ranks" if len(named) > _NAMED else "")
        moved = "" if self._sticky or step > engine.step else f" with the weights of step {engine.step}"
        lr, last = lr_at(step - 1, engine.cfg), start + engine.batch.global_size - 1
        return (
            f"at step {step} the loss is {mean:.4g} and the gradient norm {norm:.4g} (lr {lr:.3g}, samples {start} to "
            f"{last}); done again{moved}, {verdict}. "
            + (f"Not finite on {whose}" if named else "Every rank's own loss and gradients are finite")
        )

    def _replay(self, step: int, start: int) -> tuple[str, int | None]:
        """Run the step's forward and backward without communication; leave gradients and generators as they were.

        Return what was first not finite, and in which micro batch. Data and dropout follow from (seed, step, rank) and
        the weights have not changed, so this is the same computation.
        """
        engine, accum = self.engine, self.engine.batch.accum
        rng, kept = engine._rng_state(), [p.grad for p in engine.params]
        engine.optimizer.zero_grad(set_to_none=True)
        engine.seed_dropout(step - 1)
        probe, where = Probe(engine.gpt), None
        with probe, torch.compiler.set_stance("force_eager"):  # compiled blocks would not see the hooks
            for micro in range(accum):
                x, y = engine.micro_batch(start, micro)
                with autocast(engine.mesh.device.type, engine.cfg.precision):
                    loss = engine.gpt(x, y)
                (loss / accum).backward()
                if probe.found and where is None:
                    where = micro
        if not probe.found and not torch.isfinite(
            get_total_norm([p.grad for p in engine.params if p.grad is not None])
        ):
            named = ((name, p.grad) for name, p in engine.gpt.named_parameters() if p.grad is not None)
            names = (f"the gradient of {name}" for name, grad in named if not torch.isfinite(grad).all())
            probe.found = next(names, "the norm of all gradients, which overflows")
        for p, grad in zip(engine.params, kept, strict=True):
            p.grad = grad
        engine._set_rng_state(rng)
        return probe.found, where

    def _samples(self, start: int, micro: int | None) -> str:
        """Write this rank's samples of a step, or of one of its micro batches."""
        size, accum, dp = self.engine.batch
        firsts = [start + (m * dp + self.engine.mesh.rank) * size for m in range(accum) if micro in (None, m)]
        return ", ".join(f"{first} to {first + size - 1}" for first in firsts)

    def _roll_back(self, why: str) -> None:
        """Go back to the newest valid checkpoint, and on with the data after the bad step. (all ranks)"""
        engine, mesh = self.engine, self.engine.mesh
        path = ""
        engine.saver.forget()
        if mesh.rank == 0:
            newest, _ = checkpoint.newest_valid(engine.spec.checkpoints)
            path = str(newest.path) if newest else engine.spec.resume  # or where the run came from
        path = mesh.broadcast(path)
        self._returns = self._returns + 1 if path == self._place else 1
        self._place = path
        if not path:
            raise TrainingDiverged(f"{why}. There is no checkpoint to roll back to; lower checkpoint_every")
        if self._returns > MOST_ROLLBACKS:
            raise TrainingDiverged(f"{why}. {MOST_ROLLBACKS} rollbacks to {path} did not get past it")
        engine.note(f"warning  {why}. Rolling back to {path}, and on with the data after it")
        cursor = engine.samples + engine.batch.global_size
        spec = engine.spec
        engine.spec = replace(spec, resume=path)
        restore(engine)
        engine.spec, engine.samples = spec, cursor
        engine._evaluated_step = engine._emitted_step = self._compared = -1  # those steps come again
        engine.optimizer.zero_grad(set_to_none=True)
        self.rollbacks += 1
        self._row = 0
        for callback in engine.callbacks:
            if isinstance(callback, Rewindable):
                callback.rewind(engine.step)

    def _watch(self, step: int, norm: float) -> None:
        """Warn when the gradient norm leaves its running median far behind."""
        median = statistics.median(self._norms) if len(self._norms) >= SPIKE_LEAST else math.inf
        spike = 0 < SPIKE * median < norm < math.inf
        if spike:
            self.spikes += 1
        if spike and not self._in_spike:  # said once, however long it lasts
            first = self.engine.samples - (self.engine.step - step + 1) * self.engine.batch.global_size
            self.engine.note(
                f"warning  gradient norm {norm:.3g} at step {step} is {norm / median:.0f} times its median "
                f"{median:.3g} (samples {first} to {first + self.engine.batch.global_size - 1})"
            )
        self._in_spike = spike
        if math.isfinite(norm):  # in fp16 it need not be
            self._norms.append(norm)

    # Whether all ranks hold the same weights.

    def compare(self, due: bool) -> None:
        """Compare the ranks' weights and optimizer state; heal a minority from the majority's memory. (all ranks)

        Raises StateDiverged when there is no majority. Costs one pass over the state, and one wait for the device.
        """
        engine, mesh = self.engine, self.engine.mesh
        if not due or mesh.world_size == 1 or not engine.cfg.hash_every or self._compared == engine.step:
            return
        self._compared = engine.step
        names, hashes = hash_tensors(replicated(engine))
        digests = mesh.all_gather((combine(hashes), engine.samples))
        (winner, votes), *others = Counter(digests).most_common()
        if not others:
            return
        everyone = mesh.all_gather((len(hashes), hashes))
        majority = votes > mesh.world_size / 2
        source = digests.index(winner) if majority else 0
        strays = [r for r, digest in enumerate(digests) if digest != digests[source]]
        what = "; ".join(f"rank {r} in {_first_difference(names, everyone[r], everyone[source])}" for r in strays)
        if not majority:
            raise StateDiverged(
                f"after step {engine.step} the ranks hold different weights or optimizer state, and no majority agrees:"
                f" {what}, compared with rank {source}. The newest checkpoint was written while all agreed: go on from "
                "it; ranks on unlike devices round differently, and need hash_every 0"
            )
        engine.live = mesh.rank not in strays  # should a rank be lost now, nobody takes over a stray's memory
        adopt(engine, source)
        self.healed += len(strays)
        engine.note(
            f"warning  after step {engine.step} the state differs from the majority's on {what}: a flipped bit, or a "
            f"faulty device. It took over the state of rank {source}; training goes on"
        )


class Probe:
    """While it is entered, note the first layer of a GPT whose output, or else whose gradient, is not finite."""

    def __init__(self, gpt: GPT) -> None:
        self.gpt, self.found = gpt, ""
        self._handles: list[Any] = []

    def __enter__(self) -> Probe:
        for name, module in self.gpt.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def look(what: str, tensor: Tensor) -> None:
            if not self.found and not torch.isfinite(tensor).all():
                self.found = what

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            # The padding of the vocabulary has logits of -inf on purpose.
            tokens = output[..., : module.vocab_size] if isinstance(module, LMHead) else output
            look(f"the output of {name}" if name else "the loss", tokens)
            if output.requires_grad:
                output.register_hook(lambda grad: look(f"the gradient at the output of {name or 'the model'}", grad))

        return hook


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}  # elements: an int64 product that stays in cache, or fills a GPU


def replicated(engine: RuntimeEngine) -> dict[str, Tensor]:
    """Return, in one order on all ranks, the tensors that must be equal on all of them."""
    tensors = {name: p.detach() for name, p in engine.gpt.named_parameters()}
    tensors |= dict(sorted(optimizer_tensors(engine.optimizer, engine.gpt).items()))
    return tensors | engine.scaler.tensors()


def hash_tensors(tensors: dict[str, Tensor]) -> tuple[list[str], list[int]]:
    """Return the names and a 64-bit sum of each tensor's bits: sum over i of (2i + 1)·x_i in int64, which wraps.

    x_i is an element's bits as an integer. One flipped bit changes a term by an odd multiple of a power of two below
    2^64, and two swapped elements of 32 bits change the sum by (x_i - x_j)·2(j - i), which 2^64 does not divide either:
    both always show.
    """
    sums, odd = [], {}
    for tensor in tensors.values():
        flat = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
        chunk = _CHUNK.get(flat.device.type, 1 << 20)
        if flat.device not in odd:
            odd[flat.device] = torch.arange(1, 2 * chunk, 2, device=flat.device)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for at in range(0, flat.numel(), chunk):
            part = flat[at : at + chunk]
            total += (part * odd[flat.device][: part.numel()]).sum()
            if at:
                total += part.sum(dtype=torch.int64) * (2 * at)
        sums.append(total)
    main = sums[0].device
    return list(tensors), torch.stack([s.to(main) for s in sums]).tolist()


def combine(hashes: list[int]) -> int:
    """Return one 64-bit number that changes when one of the hashes does."""
    return sum((2 * i + 1) * value for i, value in enumerate(hashes)) % 2**64


def _first_difference(names: list[str], ours: tuple[int, list[int]], theirs: tuple[int, list[int]]) -> str:
    if ours[0] != theirs[0]:
        return "the number of tensors of the optimizer"
    pairs = zip(names, ours[1], theirs[1], strict=False)
    return next((name for name, a, b in pairs if a != b), "the data cursor")
