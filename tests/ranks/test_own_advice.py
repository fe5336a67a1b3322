"""A refusal that advises another dp_mode: the advised mode then trains the same model."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from nanoray.config import make_config
from nanoray.data.dataset import own_data
from nanoray.own.engine import RuntimeEngine
from nanoray.own.program import Program
from nanoray.own.run import Run
from nanoray.own.settings import DEFAULTS
from nanoray.start.folder import open_run
from tests.harness.lasting_ranks import LastingRanks
from tests.harness.parsing import parse
from tests.harness.zoo import SAMPLES, WIDTH, Checkpointed, Layered, vectors

ROOT = Path(__file__).resolve().parents[2] / "nanoray"
SETTINGS: dict[str, Any] = {
    "global_batch_size": 12,
    "micro_batch_size": 0,
    "max_steps": 6,
    "log_every": 6,
    "eval_every": 0,
    "checkpoint_every": 0,
    "tensorboard": False,
    "precision": "fp32",
    "timeout_s": 15,
    "init_timeout_s": 30,
}


class Layers(nn.Module):
    """Three layers, for subclasses to change."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.head(h)


class TwoTypes(Layers):
    """Some weights in bf16, others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).bfloat16()
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.head(h.float())


class OneMemory(Layers):
    """Two parameters over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2 * WIDTH)
        self.first = nn.Parameter(both[:WIDTH])
        self.second = nn.Parameter(both[4 : WIDTH + 4])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.first + self.second)


class Complex(nn.Module):
    """All of its weights are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
        self.head = nn.Linear(WIDTH, 1, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.into(x.to(torch.complex64)))).real


class Number(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Hooked(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient * 2)


class Shared(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight


class OnDataThemselves(Layers):
    """Skips a layer on some ranks, before one that reads the data."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        h = self.into(x)
        if x[0, 1] > 0:
            h = h + first(h)
        return self.head(h + second(x))


class Translated(Layers):
    """Its state_dict has another entry."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.add)
        self.register_load_state_dict_pre_hook(self.drop)

    @staticmethod
    def add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["added"] = torch.zeros(1)

    @staticmethod
    def drop(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state.pop("added", None)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)))


def tiny() -> nn.Module:
    """Return a model with too few elements for two ranks: one."""
    model = nn.Linear(WIDTH, 1, bias=False)
    model.weight = nn.Parameter(torch.ones(1, WIDTH))
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))


def look(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Do nothing, as a hook around a step."""


def hook_before(optimizer: Any) -> None:
    optimizer.register_step_pre_hook(look)


def hook_after(optimizer: Any) -> None:
    optimizer.register_step_post_hook(look)


def replace_step(optimizer: Any) -> None:
    of_class = optimizer.step
    optimizer.step = lambda *args, **kwargs: of_class(*args, **kwargs)


@dataclass(frozen=True)
class Refusal:
    """A model that a mode refuses, and words of the refusal."""

    model: Callable[[], nn.Module]
    mode: str
    words: str
    optimizer: str = "SGD"
    prepare: Callable[[Any], None] | None = None  # what is done to the optimizer


REFUSALS = {
    "rows": Refusal(Layers, "zero1", "gives the optimizer flat pieces", "Adafactor"),
    "two types": Refusal(TwoTypes, "fsdp", "gathers weights of one type together"),
    "scripted": Refusal(scripted, "zero2", "needs hooks, which a module of torch.jit.script"),
    "one memory": Refusal(OneMemory, "zero1", "are two parameters over the same memory"),
    "complex": Refusal(Complex, "fsdp", "sums gradients as real numbers"),
    "number": Refusal(Number, "fsdp", "is a single number"),
    "hook": Refusal(Hooked, "fsdp", "has a hook on its gradient"),
    "shared": Refusal(Shared, "fsdp", "belongs to several layers"),
    "order": Refusal(partial(Layered, "order"), "fsdp", "calls them in a different order"),
    "on data": Refusal(OnDataThemselves, "fsdp", "skips a layer before one that reads"),
    "two parts": Refusal(partial(Checkpointed, True, True), "ddp", "of a parameter in two parts"),
    "translated": Refusal(Translated, "zero1", "a hook translates its state_dict"),
    "too small": Refusal(tiny, "fsdp", "no element of this small model"),
    "hook before": Refusal(Layers, "zero1", "(register_step_pre_hook)", prepare=hook_before),
    "hook after": Refusal(Layers, "fsdp", "(register_step_post_hook)", prepare=hook_after),
    "own step": Refusal(Layers, "zero2", "has been replaced by another", prepare=replace_step),
    "norms in bf16": Refusal(normed, "fsdp bf16", "with batch normalisation"),
}
# Advised where this test cannot come: on Ray, where fsdp trains a copy of the model; and where ranks
# have gathered different layers already, so that they wait for each other
ELSEWHERE = (
    "keep what cannot be copied outside of the model, or use dp_mode zero2",
    "so they may have gathered different weights",
)


def train(run: Run, refusal: Refusal) -> None:
    torch.manual_seed(0)
    model = refusal.model()
    settings = {"momentum": 0.9} if refusal.optimizer == "SGD" else {}
    optimizer = getattr(torch.optim, refusal.optimizer)(model.parameters(), lr=0.01, **settings)
    if refusal.prepare is not None:
        refusal.prepare(optimizer)
    data = TensorDataset(*vectors(0, SAMPLES))
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(data)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LastingRanks]:
    with LastingRanks(2) as pair:
        yield pair


def outcome(ranks: LastingRanks, refusal: Refusal, mode: str, folder: Path) -> dict[str, Any]:
    dp_mode, _, gather = mode.partition(" ")
    settings = {"dp_mode": dp_mode, "out_dir": str(folder)}
    if gather:
        settings |= {"fsdp_gather": gather, "precision": "bf16"}
    spec = open_run(make_config(DEFAULTS | SETTINGS | settings), own_data(), 0.0)
    outcomes = ranks.train(spec, Program(partial(train, refusal=refusal), frozenset(settings)))
    # A rank may be alone with its refusal: the others then wait for it in vain.
    failed = [found for found in outcomes if "error" in found]
    failed.sort(key=lambda found: found["error"] == "RuntimeError")
    return failed[0] if failed else outcomes[0]


def advised(message: str) -> list[str]:
    """Return the modes that the end of a message advises."""
    mode = "(?:ddp_by_hand|ddp|zero1|zero2|fsdp)"
    found = re.findall(rf"dp_mode ({mode}(?:(?:, | or ){mode})*)", message)
    return re.split(", | or ", found[-1]) if found else []


# Whose modes `make test` trains in; the others' are for `make test-all`
EVERYDAY = ("rows", "scripted", "one memory", "shared", "two parts", "hook before")


@pytest.mark.parametrize(
    "name",
    [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in REFUSALS],
)
def test_an_advised_mode_accepts_the_model(ranks: LastingRanks, tmp_path: Path, name: str) -> None:
    refusal = REFUSALS[name]
    refused = outcome(ranks, refusal, refusal.mode, tmp_path / "refused")
    assert refused.get("error") == "ConfigError", refused
    assert refusal.words in refused["message"]
    modes = advised(refused["message"])
    assert modes, refused["message"]
    for mode in modes:
        found = outcome(ranks, refusal, mode, tmp_path / mode)
        assert "error" not in found, f"{refused['message']}\n{mode}: {found}"


def texts_with_advice() -> Iterator[str]:
    """Yield each text of the code about a script's model that advises a mode, as a pattern."""
    files = [*(ROOT / "own").rglob("*.py"), *(ROOT / "parallel").glob("fsdp*.py")]
    files += [ROOT / "own" / "absent.py", ROOT / "parallel" / "ddp.py"]
    for file in files:
        tree = parse(file.read_text(encoding="utf-8"))
        inner = {id(n) for j in ast.walk(tree) if isinstance(j, ast.JoinedStr) for n in j.values}
        for node in ast.walk(tree):
            parts: list[str] = []
            if isinstance(node, ast.JoinedStr):
                for value in node.values:
                    is_text = isinstance(value, ast.Constant)
                    parts.append(re.escape(str(value.value)) if is_text else "(?s:.*)")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [] if id(node) in inner else [re.escape(node.value)]
            pattern = "".join(parts)
            if re.search(r"(use|or)\\ dp_mode\\ (ddp|zero|fsdp)", pattern):
                yield pattern


def test_each_text_with_an_advice_is_tried() -> None:
    """By a model above, whose words are part of it."""
    words = [refusal.words for refusal in REFUSALS.values()]
    texts = [pattern.replace("\\", "") for pattern in texts_with_advice()]
    assert len(texts) > 15
    not_tried = [text for text in texts if not any(part in text for part in [*words, *ELSEWHERE])]
    assert not not_tried
