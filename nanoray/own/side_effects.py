"""What a script's modules, hooks and loss change besides the tensors of the model, to be undone.

A trial, a warm-up, an evaluation and the replay of a bad step call the script's code although no step
needs it. Such code counts its calls, collects values, and removes its own hooks:

    attributes of a module, a class or another object    self.calls += 1
    variables of a function around it                    nonlocal calls; calls += 1
    globals                                              CALLS += 1
    the lists, dicts, sets and arrays in any of these    self.losses.append(loss.item())
    hooks of a module or of a parameter                  handle.remove()

Only what belongs to the script is looked at: objects of the standard library, of torch and of other
installed packages, such as a logger or a tracker, keep what they have done. So do files.
"""

from __future__ import annotations

import argparse
import os
import site
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import nanoray
from nanoray.base.compat import global_module_hooks, gradient_hooks
from nanoray.mesh.memory import assign, equal_bits, has_plain_memory
from nanoray.state.modules import Undisturbed

VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic, Tensor)
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
COLLECTIONS = (*MAPPINGS, list, set, deque)
NAMESPACES = (SimpleNamespace, argparse.Namespace)
MOST_ELEMENTS = 10_000  # of a collection whose elements are looked at; a longer one is copied alone
MOST_BYTES = 1 << 26  # of a tensor or an array that is copied: a larger one is data, and no count
# Attributes of nn.Module in which the model's tensors and parts lie
_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# Folders whose modules are no part of a script: the standard library, what pip has installed
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        site.getusersitepackages(),
        os.path.dirname(torch.__file__),
        os.path.dirname(nanoray.__file__),
    )
)


@contextmanager
def undisturbed(
    model: nn.Module, code: Iterable[Any] = (), keep_collected: bool = False
) -> Iterator[None]:
    """Leave a model, and what its code and `code` change, as they were: see SideEffects."""
    before = Undisturbed(model)
    # Last, because get_extra_state is code of the script, too.
    effects = SideEffects(model, code, keep_collected)
    try:
        yield
    finally:
        before.restore()
        effects.undo()


class SideEffects:
    """The values that a script's code can change, as they are when this object is made."""

    def __init__(
        self, model: nn.Module, code: Iterable[Any] = (), keep_collected: bool = False
    ) -> None:
        """Remember what the modules and the hooks of a model reach, and what `code` reaches.

        code: functions or objects that are called together with the model, such as its loss.
        keep_collected: lists, dicts, sets and arrays will keep what is put into them.
        """
        self._keep_collected = keep_collected
        self._undo: list[Callable[[], None]] = []
        # The packages whose modules make up the model are the script's, wherever they lie.
        packages = {_package_of(type(module)) for module in model.modules()}
        self._packages = packages - {"torch", "nanoray"}

        # By identity; the objects are kept, because another one could get the same identity. The
        # model's own tensors are somebody else's task.
        self._modules = set(model.modules())
        self._seen: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._seen[id(tensor)] = tensor

        self._todo: deque[Any] = deque([model, *code])
        self._todo.extend(model.modules())
        for hooks in global_module_hooks():
            self._remember_hooks(hooks)
        for p in model.parameters():
            for hooks in gradient_hooks(p):
                self._remember_hooks(hooks)
        while self._todo:
            self._visit(self._todo.popleft())

    def undo(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()

    # What an object refers to.

    def _visit(self, value: Any) -> None:
        """Remember what can change of one object, and note what it refers to."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value

        if isinstance(value, Tensor):
            self._remember_tensor(value)
        elif isinstance(value, np.ndarray):
            self._remember_array(value)
        elif isinstance(value, VALUES):
            pass
        elif isinstance(value, nn.Module):
            self._visit_module(value)
        elif self._is_collection(value):
            self._remember_collection(value)
        elif isinstance(value, tuple):
            self._todo.extend(value[:MOST_ELEMENTS])
        elif isinstance(value, MethodType):
            self._todo.extend((value.__self__, value.__func__))
        elif isinstance(value, partial):
            self._todo.extend((value.func, value.args, value.keywords))
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif hasattr(value, "__dict__") and self._is_own(type(value)):
            attributes = vars(value)
            self._remember_names(attributes, attributes.__setitem__, attributes.pop)
            self._todo.append(type(value))

    def _visit_module(self, module: nn.Module) -> None:
        # A scripted module keeps its attributes in C++.
        if isinstance(module, torch.jit.ScriptModule):
            return
        attributes = vars(module)
        # Beside the model: a moving average of its weights, or a metric, which an evaluation fills.
        if module not in self._modules:
            if self._keep_collected:
                return
            for part in _PARTS[:3]:
                self._todo.extend(attributes[part].values())
        names = []
        for name, value in attributes.items():
            if "_hooks" in name and type(value) in MAPPINGS:
                self._remember_hooks(value)
            elif name not in _PARTS:
                names.append(name)
        # torch and nanoray may bind attributes of their own modules for good in the first forward.
        forget = attributes.pop if self._is_own(type(module)) else None
        # What nanoray's modules keep in other objects and in tensors is known to nanoray.
        if _package_of(type(module)) == "nanoray":
            names = [name for name in names if isinstance(attributes[name], VALUES)]
            self._seen |= {id(attributes[name]): attributes[name] for name in names}
        self._remember_names(attributes, attributes.__setitem__, forget, names)
        self._todo.append(type(module))

    def _visit_class(self, kind: type) -> None:
        """Remember attributes of a class and its bases, and look at their functions."""
        self._todo.extend(kind.__bases__)
        if not self._is_own(kind):
            return
        names = [
            name for name, value in vars(kind).items() if type(value) in (*VALUES, *COLLECTIONS)
        ]
        names = [name for name in names if not name.startswith("__")]
        self._remember_names(vars(kind), partial(setattr, kind), None, names)
        for value in vars(kind).values():
            function = getattr(value, "__func__", value)  # of a static method or a class method
            if isinstance(function, FunctionType):
                self._todo.append(function)

    def _visit_function(self, function: FunctionType) -> None:
        if not self._is_own(function):
            return
        for cell in function.__closure__ or ():
            self._remember_cell(cell)
        own = vars(function)
        self._remember_names(own, own.__setitem__, own.pop)
        self._todo.extend((function.__defaults__, function.__kwdefaults__))

        # The globals that it names, and the attributes that it names of modules among them.
        names = set(_names_in(function.__code__))
        self._remember_globals(function.__globals__, names)
        for name in names & function.__globals__.keys():
            module = function.__globals__[name]
            if isinstance(module, ModuleType) and self._is_own(module):
                self._remember_globals(vars(module), names)

    def _is_own(self, thing: Any) -> bool:
        """Return whether a class, a function or a module is the script's, and not a library's."""
        if _package_of(thing) in self._packages or thing in NAMESPACES:
            return True
        name = _module_of(thing)
        module = sys.modules.get(name)
        # What the driver has sent by value belongs to no module here.
        if module is None or name == "__main__":
            return True
        file = getattr(module, "__file__", None)
        return file is not None and not file.startswith(_LIBRARIES)

    def _is_collection(self, value: Any) -> bool:
        """Return whether a value is a collection of Python, or of a class of the script like it."""
        if type(value) in COLLECTIONS:
            return True
        return isinstance(value, (dict, list, set, deque)) and self._is_own(type(value))

    # What is remembered, and how it is put back.

    def _remember_globals(self, of_module: dict[str, Any], names: set[str]) -> None:
        self._remember_names(of_module, of_module.__setitem__, None, names & of_module.keys())

    def _remember_names(
        self,
        namespace: Mapping[str, Any],
        bind: Callable[[str, Any], object],
        forget: Callable[[str], object] | None,
        names: Iterable[str] | None = None,
    ) -> None:
        """Remember what names refer to: all of a namespace, or those given.

        `forget` removes a name that is new; None: new ones stay.
        """
        known = dict(namespace)  # a copy: a thread of the script may add to it meanwhile
        before = known
        if names is not None:
            before = {name: known[name] for name in names if name in known}
        self._todo.extend(before.values())

        def undo() -> None:
            for name, value in before.items():
                now = namespace.get(name)
                if now is not value and _is_plain(value) and not self._is_kept(now):
                    bind(name, value)
            if forget is None:
                return
            for name in dict(namespace).keys() - known.keys():
                value = namespace[name]
                if _is_plain(value) and not self._is_kept(value):
                    forget(name)

        self._undo.append(undo)

    def _remember_cell(self, cell: Any) -> None:
        """Remember a variable of a function that an inner function uses."""
        try:
            value = cell.cell_contents
        except ValueError:  # it has no value yet
            return
        self._todo.append(value)

        def undo() -> None:
            try:
                now = cell.cell_contents
            except ValueError:
                now = None
            if now is not value and not self._is_kept(now):
                cell.cell_contents = value

        if _is_plain(value):
            self._undo.append(undo)

    def _remember_collection(self, value: Any) -> None:
        before: Any = dict(value) if isinstance(value, dict) else [*value]
        if len(before) <= MOST_ELEMENTS:
            self._todo.extend(before.values() if isinstance(before, dict) else before)
        # A class of the script may have attributes, too.
        if type(value) not in COLLECTIONS and hasattr(value, "__dict__"):
            attributes = vars(value)
            self._remember_names(attributes, attributes.__setitem__, attributes.pop)

        def undo() -> None:
            if not _is_same(value, before):
                _fill(value, before)

        if not self._keep_collected:
            self._undo.append(undo)

    def _remember_array(self, array: Any) -> None:
        if self._keep_collected or array.dtype.hasobject or not array.flags.writeable:
            return
        if array.nbytes > MOST_BYTES:
            return
        before = array.copy()

        def undo() -> None:
            array[...] = before

        self._undo.append(undo)

    def _remember_tensor(self, tensor: Tensor) -> None:
        """Remember the elements of a tensor that is no part of the model, nor of a graph."""
        if self._keep_collected or not tensor.is_leaf or not has_plain_memory(tensor):
            return
        if tensor.nbytes > MOST_BYTES and not isinstance(tensor, nn.Parameter):
            return
        before = tensor.detach().clone()

        def undo() -> None:
            if not equal_bits(tensor.detach(), before):
                assign(tensor, before)

        self._undo.append(undo)

    def _remember_hooks(self, hooks: dict[Any, Any]) -> None:
        """Remember the script's hooks of a module or a parameter, which may remove themselves.

        Those of libraries stay as they are: nanoray and torch add hooks in a first forward.
        """
        before = dict(hooks)
        self._todo.extend(before.values())

        def undo() -> None:
            if _is_same(hooks, before):
                return
            now = dict(hooks)
            kept = {}
            for key, hook in before.items():
                if key in now or self._is_own_hook(hook):
                    kept[key] = hook
            for key, hook in now.items():
                if key not in before and not self._is_own_hook(hook):
                    kept[key] = hook
            _fill(hooks, kept)

        self._undo.append(undo)

    def _is_kept(self, value: Any) -> bool:
        return self._keep_collected and type(value) in COLLECTIONS

    def _is_own_hook(self, hook: Any) -> bool:
        while isinstance(hook, partial):
            hook = hook.func
        hook = getattr(hook, "__func__", hook)
        return self._is_own(hook if isinstance(hook, FunctionType) else type(hook))


def _module_of(thing: Any) -> str:
    """Return the name of the module of a class or a function, or of a module."""
    return str((thing.__name__ if isinstance(thing, ModuleType) else thing.__module__) or "")


def _package_of(thing: Any) -> str:
    return _module_of(thing).partition(".")[0]


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_plain(value: Any) -> bool:
    """Return whether a name that refers to a value can be bound to it again without harm."""
    return isinstance(value, (*VALUES, np.ndarray)) or type(value) in COLLECTIONS


def _is_same(value: Any, before: Any) -> bool:
    """Return whether a collection has the elements that it had."""
    if len(value) != len(before):
        return False
    if isinstance(value, set):
        return all(element in value for element in before)
    if isinstance(value, dict):
        pairs = zip(value.items(), before.items(), strict=True)
        return all(a is b and x is y for (a, x), (b, y) in pairs)
    return all(a is b for a, b in zip(value, before, strict=True))


def _fill(value: Any, elements: Any) -> None:
    """Give a collection other elements, in place: others refer to it."""
    value.clear()
    if isinstance(value, dict):
        for key, element in elements.items():
            value[key] = element
    elif isinstance(value, set):
        value.update(elements)
    else:
        value.extend(elements)
