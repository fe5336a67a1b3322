"""Read a pickle of torch.save as an outline: plain values, and of tensors only their shapes.

Nothing that the pickle names is imported or called (pickle_machine.py): the functions that rebuild a
tensor become its shape, and other names of torch an inert value. A name outside of torch, which
`torch.load(weights_only=True)` would refuse as well, is refused.
"""

from __future__ import annotations

from typing import IO, Any, NamedTuple

from nanoray.config.pickle_machine import Damaged, PickleMachine, Refused

Shape = tuple[int, ...]


class TensorOutline(NamedTuple):
    """A tensor of which only the shape is known."""

    shape: Shape


class _PickledName(NamedTuple):
    """A function or class that the pickle names."""

    module: str
    name: str


# What a call of these names would make
_TENSORS = {
    _PickledName("torch._utils", "_rebuild_tensor_v2"),
    _PickledName("torch._utils", "_rebuild_tensor"),
}
_PARAMETERS = {
    _PickledName("torch._utils", "_rebuild_parameter"),
    _PickledName("torch._utils", "_rebuild_parameter_with_state"),
}
_DICTS = {_PickledName("collections", "OrderedDict"), _PickledName("collections", "Counter")}
_SETS = {_PickledName("builtins", "set"), _PickledName("__builtin__", "set")}

# Instructions that push their argument, besides whole numbers and texts
_PUSHES = {
    *("FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_INERT = object()  # stands for a value that does not matter here, such as a type of storage


def outline_of_pickle(file: IO[bytes]) -> Any:
    """Return the outline of the pickle at the file's position, which then is behind it.

    Raises Refused for a pickle that is damaged, or that names what is not torch's.
    """
    try:
        return _OutlineMachine().run(file)
    except Damaged as error:
        raise Refused(f"its pickle is damaged: {error}") from None


class _OutlineMachine(PickleMachine):
    """A machine for what torch.save writes: also lists, tuples, and stand-ins for objects."""

    def carry_out_other(self, name: str, argument: Any) -> None:
        """Carry out one instruction. Raises Refused for one that has no place in a file of torch."""
        if name in _PUSHES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name == "POP":
            self.stack.pop()
        elif not self._build_sequence(name):
            self._build_stand_in(name, argument)

    def _build_sequence(self, name: str) -> bool:
        """Carry out an instruction that builds a list or a tuple, if it is one."""
        stack = self.stack
        if name == "EMPTY_LIST":
            stack.append([])
        elif name == "LIST":
            stack.append(self.pop_to_mark())
        elif name == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif name == "APPENDS":
            values = self.pop_to_mark()
            stack[-1].extend(values)
        elif name == "TUPLE":
            stack.append(tuple(self.pop_to_mark()))
        elif name in _TUPLES:
            size = _TUPLES[name]
            values = stack[len(stack) - size :]
            del stack[len(stack) - size :]
            stack.append(tuple(values))
        else:
            return False
        return True

    def _build_stand_in(self, name: str, argument: Any) -> None:
        """Carry out an instruction that names, calls or fills something."""
        stack = self.stack
        if name == "GLOBAL":
            module, _, word = argument.partition(" ")
            stack.append(_require_torch(_PickledName(module, word)))
        elif name == "STACK_GLOBAL":
            word = stack.pop()
            module = stack.pop()
            stack.append(_require_torch(_PickledName(module, word)))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments = stack.pop()
            called = stack.pop()
            stack.append(_result_of(called, arguments))
        elif name == "BUILD":
            stack.pop()  # attributes of an object; its content came before them
        elif name == "BINPERSID":
            stack.pop()  # a storage, whose numbers are not read
            stack.append(_INERT)
        else:
            raise Refused(f"its pickle has the instruction {name}, which torch.save does not write")


def _require_torch(name: _PickledName) -> _PickledName:
    """Return a name of torch, or of a plain container. Raises Refused for others."""
    is_torch = name.module == "torch" or str(name.module).startswith("torch.")
    if is_torch or name in _DICTS or name in _SETS:
        return name
    raise Refused(f"it refers to {name.module}.{name.name}, which is code")


def _result_of(called: Any, arguments: tuple[Any, ...]) -> Any:
    """Return what stands for the result of a call, which is not made."""
    if called in _TENSORS:
        # storage, offset, size, ...
        return TensorOutline(tuple(int(n) for n in arguments[2]))
    if called in _PARAMETERS:
        return arguments[0]
    if called in _DICTS:
        return dict(*arguments)
    if called in _SETS:
        return set(*arguments)
    if called == _PickledName("torch", "Size"):
        return tuple(*arguments)
    return _INERT
