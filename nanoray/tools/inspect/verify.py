"""`nanoray inspect --verify`: one batch forward and backward on this CPU, compared with the dump.

    shapes        every module got and returned what the tree says
    connections   and read the modules that the tree says
    called        no module with a forward is left out, and every result leads to the loss
    gradients     every trained parameter has one, and it is finite
    tied          weights are the same tensor where they should be, and equal in the checkpoint
    parameters    as many as the formula says
    loss          is finite

A module that is never called but whose weights have gradients is computed by another one (the
router of experts, or lm_head under loss_chunk), and is no dead branch.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.data.images import ImageData
from nanoray.data.prepare import prepare
from nanoray.data.tokens import TokenData
from nanoray.errors import CheckpointError, ConfigError
from nanoray.forecast.trial import TrialPass
from nanoray.mesh.pieces import whole_shards
from nanoray.models import costs, resnet_costs
from nanoray.models.build import OwnShape, build_model
from nanoray.models.gpt import ModelShape
from nanoray.models.precision import autocast, step_unless, weight_type
from nanoray.state.optimizer_part import optimizer_tensors
from nanoray.tools.inspect.layers import layer_of, layers_of
from nanoray.tools.inspect.subject import Subject
from nanoray.tools.inspect.tree import modules_of
from nanoray.train.optim.groups import make_optimizer

TIED = ("lm_head.weight", "tok_emb.weight")  # of a GPT
SHOWN = 8  # names in a line


def verify(subject: Subject, description: dict[str, Any]) -> dict[str, Any]:
    """Run one batch, and return checks and measurements.

    Raises NanorayError without a model or data.
    """
    model = _real_model(subject)
    x, y = _real_batch(subject)
    return verify_model(subject, description, model, x, y)


def _real_model(subject: Subject) -> nn.Module:
    """Return the model with the checkpoint's weights, else with new ones."""
    config = subject.config
    if subject.script:
        return subject.model
    if isinstance(subject.shape, OwnShape):
        raise CheckpointError(
            "the model is a script's own; verify it from there: nanoray inspect SCRIPT.py --verify"
        )
    torch.manual_seed(config.seed)
    model = build_model(config, subject.dataset.vocab_size).to(weight_type(config.precision))
    if subject.state:
        try:
            model.load_state_dict(subject.state.model)
        except RuntimeError as error:
            raise CheckpointError(
                f"{subject.checkpoint} does not fit this model: "
                f"{' '.join(str(error).split())[:300]}; drop the flags "
                "that change the model"
            ) from None
    return model


def _real_batch(subject: Subject) -> tuple[Any, Any]:
    """Return the first micro batch of the run's training data."""
    if subject.example and subject.script:
        return subject.example
    config, dataset = subject.config, subject.dataset
    if not dataset.path.is_dir() or not dataset.train_tokens:
        dataset = prepare(config)
        if dataset.vocab_size != subject.dataset.vocab_size:
            raise ConfigError(
                f"its data is not here, and {dataset.note} has another vocabulary; verify where "
                "that is"
            )
    if dataset.kind == "images":
        return ImageData(dataset, config.seed, torch.device("cpu")).train_batch(
            0, subject.batch.micro
        )
    return TokenData(dataset, config.block_size, config.seed, torch.device("cpu")).train_batch(
        0, subject.batch.micro
    )


def verify_model(
    subject: Subject, description: dict[str, Any], model: nn.Module, x: Any, y: Any
) -> dict[str, Any]:
    """Run one batch through `model` and one update; return checks and measurements."""
    config = subject.config
    # In the mode in which it trains: a script may have set modules of its model to eval mode.
    trial = TrialPass(model)
    with autocast("cpu", config.precision):
        loss = trial.forward(lambda: subject.loss(model, x, y), (x, y))
    trial.backward(loss)
    seen = modules_of(subject, trial)
    before = description["modules"]

    # The tree may stem from this batch alone; then there is nothing to compare it with.
    if description["loss_reads"] is None:
        description |= {"modules": seen, "loss_reads": trial.loss_reads, "unused": trial.unused}
        same = "the tree shows this batch: there was no trial before it to compare with"
        checks = [_check("shapes", [], same), _check("connections", [], same)]
    else:
        checks = _compared(description, seen, trial)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    checks += [
        _called(model, trial),
        _gradients(gradients),
        _tied(subject, description, model),
        *_counted(subject, model),
        _check(
            "loss",
            [] if torch.isfinite(loss) else [f"the loss is {loss.item()}"],
            f"{loss.item():.4f}",
        ),
    ]
    # Not an error: an expert that receives no token has a gradient of zero in this batch.
    zero = [name for name, g in gradients.items() if g is not None and not g.any()]
    optimizer = _optimizer_bytes(subject, model)
    return {
        "ok": all(check["ok"] for check in checks),
        "loss": loss.item(),
        "checks": checks,
        "gradients_of_zero": zero,
        "layers": _measured(subject, before, trial, optimizer),
    }


def _check(name: str, problems: list[str], fine: str) -> dict[str, Any]:
    shown = problems[:SHOWN]
    if len(problems) > SHOWN:
        shown.append(f"and {len(problems) - SHOWN} more")
    return {
        "check": name,
        "ok": not problems,
        "found": "; ".join(shown) if problems else fine,
        "problems": problems,
    }


def _compared(
    description: dict[str, Any], seen: list[dict[str, Any]], trial: TrialPass
) -> list[dict[str, Any]]:
    """Compare shapes and connections with those of the tree."""
    shapes = []
    reads = []
    names = {row["name"]: row for row in seen}
    for row in description["modules"]:
        name = row["name"] or "the model"
        now = names.get(row["name"])
        if now is None:
            shapes.append(f"{name} is in the tree and not in the model")
            continue
        for side in ("inputs", "outputs"):
            if now[side] != row[side]:
                shapes.append(
                    f"{name} {side} {_shapes(now[side])}, in the tree {_shapes(row[side])}"
                )
        if {*now["reads"]} != {*row["reads"]}:
            reads.append(f"{name} reads {_list(now['reads'])}, in the tree {_list(row['reads'])}")
    if {*trial.loss_reads} != {*description["loss_reads"]}:
        now_read = _list(trial.loss_reads)
        read_in_tree = _list(description["loss_reads"])
        reads.append(f"the loss reads {now_read}, in the tree {read_in_tree}")
    edges = sum(len(row["reads"]) for row in seen)
    return [
        _check("shapes", shapes, f"{len(seen)} modules, as in the tree"),
        _check("connections", reads, f"{edges} connections, as in the tree"),
    ]


def _shapes(tensors: list[Any]) -> str:
    return " ".join(f"{tuple(shape)} {dtype}" for shape, dtype in tensors) or "nothing"


def _list(names: list[str]) -> str:
    return ", ".join(names) or "nothing"


def _called(model: nn.Module, trial: TrialPass) -> dict[str, Any]:
    """Find modules that are never called and have no gradients, and results that are not used."""
    dead: list[str] = []
    for name, module in model.named_modules():
        has_forward = type(module).forward is not nn.Module.forward
        if trial.seen[name].calls or not has_forward or isinstance(module, nn.Identity):
            continue
        # A called module may use the weights of another one by itself.
        used = any(p.grad is not None for p in module.parameters())
        # The children of a dead module are dead too; only the module itself is reported.
        if not used and not any(name.startswith(f"{other}.") for other in dead):
            dead.append(name)
    problems = [
        f"{name} ({type(model.get_submodule(name)).__name__}) is never called" for name in dead
    ]
    inner = [
        name
        for name in trial.unused
        if not any(name.startswith(f"{other}.") for other in trial.unused if other)
    ]
    problems += [f"the loss does not depend on the result of {name}" for name in inner]
    calls = sum(seen.calls > 0 for seen in trial.seen.values())
    return _check("called", problems, f"{calls} modules; every result leads to the loss")


def _gradients(gradients: dict[str, Tensor | None]) -> dict[str, Any]:
    problems = [
        f"{name} has no gradient" for name, gradient in gradients.items() if gradient is None
    ]
    problems += [
        f"{n}: the gradient is not finite"
        for n, g in gradients.items()
        if g is not None and not g.isfinite().all()
    ]
    return _check("gradients", problems, f"{len(gradients)} parameters have one")


def _tied(subject: Subject, description: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Compare tied names with the tree, with a GPT's tie, and with the checkpoint's values."""
    named = dict(model.named_parameters(remove_duplicate=False))
    pairs = {
        row["name"]: row["tied_to"]
        for row in description["tensors"]
        if row["tied_to"] and row["kind"] == "parameter"
    }
    if isinstance(subject.shape, ModelShape):
        pairs[TIED[0]] = TIED[1]
    problems = []
    for name, other in pairs.items():
        if named.get(name) is not named.get(other):
            problems.append(f"{name} is not {other}: they are two tensors, and would drift apart")
        saved = subject.state.model if subject.state else {}
        if name in saved and other in saved and not torch.equal(saved[name], saved[other]):
            problems.append(f"{name} and {other} differ in the checkpoint")
    fine = ", ".join(f"{name} is {other}" for name, other in pairs.items()) or "no weights are tied"
    return _check("tied", problems, fine)


def _counted(subject: Subject, model: nn.Module) -> list[dict[str, Any]]:
    """Compare the number of parameters with the formula; a script's own model has none."""
    shape = subject.shape
    have = sum(p.numel() for p in model.parameters())
    if isinstance(shape, OwnShape):
        return []
    if isinstance(shape, ModelShape):
        want = costs.count_parameters(shape)
    else:
        want = resnet_costs.count_parameters(shape)
    problems = []
    if have != want:
        problems.append(f"{have:,} parameters, by the formula {want:,}")
    return [_check("parameters", problems, f"{have:,}, as by the formula")]


def _optimizer_bytes(subject: Subject, model: nn.Module) -> dict[str, int]:
    """Return the bytes that the optimizer keeps after one update, by layer."""
    optimizer = subject.optimizer
    shards = whole_shards(model)
    if optimizer is None:
        optimizer = make_optimizer(model, subject.config)
    # Optimizers make their state in the first update, so it can be measured only after it.
    step_unless(optimizer, None)
    found: dict[str, int] = {}
    for name, tensor in optimizer_tensors(optimizer, shards).items():
        # Scalars, such as step counters, are no state per element.
        if tensor.dim():
            layer = layer_of(name.partition(".")[2], subject.model, subject.shape)
            found[layer] = found.get(layer, 0) + tensor.nbytes
    return found


def _measured(
    subject: Subject, before: list[dict[str, Any]], trial: TrialPass, optimizer: dict[str, int]
) -> list[dict[str, Any]]:
    """Return for each layer the bytes that one process keeps, as predicted and as measured."""
    kept: dict[str, int] = {}
    for name, seen in trial.seen.items():
        layer = layer_of(name, subject.model, subject.shape)
        kept[layer] = kept.get(layer, 0) + seen.kept
    # Selective checkpointing keeps products outside of autograd's hooks.
    seen_all = subject.config.activation_checkpointing != "selective"
    return [
        asdict(layer)
        | {
            "kept_measured": kept.get(layer.name, 0) if seen_all else None,
            "optimizer_measured": optimizer.get(layer.name, 0),
        }
        for layer in layers_of(subject, before, cut=False)
    ]
