"""Checkpoints from any mesh to any other: every rank's state is built in this process, saved, and
loaded elsewhere.

The ranks are those of torch's own fake process group, which sends nothing: cutting a model needs no
message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from nanoray.checkpoint import sharded_files
from nanoray.checkpoint.files import Draft, load, save
from nanoray.checkpoint.state.rank_state import Holding, Share
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.config import Batch, Config, make_config
from nanoray.config.layout import Layout
from nanoray.models.build import gpt_of
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.precision import LossScaler
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.pieces import whole_pieces, whole_shards
from nanoray.parallel.plan import Plan
from nanoray.train.guard.guards import Guards
from nanoray.train.optim.groups import make_optimizer

T = TypeVar("T")
CPU, STEP = torch.device("cpu"), 7
SMALL: dict[str, Any] = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 20,
    "block_size": 8,
    "bias": True,
    "bucket_mb": 0.004,
}
SMALL |= {
    "experts": 4,
    "expert_hidden": 24,
    "shared_experts": 1,
    "micro_batch_size": 1,
    "grad_accum_steps": 2,
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, settings
    "zero1 3": (3, {"dp_mode": "zero1"}),
    "fsdp 3": (3, {"dp_mode": "fsdp"}),
    "tp 2": (2, {"tp": 2}),
    "tp 4, sequence": (4, {"tp": 4, "sequence_parallel": True}),
    "pp 2": (2, {"pp": 2}),
    "pp 2, interleaved, zero2": (4, {"pp": 2, "pp_schedule": "interleaved", "dp_mode": "zero2"}),
    "ep 2": (2, {"ep": 2, "dp_mode": "ddp_by_hand"}),
    "ep 4, tp 2": (8, {"ep": 4, "tp": 2, "dp_mode": "zero1"}),
    "ep 2, tp 2, pp 2": (8, {"ep": 2, "tp": 2, "pp": 2, "dp_mode": "zero1"}),
    "tp 2, fsdp 2": (4, {"tp": 2, "dp_mode": "fsdp"}),
}
PAIRS = [*permutations(MESHES, 2)]
WALK = ("tp 2", "pp 2", "fsdp 3", "ep 2", "ep 2, tp 2, pp 2", "tp 2")
FEW = [*pairwise(WALK)]  # the others are near to these


def model_of(config: Config) -> GPT:
    torch.manual_seed(0)
    return gpt_of(ModelShape.of(config, 65), config)


def state_of(rank: int, world: int, config: Config) -> TrainState:
    """Build one rank's state as the recipe does, before its first step."""
    model, layout = model_of(config), Layout.of(config, world)
    mesh = Mesh(rank, world, rank, CPU, "gloo", "test", layout=layout)
    guards = Guards(config, Batch(1, 2, layout.dp), CPU, None)
    scaler = LossScaler(CPU, enabled=False)
    # The state lists what the whole model has, before the plan cuts it.
    state = TrainState(model, make_optimizer(model, config, None), scaler, guards)
    plan = Plan(model, mesh, config, 2, lambda model, x, y: model(x, y), scaler)
    assert plan.shards is not None
    optimizer = make_optimizer(model, config, plan.shards)
    state.hold(Share(Holding(plan.shards, optimizer), weights=plan.weights))
    return state


def on_each_rank(mesh: str, do: Callable[[int, TrainState], T]) -> Iterator[T]:
    """Yield what `do` returns for the rank and state of each rank of a mesh, one after the other."""
    world, settings = MESHES[mesh]
    config = make_config(SMALL | settings)
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield do(rank, state_of(rank, world, config))
        finally:
            dist.destroy_process_group()


@cache
def truth() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Every element of the weights, and of the optimizer's state, different from every other one."""
    weights, state, at = {}, dict[str, dict[str, Tensor]](), 0
    for name, p in model_of(make_config(SMALL)).named_parameters():
        numbers = torch.arange(at, at + p.numel(), dtype=torch.float32).view(p.shape)
        weights[name], at = numbers / 1024, at + p.numel()
        state[name] = {
            "exp_avg": -numbers / 512,
            "exp_avg_sq": 1 / (1 + numbers),
            "step": torch.tensor(float(STEP)),
        }
    return weights, state


@torch.no_grad()
def fill_in(state: TrainState) -> None:
    """Write what this rank holds of the truth into its weights and its optimizer."""
    weights, moments = truth()
    for shard in [*(state.weights or whole_shards(state.model)), *state.shards]:
        shard.param.copy_(shard.piece.take(weights[shard.piece.name]).view_as(shard.param))
    for shard in state.shards:
        every = moments[shard.piece.name]
        state.optimizer.state[shard.param] = {
            key: t if key == "step" else shard.piece.take(t).view_as(shard.param).clone()
            for key, t in every.items()
        }


def require_truth(state: TrainState) -> int:
    """Every element that this rank holds is the right one; return how many bytes of optimizer state
    it holds.
    """
    weights, moments = truth()
    for shard in [*(state.weights or whole_shards(state.model)), *state.shards]:
        assert torch.equal(
            shard.param.detach().reshape(-1), shard.piece.take(weights[shard.piece.name])
        )
    for shard in state.shards:
        for key, tensor in state.optimizer.state[shard.param].items():
            right = moments[shard.piece.name][key]
            assert torch.equal(
                tensor.reshape(-1), right.view(-1) if key == "step" else shard.piece.take(right)
            ), key
    return sum(shard.param.nbytes for shard in state.shards)


def saved_by(mesh: str, folder: Path, change: Callable[[TrainState], None]) -> Path:
    """Save a checkpoint as the ranks of a mesh would, after `change`."""
    draft, first = Draft(folder, STEP, "0", None), []
    with draft.errors():
        draft.begin(1000)

    def write(rank: int, state: TrainState) -> None:
        change(state)
        state.step = STEP
        packed = state.pack_own(rank == 0)
        packed.rng = [{"cpu": torch.get_rng_state()}] * (rank == 0)
        packed.meta |= {"world_size": MESHES[mesh][0], "model_shape": {}}
        if rank:
            sharded_files.write(draft.temp, rank, packed)
        else:
            first.append(packed)

    for _ in on_each_rank(mesh, write):
        pass
    save(draft, first[0], MESHES[mesh][0], 9, lambda: None)
    return draft.final


def load_into(path: Path, state: TrainState) -> None:
    state.load(load(path, state.pieces, state.weight_pieces))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What each mesh has saved of the truth, written once."""
    folder, made = tmp_path_factory.mktemp("meshes"), dict[str, Path]()

    def path(mesh: str) -> Path:
        if mesh not in made:
            made[mesh] = saved_by(mesh, folder / mesh, fill_in)
        return made[mesh]

    return path


@pytest.mark.parametrize(
    ("before", "after"),
    [pair if pair in FEW else pytest.param(*pair, marks=pytest.mark.full) for pair in PAIRS],
)
def test_any_mesh_loads_the_bits_that_any_other_saved(
    before: str, after: str, saved: Callable[[str], Path]
) -> None:
    """Weights and optimizer state, element by element, on every rank; all of them together hold
    every element.
    """
    path = saved(before)

    def look(rank: int, state: TrainState) -> int:
        load_into(path, state)
        assert state.step == STEP
        return require_truth(state)

    wanted = sum(4 * piece.numel for piece in whole_pieces(model_of(make_config(SMALL))).values())
    assert sum(on_each_rank(after, look)) >= wanted


@pytest.mark.full
def test_a_state_survives_a_walk_over_all_meshes(
    tmp_path: Path, saved: Callable[[str], Path]
) -> None:
    """Each mesh saves what it has loaded from the one before; one process reads the last one's
    whole state.
    """
    path = saved("tp 2")
    for n, mesh in enumerate(MESHES):
        path = saved_by(mesh, tmp_path / str(n), lambda state, path=path: load_into(path, state))  # type: ignore[misc]
    weights, moments = truth()
    found = load(path)
    assert len(PAIRS) >= 40
    for name, tensor in weights.items():
        assert torch.equal(found.model[name], tensor), name
        for key, right in moments[name].items():
            assert torch.equal(found.optimizer[f"{key}.{name}"], right), (key, name)
