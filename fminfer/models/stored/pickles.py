"""Reads the pickles of torch.save as what they are: instructions. Nothing is run or imported.

A small machine follows them. What a name would make is known beforehand, or the pickle is refused.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass
from mmap import mmap
from typing import Any

MOST_STEPS = 5_000_000  # 100,000 tensors have about 4 million
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}
DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"},
}
DICTS = {"collections.OrderedDict", "builtins.dict", "__builtin__.dict"}
TENSORS = {"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"}
TYPED_TENSOR = "torch._utils._rebuild_tensor_v3"
PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
# Settings and counters beside weights, which mean nothing here.
PASSED_OVER = {
    *("argparse.Namespace", "collections.defaultdict", "collections.Counter", "typing.Any"),
    *("torch.Size", "torch.device", "torch.nn.parameter.Parameter", "torch.Tensor"),
    *("torch.serialization._get_layout", "_codecs.encode", "builtins.set", "__builtin__.set"),
    *("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("builtins.int", "builtins.list", "builtins.str", "builtins.float", "pathlib.PosixPath"),
}
PASSED_OVER_FROM = ("omegaconf.", "metaseq.dataclass.")
IN_TORCH = ("torch.", "torch.cuda.", "torch.storage.")


class UnsafePickleError(ValueError):
    """A pickle names what weights do not need."""


@dataclass(slots=True, frozen=True)
class Storage:
    """Values that follow each other in a file."""

    key: str
    dtype: str
    num_values: int
    first: int = 0  # of a part of a storage: its first value there


@dataclass(slots=True, frozen=True)
class PickledTensor:
    """A tensor as a pickle tells of it: unchecked."""

    storage: Storage
    dtype: str
    offset: object
    shape: object
    strides: object


@dataclass(slots=True, frozen=True)
class Name:
    """What a pickle would import."""

    path: str


THING = object()  # stands for one that nobody needs
MARK = object()


def read_pickle(stream: io.BytesIO | mmap, storages: dict[str, Storage] | None = None) -> Any:
    """Return what a pickle tells of: dicts, lists, numbers, strings, tensors.

    Args:
        storages: gets all storages by their keys.

    Raises:
        UnsafePickleError: it names something that weights do not need.
        ValueError, and other errors of wrong values: it is broken.
    """
    machine = _Machine({} if storages is None else storages)
    steps: Any = pickletools.genops(stream)  # type: ignore[arg-type]  # it reads nothing else
    for number, (opcode, argument, _) in enumerate(steps):
        if number > MOST_STEPS:
            raise ValueError(f"it has more than {MOST_STEPS} instructions")
        machine.do(opcode.name, argument)
    return machine.stack.pop()


class _Machine:
    def __init__(self, storages: dict[str, Storage]) -> None:
        self.stack: list[Any] = []
        self._storages = storages
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        if name in CONSTANTS:
            self.stack.append(argument)
        elif name in MADE:
            self.stack.append(MADE[name]())
        elif name in ACTIONS:
            ACTIONS[name](self, argument)
        else:
            raise ValueError(f"the instruction {name} is not of torch.save")

    def _put(self, argument: Any) -> None:
        self._memo[len(self._memo) if argument is None else argument] = self.stack[-1]

    def _get(self, argument: Any) -> None:
        self.stack.append(self._memo[argument])

    def _pop_to_mark(self, _: Any = None) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not MARK:
            place -= 1
            if place < 0:
                raise ValueError("a mark is missing")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def _tuple(self, argument: Any) -> None:
        self.stack.append(tuple(self._pop_to_mark()))

    def _short_tuple(self, size: int) -> None:
        if len(self.stack) < size:
            raise ValueError("a tuple is cut off")
        items = tuple(self.stack[-size:])
        del self.stack[-size:]
        self.stack.append(items)

    def _list(self, _: Any) -> None:
        self.stack.append(self._pop_to_mark())

    def _append(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            found = _pairs(items)
            for key in found.keys() & target.keys():
                raise ValueError(f"{key!r} is there twice")
            target.update(found)

    def _name(self, path: str) -> None:
        path = path.replace(" ", ".", 1)
        if not _is_known(path):
            raise UnsafePickleError(path)
        self.stack.append(Name(path))

    def _stack_name(self, _: Any) -> None:
        module, name = self.stack[-2:]
        del self.stack[-2:]
        self._name(f"{module} {name}")

    def _build(self, _: Any) -> None:
        self.stack.pop()  # a state such as the _metadata of an OrderedDict

    def _call(self, _: Any) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = _made_by(self.stack[-1], arguments)

    def _storage(self, _: Any) -> None:
        kind, what, key, _place, num_values, *view = self.stack.pop()
        if kind not in ("storage", b"storage") or not isinstance(what, Name):
            raise ValueError(f"it holds a {kind} of {what}, which is no storage of values")
        dtype, (part,) = STORAGES[what.path.rpartition(".")[2]], view or (None,)
        first, size = (part[1], part[2]) if part is not None else (0, num_values)
        if not all(type(number) is int and number >= 0 for number in (num_values, first, size)):
            raise ValueError(f"a storage of {num_values} values")
        storage = Storage(str(key), dtype, first + size, first)
        self._storages.setdefault(storage.key, storage)
        self.stack.append(storage)


CONSTANTS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "INT", "LONG"),
}
MADE: dict[str, Any] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": lambda: THING,
    "MARK": lambda: MARK,
}
ACTIONS: dict[str, Any] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda m, a: None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine._put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine._get),
    "TUPLE": _Machine._tuple,
    "TUPLE1": lambda m, a: m._short_tuple(1),
    "TUPLE2": lambda m, a: m._short_tuple(2),
    "TUPLE3": lambda m, a: m._short_tuple(3),
    "LIST": _Machine._list,
    "APPEND": lambda m, a: m._append([m.stack.pop()]),
    "APPENDS": lambda m, a: m._append(m._pop_to_mark()),
    "ADDITEMS": _Machine._pop_to_mark,
    "SETITEM": lambda m, a: m._set_items([m.stack.pop(-2), m.stack.pop()]),
    "SETITEMS": lambda m, a: m._set_items(m._pop_to_mark()),
    "GLOBAL": _Machine._name,
    "STACK_GLOBAL": _Machine._stack_name,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine._call),
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._storage,
}


def _pairs(items: list[Any]) -> dict[Any, Any]:
    """Return a dict of keys and values in turns. Keys that are no strings or numbers are dropped.

    To hash a tuple of tuples may take forever.
    """
    found: dict[Any, Any] = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        if isinstance(key, str) and key in found:
            raise ValueError(f"{key!r} is there twice")
        if isinstance(key, str | int | float):
            found[key] = value
    return found


def _is_known(path: str) -> bool:
    if path in DICTS | TENSORS | PARAMETERS | PASSED_OVER | {TYPED_TENSOR}:
        return True
    of_torch = next((path[len(top) :] for top in reversed(IN_TORCH) if path.startswith(top)), "")
    return of_torch in STORAGES or of_torch in DTYPES or path.startswith(PASSED_OVER_FROM)


def _made_by(name: object, arguments: Any) -> object:
    """Return what a known name would make of arguments."""
    if not isinstance(name, Name) or not isinstance(arguments, tuple):
        raise ValueError("it calls what is no name")
    if name.path in DICTS:
        items = arguments[0] if arguments else []
        return _pairs([each for key, value in items for each in (key, value)])
    if name.path in PARAMETERS:
        return arguments[0]
    if name.path not in TENSORS and name.path != TYPED_TENSOR:
        return THING
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without a storage")
    dtype = storage.dtype
    if name.path == TYPED_TENSOR:
        dtype = DTYPES[arguments[6].path.rpartition(".")[2]]
    return PickledTensor(storage, dtype, offset, shape, strides)
