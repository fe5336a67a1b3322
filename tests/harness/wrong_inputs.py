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
from nanoray.train.own.engine import RuntimeEngine
from nanoray.train.own.run import Run


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


def wrong(*words: str, worlds: Sequence[int] = (1,), settings: Any = None, **given: Any) -> Wrong:
    return Wrong(partial(fit, **given), words, worlds, settings or {})


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
            "no torch.nn.Module",
            "derive it",
        ),
    ),
    "a class as the model": Wrong(
        partial(given_as, model=Model, trained=nn.Linear(4, 1)),
        (
            "the model is the class Model",
            "give an instance",
        ),
    ),
    "no model": Wrong(
        partial(given_as, model=None, trained=nn.Linear(4, 1)),
        (
            "the model is None",
            "derive it",
        ),
    ),
    "meta weights": Wrong(
        partial(built, build=on_meta),
        (
            "0.weight is on the meta device",
            "to_empty",
        ),
    ),
    "all weights frozen": Wrong(
        partial(built, build=frozen),
        (
            "none of the 4 parameters",
            "requires_grad_(True)",
        ),
    ),
    "inference weights": Wrong(
        partial(built, build=inferred),
        (
            "0.weight was made under torch.inference_mode",
            "outside of it",
        ),
    ),
    "wrapped in DataParallel": Wrong(
        partial(built, build=parallel),
        (
            "wrapped in DataParallel",
            "give the plain module",
        ),
        EVERY,
    ),
    "no forward": wrong("NoForward has no forward", "define forward", model=NoForward),
    "two arguments": wrong(
        "called with the inputs alone",
        "float32",
        "(12, 4)",
        "takes (x, mask)",
        "'mask'",
        "one argument",
        model=TwoArguments,
    ),
    "output is a dict": wrong(
        "loss_fn, called with a dict of logits",
        "(12, 1)",
        "AttributeError",
        "what the model returns",
        model=ReturnsDict,
    ),
    "output is a tuple": wrong(
        "loss_fn, called with a tuple of",
        "AttributeError",
        "what the model returns",
        model=ReturnsTuple,
    ),
    "forward raises": wrong(
        "the forward of Raises",
        "4)",
        "ValueError: this model is unhappy",
        "mend it",
        'raise ValueError("this model is unhappy")',
        model=Raises,
        worlds=EVERY,
    ),
    "forward raises on one rank": wrong(
        "on rank ",
        "the forward of RaisesOften",
        "IndexError: an unlucky sample",
        model=RaisesOften,
        worlds=(2, 3),
    ),
    "shapes do not fit": wrong(
        "the forward of WrongShape",
        "shapes cannot be multiplied",
        "self.second(self.layer(x))",
        model=WrongShape,
        worlds=EVERY,
    ),
    "no_grad in forward": wrong(
        "no gradient flows through the forward of NoGradInside",
        "remove detach",
        model=NoGradInside,
        worlds=EVERY,
    ),
    "through numpy": wrong(
        "no gradient flows through the forward of ThroughNumpy", "numpy", model=ThroughNumpy
    ),
    "backward in forward": wrong(
        "the forward of ByHand calls backward", "torch.autograd.grad", model=ByHand, worlds=EVERY
    ),
    "in-place change": wrong(
        "the backward of InPlace",
        "modified by an inplace operation",
        "mend the forward",
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
        "in eval mode what it returns in training",
        model=Evaluates,
        val=points(),
        settings={"eval_every": 2},
        worlds=EVERY,
    ),
    "sparse gradients": wrong(
        "the gradient of table.weight is sparse", "sparse=False", model=SparseRows, worlds=EVERY
    ),
    "out of memory": wrong(
        "out of memory", "the forward of Huge", "halve --micro_batch_size", model=Huge
    ),
    "another device": wrong("the forward of OtherDevice", "device", "mend it", model=OtherDevice),
    "endless recursion": wrong("the forward of Recursive", "RecursionError", model=Recursive),
    "sys.exit in forward": wrong("the forward of Exits", "SystemExit: gone", model=Exits),
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
        "module BadState: get_extra_state raises",
        "LookupError: no state yet",
        "mend",
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
        "not one number",
        "loss.mean()",
        loss_fn=vector,
        worlds=EVERY,
    ),
    "loss as a float": wrong(
        "loss_fn returns the number", "without .item()", loss_fn=as_float, worlds=EVERY
    ),
    "detached loss": wrong(
        "no gradient flows through loss_fn", "remove detach", loss_fn=detached, worlds=EVERY
    ),
    "integer loss": wrong("loss_fn returns a int64 tensor", "floating point", loss_fn=integer),
    "boolean loss": wrong("loss_fn returns a bool tensor", "floating point", loss_fn=boolean),
    "complex loss": wrong(
        "loss_fn returns a complex64 tensor", "real floating point", loss_fn=complex_loss
    ),
    "no loss": wrong("loss_fn returns None", "return loss", loss_fn=nothing),
    "three losses": wrong("loss_fn returns a tuple", "as one tensor", loss_fn=three),
    "dict of losses": wrong("loss_fn returns a dict of loss", "as one tensor", loss_fn=mapping),
    "object with a loss": wrong(
        "loss_fn returns a SimpleNamespace", "its .loss", loss_fn=attributes
    ),
    "array as loss": wrong("loss_fn returns a float32 array", "as one tensor", loss_fn=array),
    "empty loss": wrong(
        "loss_fn returns a float32 tensor of shape (0,)", "not one number", loss_fn=empty
    ),
    "backward in the loss": wrong(
        "loss_fn calls backward", "return the loss alone", loss_fn=backward_inside, worlds=EVERY
    ),
    "loss_fn raises": wrong(
        "loss_fn, called with",
        "KeyError: 'targets'",
        'raise KeyError("targets")',
        loss_fn=raising,
        worlds=EVERY,
    ),
    "loss_fn of one argument": wrong(
        "loss_fn is called with the model's output and the targets",
        "takes (output)",
        "two arguments",
        loss_fn=one_argument,
    ),
    "class as loss_fn": wrong("loss_fn is the class MSELoss", "MSELoss()", loss_fn=nn.MSELoss),
    "name as loss_fn": wrong("loss_fn is the text 'mse'", "give a function", loss_fn="mse"),
    "classes out of range": wrong(
        "loss_fn, called with",
        "Target 5 is out of bounds",
        model=partial(nn.Linear, 4, 2)(),
        loss_fn=F.cross_entropy,
        data=TensorDataset(inputs(), torch.full((24,), 5)),
    ),
    "float targets of classes": wrong(
        "loss_fn, called with",
        "(12, 2)",
        "multi-target not supported",
        model=partial(nn.Linear, 4, 2)(),
        loss_fn=F.cross_entropy,
        data=TensorDataset(inputs(), torch.zeros(24, 1)),
    ),
    "model returns no loss": wrong(
        "without a loss_fn",
        "ReturnsTuple takes (x)",
        "give RuntimeEngine a loss_fn",
        loss_fn=None,
        model=ReturnsTuple,
    ),
    "model takes no targets": wrong(
        "without a loss_fn",
        "Sequential takes (input)",
        "give RuntimeEngine a loss_fn",
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
        "Weighted whose sum is a float32 tensor", "not one number", loss_fn=vector_and_weight
    ),
}
WRONG_DATA: dict[str, Wrong] = {
    "targets of another length": wrong(
        "loss_fn, called with",
        "(6, 1)",
        "(5, 1)",
        "must match the size",
        "or what the model returns",
        data=Uneven(),
        settings={"micro_batch_size": 6},
    ),
    "an array": wrong(
        "the train data are a float32 array of shape (24, 4)",
        "TensorDataset(inputs, targets)",
        data=X,
    ),
    "a tensor": wrong(
        "the train data are a float32 tensor of shape (24, 4)",
        "TensorDataset",
        data=torch.zeros(24, 4),
    ),
    "fit(X, y)": wrong(
        "the train data are a float32 array",
        "second argument of fit is the validation data",
        "TensorDataset",
        data=X,
        val=Y,
    ),
    "fit(X, y) of tensors": wrong(
        "the train data are a float32 tensor",
        "second argument of fit",
        "TensorDataset",
        data=torch.zeros(24, 4),
        val=torch.zeros(24, 1),
    ),
    "a pair of arrays": wrong("the train data are a tuple of arrays", "TensorDataset", data=(X, Y)),
    "a list of two tensors": wrong(
        "the train data are a list of arrays",
        "TensorDataset",
        data=[torch.zeros(24, 4), torch.zeros(24, 1)],
    ),
    "a dict of arrays": wrong(
        "the train data are a dict of x, y", "TensorDataset", data={"x": X, "y": Y}
    ),
    "a data frame": wrong(
        "the train data are a Frame", "names of columns", "TensorDataset", data=Frame()
    ),
    "a path": wrong("the train data are the text 'train.csv'", "read it", data="train.csv"),
    "a number": wrong("the train data are a int", "give a dataset", data=24),
    "items are dicts": wrong(
        "a batch is a dict",
        "or give pairs of inputs and targets",
        data=Items({"x": _X, "labels": _Y}),
    ),
    "items of three": wrong(
        "a batch is a list of 3", "pack it as (inputs, targets)", data=Items((_X, _Y, _Y))
    ),
    "items of one": wrong("a batch is a Tensor", "pack it as (inputs, targets)", data=Items(_X)),
    "items of text": wrong(
        "the forward of Sequential, called with a tuple of the text 'a text'",
        "must be Tensor",
        "mend it, or the data",
        data=Items(("a text", _Y)),
    ),
    "items of objects": wrong(
        "reading the train data failed",
        "<class 'object'>",
        "mend the dataset",
        data=Items((object(), _Y)),
    ),
    "items are None": wrong(
        "reading the train data failed", "NoneType", "mend the dataset", data=Items((None, _Y))
    ),
    "__getitem__ raises": wrong(
        "reading the train data failed",
        "OSError: the disk is gone",
        'raise OSError("the disk is gone")',
        data=BrokenItems(0),
        worlds=EVERY,
    ),
    "validation raises": wrong(
        "reading the validation data failed",
        "LookupError: no such sample",
        val=BrokenLater(0),
        settings={"eval_every": 2},
        worlds=EVERY,
    ),
    "validation is a tensor": wrong(
        "the validation data are a float32 tensor",
        "TensorDataset",
        val=torch.zeros(24, 4),
        settings={"eval_every": 2},
    ),
    "a dataset without items": wrong("the train data are empty", "at least one", data=[]),
    "a function as data": wrong(
        "the train data are a builtin_function",
        "give a dataset",
        data=iter,
        settings={"micro_batch_size": 6},
    ),
    "double inputs": wrong(
        "the forward of Sequential, called with a float64 tensor",
        "Double and Float",
        "or the data",
        data=TensorDataset(inputs().double(), inputs().sum(1, keepdim=True)),
    ),
    "integer inputs": wrong(
        "the forward of Sequential, called with a int64 tensor",
        "Long and Float",
        "or the data",
        data=TensorDataset(inputs().long(), inputs().sum(1, keepdim=True)),
    ),
}
WRONG = WRONG_MODELS | WRONG_LOSSES | WRONG_DATA
