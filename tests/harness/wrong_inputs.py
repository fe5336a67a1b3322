"""Programs with a mistake that a user makes: each must be refused before step 1, in one line.

The three tables list them: a name, the program, and the words that the message must contain, in this
order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from nanoray.models.weighted import Weighted
from nanoray.own.engine import RuntimeEngine
from nanoray.own.run import Run
from tests.harness.zoo import InitialisesItself, Samples, vectors


def inputs() -> Tensor:
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


def points() -> TensorDataset:
    x = inputs()
    return TensorDataset(x, x.sum(1, keepdim=True))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def fit(
    run: Run,
    model: Any = None,
    loss_fn: Any = F.mse_loss,
    data: Any = None,
    val: Any = None,
    trained: Any = None,
) -> None:
    """Train `model` by SGD; what is left out is right. `trained`: the optimizer's parameters."""
    torch.manual_seed(0)
    if model is None:
        model = network()
    elif isinstance(model, type) and issubclass(model, nn.Module):
        model = model()
    if trained is None:
        trained = model.parameters()
    optimizer = torch.optim.SGD(trained, lr=0.01)
    RuntimeEngine(model, optimizer, run, loss_fn).fit(points() if data is None else data, val)


# --- models ---


class Model(nn.Module):
    """A network whose subclasses have a mistake in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)


class TwoArguments(Model):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * mask


class NoForward(Model):
    pass


class ReturnsDict(Model):
    def forward(self, x: Tensor) -> Any:
        return {"logits": self.layer(x)}


class ReturnsTuple(Model):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x), x


class Raises(Model):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this model is unhappy")


class RaisesOften(Model):
    """Fails for some samples only, so on some ranks only."""

    def forward(self, x: Tensor) -> Tensor:
        if (x == inputs()[5]).all(1).any():
            raise IndexError("an unlucky sample")
        return self.layer(x)


class WrongShape(Model):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.layer(x))


class NoGradInside(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x)


class ThroughNumpy(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.layer(x).detach().numpy())


class ByHand(Model):
    """Computes gradients itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.sum().backward(retain_graph=True)
        return y


class InPlace(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.layer(x))
        y += 1  # the backward of sigmoid needs its result
        return y


class Remembers(Model):
    """Keeps the graph of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.state = self.state + y.mean()
        return y * self.state


class Evaluates(Model):
    """Returns another type in eval mode, as detection models do."""

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y if self.training else {"boxes": y}


class SparseRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x[:, 0].long().clamp(0, 7))
        return self.head(rows)


class Huge(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.empty(2**50)


class OtherDevice(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.ones(1, device="meta")


class Recursive(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Exits(Model):
    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit("gone")


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).double()).float()


class Renormalises(nn.Module):
    """The forward writes the rows that it reads: each rank others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, max_norm=0.5)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x[:, 0].mul(4).long().clamp(0, 7))
        return self.head(rows)


class OneRow(Model):
    """Has a row of weights for one rank alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Late(Model):
    """Makes a layer in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "second"):
            self.second = nn.Linear(1, 1)
        return self.second(self.layer(x))


class Leaves(Model):
    """Removes a layer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.second(x)
        del self.second
        return y


class Elsewhere(Model):
    """Its outputs depend on a tensor that is no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(1, requires_grad=True)
        return self.layer(x).detach() * scale


class HalfLazy(Model):
    """Has a lazy layer that the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.LazyLinear(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Shifts(Model):
    """Changes its inputs in place."""

    def forward(self, x: Tensor) -> Tensor:
        x -= 1
        return self.layer(x)


class Overlapping(nn.Module):
    """Two parameters over one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.randn(4, 1))
        self.part = nn.Parameter(self.all.data[:2])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.all + x[:, :2] @ self.part


class Teacher(Model):
    """Moves the average of its weights in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.average.weight.data = 0.9 * self.average.weight.data + 0.1 * self.layer.weight.data
        return self.layer(x) - self.average(x)


class BadState(Model):
    """Has a state that cannot be asked for."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_extra_state(self) -> Any:
        raise LookupError("no state yet")

    def set_extra_state(self, state: Any) -> None:
        pass


class Float4(Model):
    """Has a weight of a type that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        four_bits = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        self.packed = nn.Parameter(four_bits, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class SparseBuffer(Model):
    """Keeps a sparse matrix as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((self.graph @ x.T).T)  # type: ignore[operator]


class StateOfObjects(Model):
    """Has an extra state that is no data."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return {"lock": threading.Lock()}

    def set_extra_state(self, state: Any) -> None:
        pass


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return network()


def with_meta_buffer() -> nn.Module:
    model = network()
    model.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    return model


def frozen() -> nn.Module:
    return network().requires_grad_(False)


def inferred() -> nn.Module:
    with torch.inference_mode():
        return network()


def parallel() -> nn.Module:
    return nn.DataParallel(network())


# --- losses ---


def vector(output: Tensor, y: Tensor) -> Any:
    return F.mse_loss(output, y, reduction="none")


def as_float(output: Tensor, y: Tensor) -> Any:
    return F.mse_loss(output, y).item()


def detached(output: Tensor, y: Tensor) -> Any:
    return F.mse_loss(output, y).detach()


def integer(output: Tensor, y: Tensor) -> Any:
    return (output > y).sum()


def nothing(output: Tensor, y: Tensor) -> Any:
    F.mse_loss(output, y)


def three(output: Tensor, y: Tensor) -> Any:
    loss = F.mse_loss(output, y)
    return loss, loss, loss


def mapping(output: Tensor, y: Tensor) -> Any:
    return {"loss": F.mse_loss(output, y)}


def attributes(output: Tensor, y: Tensor) -> Any:
    return SimpleNamespace(loss=F.mse_loss(output, y))


def complex_loss(output: Tensor, y: Tensor) -> Any:
    return torch.complex(F.mse_loss(output, y), output.sum())


def boolean(output: Tensor, y: Tensor) -> Any:
    return (output > y).all()


def array(output: Tensor, y: Tensor) -> Any:
    return F.mse_loss(output, y).detach().numpy()


def backward_inside(output: Tensor, y: Tensor) -> Any:
    loss = F.mse_loss(output, y)
    loss.backward()
    return loss


def pair(output: Tensor, y: Tensor) -> Any:
    return F.mse_loss(output, y, reduction="sum"), len(y)


def weightless(output: Tensor, y: Tensor) -> Any:
    return Weighted(F.mse_loss(output, y, reduction="sum"), None)  # type: ignore[arg-type]


def below_zero(output: Tensor, y: Tensor) -> Any:
    return Weighted(F.mse_loss(output, y, reduction="sum"), torch.tensor(-1.0))


def vector_and_weight(output: Tensor, y: Tensor) -> Any:
    return Weighted(F.mse_loss(output, y, reduction="none"), len(y))


def not_a_number(output: Tensor, y: Tensor) -> Any:
    return F.mse_loss(output, y) * float("nan")


def raising(output: Tensor, y: Tensor) -> Any:
    raise KeyError("targets")


def one_argument(output: Tensor) -> Any:
    return output.mean()


def empty(output: Tensor, y: Tensor) -> Any:
    return F.mse_loss(output, y)[None][:0]


# --- data ---


class InBatches:
    """An iterable of batches, each made once."""

    def __init__(self) -> None:
        x = inputs()
        y = x.sum(1, keepdim=True)
        self.batches = [(x[i : i + 6], y[i : i + 6]) for i in range(0, 24, 6)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Items:
    """A dataset that returns `item` for each index."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        return self.item


class Endless:
    """A dataset that lacks len()."""

    def __getitem__(self, i: int) -> Any:
        return inputs()[i], inputs()[i].sum(0, keepdim=True)


class BrokenItems(Items):
    def __getitem__(self, i: int) -> Any:
        raise OSError("the disk is gone")


class BrokenLater(Items):
    """Fails in validation only."""

    def __getitem__(self, i: int) -> Any:
        raise LookupError("no such sample")


class Frame:
    """As a data frame: it has a length, and its columns have names."""

    iloc = property(lambda self: self)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


class Uneven(InBatches):
    """Batches with a target too few."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(x, y[1:]) for x, y in self.batches])


@dataclass(frozen=True)
class Wrong:
    """A program with a mistake."""

    program: Callable[[Run], None]
    words: Sequence[str]  # of the message, in their order
    worlds: Sequence[int] = (1,)
    settings: dict[str, Any] = field(default_factory=dict)
    loud: bool = False  # Python or torch raises by itself; nanoray looks for the others


def wrong(
    *words: str,
    worlds: Sequence[int] = (1,),
    settings: Any = None,
    loud: bool = False,
    **given: Any,
) -> Wrong:
    return Wrong(partial(fit, **given), words, worlds, settings or {}, loud)


def a_function(x: Tensor) -> Tensor:
    return x


def given_as(run: Run, model: Any, trained: Any) -> None:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    RuntimeEngine(model, optimizer, run, F.mse_loss).fit(points())


def built(run: Run, build: Callable[[], nn.Module], **given: Any) -> None:
    fit(run, build(), **given)


X = np.zeros((24, 4), np.float32)
Y = np.zeros((24, 1), np.float32)
FSDP = {"dp_mode": "fsdp"}
EVERY = (1, 2)
_X = torch.zeros(4)
_Y = torch.zeros(1)

WRONG_MODELS: dict[str, Wrong] = {
    "a function as the model": Wrong(
        partial(given_as, model=a_function, trained=nn.Linear(4, 1)),
        (
            "the model is the function a_function",
            "give an instance of a torch.nn.Module",
        ),
    ),
    "a class as the model": Wrong(
        partial(given_as, model=Model, trained=nn.Linear(4, 1)),
        (
            "the model is the class Model",
            "give an instance of a torch.nn.Module",
        ),
    ),
    "no model": Wrong(
        partial(given_as, model=None, trained=nn.Linear(4, 1)),
        (
            "the model is None",
            "give an instance",
        ),
    ),
    "meta weights": Wrong(
        partial(built, build=on_meta),
        (
            "0.weight is on the device meta",
            "to_empty",
        ),
    ),
    "a buffer on the meta device": Wrong(
        partial(built, build=with_meta_buffer),
        ("table is on the device meta", "to_empty"),
    ),
    "all weights frozen": Wrong(
        partial(built, build=frozen),
        (
            "the backward of Sequential",
            "failed before step 1",
            "does not require grad",
            "weights with requires_grad",
        ),
        loud=True,
    ),
    "inference weights": Wrong(
        partial(built, build=inferred),
        (
            "Sequential failed before step 1",
            "inference tensor",
        ),
        loud=True,
    ),
    "wrapped in DataParallel": Wrong(
        partial(built, build=parallel),
        (
            "wrapped in DataParallel",
            "give the plain module",
        ),
        EVERY,
    ),
    "no forward": wrong(
        "the forward of NoForward",
        "failed before step 1",
        'missing the required "forward" function',
        loud=True,
        model=NoForward,
    ),
    "two arguments": wrong(
        "the forward of TwoArguments",
        "float32",
        "(12, 4)",
        "failed before step 1",
        "missing 1 required positional argument: 'mask'",
        "mend it, or the data",
        loud=True,
        model=TwoArguments,
    ),
    "output is a dict": wrong(
        "loss_fn (the function mse_loss), called with a dict of logits",
        "(12, 1)",
        "AttributeError",
        "what the model returns",
        loud=True,
        model=ReturnsDict,
    ),
    "output is a tuple": wrong(
        "called with a tuple of",
        "AttributeError",
        "what the model returns",
        loud=True,
        model=ReturnsTuple,
    ),
    "forward raises": wrong(
        "the forward of Raises",
        "4)",
        "failed before step 1",
        "ValueError: this model is unhappy",
        "mend it",
        'raise ValueError("this model is unhappy")',
        loud=True,
        model=Raises,
        worlds=EVERY,
    ),
    "forward raises on one rank": wrong(
        "on rank ",
        "the forward of RaisesOften",
        "failed before step 1",
        "IndexError: an unlucky sample",
        'raise IndexError("an unlucky sample")',
        loud=True,
        model=RaisesOften,
        worlds=(2, 3),
    ),
    "shapes do not fit": wrong(
        "the forward of WrongShape",
        "failed before step 1",
        "shapes cannot be multiplied",
        "self.second(self.layer(x))",
        loud=True,
        model=WrongShape,
        worlds=EVERY,
    ),
    "no_grad in forward": wrong(
        "the backward of NoGradInside",
        "failed before step 1",
        "does not require grad",
        "no detach, torch.no_grad",
        loud=True,
        model=NoGradInside,
        worlds=EVERY,
    ),
    "through numpy": wrong(
        "the backward of ThroughNumpy",
        "failed before step 1",
        "does not require grad",
        "numpy",
        loud=True,
        model=ThroughNumpy,
    ),
    "backward in forward": wrong(
        "the forward of ByHand calls backward", "torch.autograd.grad", model=ByHand, worlds=EVERY
    ),
    "in-place change": wrong(
        "the backward of InPlace",
        "failed before step 1",
        "modified by an inplace operation",
        "change in place",
        loud=True,
        model=InPlace,
        worlds=EVERY,
    ),
    "graph of the batch before": wrong(
        "Remembers keeps the graph of the batch before",
        "state.detach()",
        model=Remembers,
        worlds=EVERY,
    ),
    "other output in eval mode": wrong(
        "the evaluation of Evaluates, in eval mode",
        "failed before step 1",
        "AttributeError",
        "in eval mode what it returns in training",
        loud=True,
        model=Evaluates,
        val=points(),
        settings={"eval_every": 2},
        worlds=EVERY,
    ),
    "sparse gradients": wrong(
        "the gradient of table.weight is sparse", "sparse=False", model=SparseRows, worlds=EVERY
    ),
    "out of memory": wrong(
        "out of memory", "the forward of Huge", "halve --micro_batch_size", loud=True, model=Huge
    ),
    "another device": wrong(
        "the forward of OtherDevice",
        "failed before step 1",
        "device",
        "mend it",
        loud=True,
        model=OtherDevice,
    ),
    "endless recursion": wrong(
        "the forward of Recursive",
        "failed before step 1",
        "RecursionError",
        loud=True,
        model=Recursive,
    ),
    "sys.exit in forward": wrong(
        "the forward of Exits", "failed before step 1", "SystemExit: gone", loud=True, model=Exits
    ),
    "two types with fsdp": wrong(
        "fsdp",
        "second.weight is float64",
        "first.weight float32",
        "zero2",
        model=TwoTypes,
        worlds=(2,),
        settings=FSDP,
    ),
    "forward writes weights": wrong(
        "the forward writes table.weight",
        "max_norm",
        "train on one rank",
        model=Renormalises,
        worlds=(2,),
    ),
    "a first call that initialises": wrong(
        "the forward writes scale",
        "if only the first call writes",
        "call it once before",
        model=InitialisesItself,
        data=Samples(vectors(0, 24)),
        worlds=(2,),
    ),
    "frozen weights that forward writes": wrong(
        "the forward writes the frozen weight average.weight",
        "keep it as a buffer",
        model=Teacher,
        worlds=EVERY,
    ),
    "a layer made in forward": wrong(
        "the forward makes the parameter second.bias",
        "make it in __init__",
        model=Late,
        worlds=EVERY,
    ),
    "a layer removed in forward": wrong(
        "the forward removes the parameter second.bias", "remove it in __init__", model=Leaves
    ),
    "a loss of no parameter": wrong(
        "the loss depends on no parameter that is trained", "requires_grad", model=Elsewhere
    ),
    "a lazy layer that is not used": wrong(
        "second.weight is lazy", "the first forward has not used it", model=HalfLazy
    ),
    "inputs changed in place": wrong(
        "the forward of Shifts changes its inputs in place",
        "x = x - 1",
        model=Shifts,
        data=InBatches(),
        settings={"micro_batch_size": 6},
    ),
    "two weights over one memory": wrong(
        "part and all are two parameters over the same memory",
        "one parameter under two names",
        model=Overlapping,
        worlds=(2,),
        settings={"dp_mode": "zero1"},
    ),
    "get_extra_state raises": wrong(
        "the state_dict of BadState",
        "failed before step 1",
        "LookupError: no state yet",
        "mend",
        'raise LookupError("no state yet")',
        loud=True,
        model=BadState,
    ),
    "weights of 4 bits": wrong("packed has the dtype float4_e2m1fn_x2", "cast it", model=Float4),
    "a sparse buffer": wrong("graph has the layout sparse_coo", "to_dense", model=SparseBuffer),
    "extra state of objects": wrong(
        "_extra_state/lock is a lock", "return numbers", model=StateOfObjects
    ),
    "too small for the ranks": wrong(
        "fsdp leaves rank 1 no element",
        "use fewer ranks",
        model=OneRow,
        worlds=(2, 3),
        settings=FSDP,
    ),
}
WRONG_LOSSES: dict[str, Wrong] = {
    "loss of a vector": wrong(
        "loss_fn returns a float32 tensor of shape",
        "as a tensor of one real number",
        "loss.mean()",
        loss_fn=vector,
        worlds=EVERY,
    ),
    "loss as a float": wrong(
        "loss_fn returns the number",
        "as a tensor of one real number",
        "without .item()",
        loss_fn=as_float,
        worlds=EVERY,
    ),
    "detached loss": wrong(
        "the backward of Sequential",
        "failed before step 1",
        "does not require grad",
        "no detach",
        loud=True,
        loss_fn=detached,
        worlds=EVERY,
    ),
    "integer loss": wrong(
        "loss_fn returns a int64 tensor", "as a tensor of one real number", loss_fn=integer
    ),
    "boolean loss": wrong(
        "loss_fn returns a bool tensor", "as a tensor of one real number", loss_fn=boolean
    ),
    "complex loss": wrong(
        "loss_fn returns a complex64 tensor", "as a tensor of one real number", loss_fn=complex_loss
    ),
    "no loss": wrong("loss_fn returns None", "return the mean loss", loss_fn=nothing),
    "three losses": wrong(
        "loss_fn returns a tuple", "as a tensor of one real number", loss_fn=three
    ),
    "dict of losses": wrong(
        "loss_fn returns a dict of loss", "as a tensor of one real number", loss_fn=mapping
    ),
    "object with a loss": wrong(
        "loss_fn returns a SimpleNamespace", "as a tensor of one real number", loss_fn=attributes
    ),
    "array as loss": wrong(
        "loss_fn returns a float32 array", "as a tensor of one real number", loss_fn=array
    ),
    "empty loss": wrong(
        "loss_fn returns a float32 tensor of shape (0,)",
        "as a tensor of one real number",
        loss_fn=empty,
    ),
    "backward in the loss": wrong(
        "loss_fn calls backward",
        "leave the loss's backward to nanoray",
        loss_fn=backward_inside,
        worlds=EVERY,
    ),
    "loss_fn raises": wrong(
        "loss_fn (the function raising), called with",
        "failed before step 1",
        "KeyError: 'targets'",
        'raise KeyError("targets")',
        loud=True,
        loss_fn=raising,
        worlds=EVERY,
    ),
    "loss_fn of one argument": wrong(
        "loss_fn (the function one_argument)",
        "failed before step 1",
        "takes 1 positional argument but 2 were given",
        "give a function of the output and the targets",
        loud=True,
        loss_fn=one_argument,
    ),
    "class as loss_fn": wrong(
        "loss_fn (the class MSELoss)",
        "failed before step 1",
        "give a function of the output and the targets",
        loud=True,
        loss_fn=nn.MSELoss,
    ),
    "name as loss_fn": wrong(
        "loss_fn (the text 'mse')",
        "failed before step 1",
        "'str' object is not callable",
        loud=True,
        loss_fn="mse",
    ),
    "classes out of range": wrong(
        "loss_fn (the function cross_entropy), called with",
        "failed before step 1",
        "Target 5 is out of bounds",
        loud=True,
        model=partial(nn.Linear, 4, 2)(),
        loss_fn=F.cross_entropy,
        data=TensorDataset(inputs(), torch.full((24,), 5)),
    ),
    "float targets of classes": wrong(
        "called with",
        "(12, 2)",
        "failed before step 1",
        "multi-target not supported",
        loud=True,
        model=partial(nn.Linear, 4, 2)(),
        loss_fn=F.cross_entropy,
        data=TensorDataset(inputs(), torch.zeros(24, 1)),
    ),
    "model returns no loss": wrong(
        "the forward of ReturnsTuple",
        "failed before step 1",
        "takes 2 positional arguments but 3 were given",
        "give RuntimeEngine a loss_fn",
        loud=True,
        loss_fn=None,
        model=ReturnsTuple,
    ),
    "model takes no targets": wrong(
        "the forward of Sequential",
        "failed before step 1",
        "takes 2 positional arguments but 3 were given",
        "give RuntimeEngine a loss_fn",
        loud=True,
        loss_fn=None,
    ),
    "a pair of sum and weight": wrong(
        "loss_fn returns a tuple", "nanoray.Weighted(sum=..., weight=...)", loss_fn=pair
    ),
    "weight is None": wrong(
        "Weighted whose weight is None", "the number of targets", loss_fn=weightless
    ),
    "weight below 0": wrong(
        "Weighted whose weight is the number -1.0", "0 or more", loss_fn=below_zero
    ),
    "sum of a vector": wrong(
        "Weighted whose sum is a float32 tensor",
        "as a tensor of one real number",
        loss_fn=vector_and_weight,
    ),
}
WRONG_DATA: dict[str, Wrong] = {
    "targets of another length": wrong(
        "the lengths of a batch's tensors (5, 6)",
        "do not say how many samples it has",
        "yield nanoray.Counted(batch, samples)",
        data=Uneven(),
        settings={"micro_batch_size": 6},
    ),
    "an array": wrong(
        "a batch is a Tensor",
        "must be a pair of inputs and targets",
        "TensorDataset(inputs, targets)",
        data=X,
    ),
    "a tensor": wrong(
        "a batch is a Tensor",
        "must be a pair of inputs and targets",
        "TensorDataset(inputs, targets)",
        data=torch.zeros(24, 4),
    ),
    "fit(X, y)": wrong(
        "a batch is a Tensor",
        "must be a pair of inputs and targets",
        "TensorDataset(inputs, targets)",
        data=X,
        val=Y,
    ),
    "fit(X, y) of tensors": wrong(
        "a batch is a Tensor",
        "must be a pair of inputs and targets",
        "TensorDataset(inputs, targets)",
        data=torch.zeros(24, 4),
        val=torch.zeros(24, 1),
    ),
    "a pair of arrays": wrong(
        "reading the train data, a tuple of a float32 array of shape (24, 4)",
        "failed before step 1",
        "equal size",
        "TensorDataset(inputs, targets)",
        loud=True,
        data=(X, Y),
    ),
    "a list of two tensors": wrong(
        "reading the train data, a list of a float32 tensor",
        "failed before step 1",
        "equal size",
        "TensorDataset(inputs, targets)",
        loud=True,
        data=[torch.zeros(24, 4), torch.zeros(24, 1)],
    ),
    "a dict of arrays": wrong(
        "reading the train data, a dict of x, y",
        "failed before step 1",
        "KeyError",
        "TensorDataset(inputs, targets)",
        loud=True,
        data={"x": X, "y": Y},
    ),
    "a data frame": wrong(
        "reading the train data, a Frame",
        "failed before step 1",
        "KeyError",
        "TensorDataset(inputs, targets)",
        loud=True,
        data=Frame(),
    ),
    "a path": wrong(
        "a batch is a list of 12",
        "must be a pair of inputs and targets",
        "TensorDataset(inputs, targets)",
        data="train.csv",
    ),
    "a number": wrong("the train data are a int", "give a dataset (len and [])", data=24),
    "a dataset without len()": wrong(
        "the train data are a Endless",
        "give a dataset (len and [])",
        data=Endless(),
        settings={"micro_batch_size": 6},
    ),
    "items are dicts": wrong(
        "the forward of Sequential, called with a NamedBatch of x, labels",
        "failed before step 1",
        "unexpected keyword argument 'x'",
        "the keys of a batch are its arguments by name",
        loud=True,
        data=Items({"x": _X, "labels": _Y}),
    ),
    "items of three": wrong(
        "a batch is a list of 3",
        "must be a pair of inputs and targets",
        "pack it as (inputs, targets)",
        data=Items((_X, _Y, _Y)),
    ),
    "items of one": wrong("a batch is a Tensor", "pack it as (inputs, targets)", data=Items(_X)),
    "items of text": wrong(
        "the forward of Sequential, called with a tuple of the text 'a text'",
        "failed before step 1",
        "must be Tensor",
        "mend it, or the data",
        loud=True,
        data=Items(("a text", _Y)),
    ),
    "items of objects": wrong(
        "reading the train data, a Items",
        "failed before step 1",
        "<class 'object'>",
        "give a dataset",
        loud=True,
        data=Items((object(), _Y)),
    ),
    "items are None": wrong(
        "reading the train data, a Items",
        "failed before step 1",
        "NoneType",
        "give a dataset",
        loud=True,
        data=Items((None, _Y)),
    ),
    "__getitem__ raises": wrong(
        "reading the train data, a BrokenItems",
        "failed before step 1",
        "OSError: the disk is gone",
        'raise OSError("the disk is gone")',
        loud=True,
        data=BrokenItems(0),
        worlds=EVERY,
    ),
    "validation raises": wrong(
        "reading the validation data, a BrokenLater",
        "failed before step 1",
        "LookupError: no such sample",
        loud=True,
        val=BrokenLater(0),
        settings={"eval_every": 2},
        worlds=EVERY,
    ),
    "validation is a tensor": wrong(
        "a batch is a Tensor",
        "must be a pair of inputs and targets",
        "TensorDataset(inputs, targets)",
        val=torch.zeros(24, 4),
        settings={"eval_every": 2},
    ),
    "a dataset without items": wrong("the train data are empty", "at least one", data=[]),
    "a function as data": wrong(
        "the train data are a builtin_function",
        "give a dataset (len and []), a DataLoader",
        data=iter,
        settings={"micro_batch_size": 6},
    ),
    "double inputs": wrong(
        "the forward of Sequential, called with a float64 tensor",
        "failed before step 1",
        "Double and Float",
        "or the data",
        loud=True,
        data=TensorDataset(inputs().double(), inputs().sum(1, keepdim=True)),
    ),
    "integer inputs": wrong(
        "the forward of Sequential, called with a int64 tensor",
        "failed before step 1",
        "Long and Float",
        "or the data",
        loud=True,
        data=TensorDataset(inputs().long(), inputs().sum(1, keepdim=True)),
    ),
}
WRONG = WRONG_MODELS | WRONG_LOSSES | WRONG_DATA
