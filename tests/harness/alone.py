"""One rank in the test's own process, built as a run builds it."""

from __future__ import annotations

from collections.abc import Callable

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.faults.inject import Injector
from nanoray.parallel.mesh import join
from nanoray.parallel.rendezvous import Order, Rendezvous
from nanoray.train.elastic import TrainingGroup
from nanoray.train.engine import Engine
from nanoray.train.recipe import Recipe
from nanoray.train.tasks import task_of


def engine_of(spec: RunSpec, wanted: Callable[[], Order] = lambda: Order.GO_ON) -> Engine:
    """Return the engine of a run of one rank; its precision must not be `auto`."""
    group = TrainingGroup(spec, join(Rendezvous(), {}, 20, 20))
    injector = Injector(spec.folder / "faults.jsonl")
    injector.plan(spec.config.faults, 0, spec.attempt, spec.started)
    recipe = Recipe(group, (), wanted, injector, task_of(spec))
    return recipe.build(group)
