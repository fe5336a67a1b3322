"""What ranks under tensor parallelism do, for tests: orders of a RankPool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.config import make_config
from nanoray.config.layout import Layout
from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.models.precision import LossScaler
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import Plan
from tests.stress.equivalence import small_gpt


def dropout_masks(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Run one forward of dp 2 × tp 2 with dropout; emit each rank's masks in their order.

    With "sequence" the ranks of a replica share the positions. "stream_masks" has a string per
    position and sequence.
    """
    settings = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "block_size": 8,
        "micro_batch_size": 3,
        "dropout": 0.5,
    }
    cut = {"tp": 2, "sequence_parallel": order.get("sequence", False)}
    config = make_config(settings | cut | {"grad_accum_steps": 1})
    mesh = replace(mesh, layout=Layout.of(config, mesh.world_size))
    case = small_gpt(mesh, config, "fp32", 3)
    plan = Plan(
        case.model, mesh, config, 1, lambda model, x, y: model(x, y), LossScaler(mesh.device, False)
    )
    masks: dict[str, list[Any]] = {"stream": [], "attention": [], "stream_masks": []}

    def drop(module: nn.Module, args: Any, output: Tensor) -> None:
        rows = (output == 0).int().tolist()
        masks["stream_masks"].append(
            [["".join(map(str, row)) for row in sequence] for sequence in rows]
        )
        masks["stream"].append(str((output == 0).int().flatten()[:64].tolist()))

    def attend(q: Tensor, *args: Any) -> Tensor:
        masks["attention"].append(str((F.dropout(torch.ones(64)) == 0).int().tolist()))
        return q

    for name, module in case.model.named_modules():
        if name.endswith("dropout"):
            module.register_forward_hook(drop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        seed_generators(derive_seed(1, 0, 0, plan.data.index), mesh.device)
        plan.model(*case.batch(0))
    everyone = mesh.gather(masks)
    if everyone is not None:
        emit(everyone)
