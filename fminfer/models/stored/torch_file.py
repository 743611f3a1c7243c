"""Reads where the tensors of a file of torch.save are. Nothing is run or imported.

A pickle is a list of instructions, which a small machine follows. It makes no objects of
classes that a pickle names. An unknown name refuses the pickle.
"""

from __future__ import annotations

import io
import math
import mmap
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import broken_file_error, naming_broken_files
from fminfer.models.stored.stored_tensors import (
    BITS,
    BLOCKS,
    DTYPES,
    MOST_DIMENSIONS,
    MOST_HEADER_BYTES,
    StoredFile,
    StoredTensor,
    make_stored_file,
)

MOST_STEPS = 5_000_000  # 100,000 tensors have about 4 million
STORAGES = {
    **{"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16"},
    **{"BFloat16Storage": "BF16", "ComplexFloatStorage": "C64", "LongStorage": "I64"},
    **{"IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8"},
    **{"ByteStorage": "U8", "BoolStorage": "BOOL", "UntypedStorage": "U8"},
}
OF_DTYPES = {
    str(dtype).removeprefix("torch."): name
    for name, dtype in DTYPES.items()
    if name not in BLOCKS
}
DICTS = {"collections.OrderedDict", "builtins.dict", "__builtin__.dict"}
TENSORS = {f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3")}
PARAMETERS = {
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
}
# Settings and counters beside weights, which mean nothing here.
PASSED_OVER = {
    "argparse.Namespace",
    "collections.defaultdict",
    "collections.Counter",
    "typing.Any",
    "torch.Size",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch.Tensor",
    "torch.serialization._get_layout",
    "_codecs.encode",
    "builtins.set",
    "__builtin__.set",
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "builtins.int",
    "builtins.list",
    "builtins.str",
    "builtins.float",
    "pathlib.PosixPath",
}
PASSED_OVER_FROM = ("omegaconf.", "metaseq.dataclass.")
IN_TORCH = ("torch.storage.", "torch.cuda.", "torch.")
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001  # of the older form
# Training saves weights beside optimizers and settings, under one of these.
WRAPPERS = ("model", "state_dict", "module", "model_state_dict")
ZIP_START = b"PK\x03\x04"
Bounds = tuple[int, int]  # of bytes of a file


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
    offset: Any
    shape: Any
    strides: Any


class ImportedName(str):
    """What a pickle would import."""


UNUSED = object()  # stands for a value that nobody needs
MARK = object()
TO_MARK = -1
# Instructions that push their argument, or a fixed value.
PUSHED = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINBYTES",
    "SHORT_BINBYTES",
    "INT",
    "LONG",
}
FIXED = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_SET": UNUSED,
    "MARK": MARK,
}
# Instructions that add so many of the last values to a list, a dict or a thing before them.
ADDED = {
    "APPEND": 1,
    "SETITEM": 2,
    **dict.fromkeys(("APPENDS", "SETITEMS", "ADDITEMS"), TO_MARK),
}


def read_torch_file(path: Path) -> StoredFile:
    """Return what a file of torch.save holds. No value is read, nothing it names is called.

    Raises:
        CheckpointError: the file is broken, or names what weights do not need.
    """
    with naming_broken_files(path), path.open("rb") as file:
        try:
            is_zip = file.read(4) == ZIP_START
            return (
                _read_zip_file(path, file) if is_zip else _read_older_file(path, file)
            )
        except UnsafePickleError as error:
            raise CheckpointError(
                f"{path} asks to load {error}, which no weights need, and nothing of "
                "it was run; take the model's safetensors, or save its weights alone: "
                "torch.save(model.state_dict(), …)"
            ) from error
        except zipfile.BadZipFile as error:
            raise broken_file_error(path, f"it is cut off: {error}") from error


def _read_zip_file(path: Path, file: BinaryIO) -> StoredFile:
    size = path.stat().st_size
    bounds: dict[str, Bounds] = {}
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename in bounds:
                raise ValueError(f"{entry.filename} is in it twice")
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(
                    f"{entry.filename} is compressed, which torch.save does not do"
                )
            bounds[entry.filename] = _find_entry_bytes(file, entry, size)
    pickles = [name for name in bounds if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise ValueError("it is no archive of torch.save: it should hold one data.pkl")
    top = pickles[0].removesuffix("data.pkl")
    if (
        f"{top}byteorder" in bounds
        and _read_bytes(file, bounds[f"{top}byteorder"]) != b"little"
    ):
        raise ValueError("its numbers are big-endian")
    first, last = header = bounds[pickles[0]]
    if last - first > MOST_HEADER_BYTES:
        raise ValueError(
            f"a data.pkl of {last - first} bytes; the most are {MOST_HEADER_BYTES}"
        )
    value = _PickleMachine().read_pickle(io.BytesIO(_read_bytes(file, header)))
    return make_stored_file(
        path, _find_tensors(path, value, bounds, f"{top}data/"), header
    )


def _find_entry_bytes(file: BinaryIO, entry: zipfile.ZipInfo, size: int) -> Bounds:
    """Return the bytes of an entry, whose own header may be longer than the directory says."""
    file.seek(entry.header_offset)
    start = file.read(30)
    if start[:4] != ZIP_START:
        raise ValueError(f"{entry.filename} is not where the directory says")
    first = entry.header_offset + 30 + sum(struct.unpack("<HH", start[26:30]))
    if first + entry.file_size > size or entry.file_size != entry.compress_size:
        raise ValueError(f"{entry.filename} should have {entry.file_size} bytes")
    return first, first + entry.file_size


def _read_bytes(file: BinaryIO, bounds: Bounds) -> bytes:
    file.seek(bounds[0])
    return file.read(bounds[1] - bounds[0])


def _read_older_file(path: Path, file: BinaryIO) -> StoredFile:
    """Read four pickles and a list of storages; each of these is its size, then its values."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
        machine = _PickleMachine()
        size = len(stream)
        if (
            machine.read_pickle(stream) != MAGIC
            or machine.read_pickle(stream) != PROTOCOL
        ):
            raise ValueError("it is not of torch.save")
        if not machine.read_pickle(stream).get("little_endian", True):
            raise ValueError("its numbers are big-endian")
        value = machine.read_pickle(stream)
        keys = [str(key) for key in machine.read_pickle(stream)]
        first = end = stream.tell()
        bounds: dict[str, Bounds] = {}
        for key in keys:
            start = end + 8
            (num_values,) = struct.unpack("<q", stream[end:start].ljust(8, b"\0"))
            end = start + max(0, num_values) * BITS[machine.storages[key].dtype] // 8
            if end > size:
                raise ValueError(f"it is cut off: {size} bytes of at least {end}")
            bounds[key] = start, end
    return make_stored_file(path, _find_tensors(path, value, bounds), (0, first))


class _PickleMachine:
    """Follows the instructions of pickles. A broken one may raise any exception."""

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}  # by their keys
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read_pickle(self, stream: io.BytesIO | mmap.mmap) -> Any:
        """Return what the next pickle tells of: dicts, lists, numbers, strings, tensors."""
        self._stack = []
        self._memo = {}
        # It only reads of the stream.
        steps: Any = pickletools.genops(stream)  # type: ignore[arg-type]
        for number, (opcode, argument, _) in enumerate(steps):
            if number > MOST_STEPS:
                raise ValueError(f"it has more than {MOST_STEPS} instructions")
            self._run_instruction(opcode.name, argument)
        return self._stack.pop()

    def _run_instruction(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in PUSHED:
            stack.append(argument)
        elif name in FIXED:
            stack.append(FIXED[name])
        elif name in MADE:
            num, make = MADE[name]
            stack.append(make(self._pop_values(num)))
        elif name in ADDED:
            items = self._pop_values(ADDED[name])
            if isinstance(stack[-1], dict) and name.startswith("SETITEM"):
                _add_pairs(stack[-1], items)
            elif isinstance(stack[-1], list) and name.startswith("APPEND"):
                stack[-1].extend(items)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(_make_name(argument.split(" ", 1)))
        elif name == "BUILD":  # with a state such as the _metadata of an OrderedDict
            stack.pop()
        elif name == "BINPERSID":
            stack.append(self._make_storage(stack.pop()))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"the instruction {name} is not of torch.save")

    def _pop_values(self, num: int) -> list[Any]:
        """Return the last values; TO_MARK: those behind the last mark."""
        if num == TO_MARK:
            return [*iter(self._stack.pop, MARK)][::-1]
        if len(self._stack) < num:
            raise ValueError("a value is missing")
        return [self._stack.pop() for _ in range(num)][::-1]

    def _make_storage(self, reference: Any) -> Storage:
        # Nothing of it is quoted: a tuple of tuples may be as long as a book.
        kind, type_name, key, _place, num_values, *view = reference
        if kind not in ("storage", b"storage") or not isinstance(
            type_name, ImportedName
        ):
            raise ValueError("it refers to something that is no storage of values")
        dtype = STORAGES[type_name.rpartition(".")[2]]
        (part,) = view or (None,)
        first, size = (part[1], part[2]) if part is not None else (0, num_values)
        if not isinstance(key, str | int) or not all(
            type(number) is int and number >= 0 for number in (num_values, first, size)
        ):
            raise ValueError("a storage has no name, or its size is no whole number")
        storage = Storage(str(key), dtype, first + size, first)
        self.storages.setdefault(storage.key, storage)
        return storage


def _add_pairs(target: dict[Any, Any], items: list[Any]) -> None:
    """Add keys and values in turns. Keys that are no strings or small numbers are dropped.

    To hash a tuple of tuples may take forever, and large numbers may all have one hash.
    """
    for key, value in zip(items[::2], items[1::2], strict=True):
        if isinstance(key, str) and key in target:
            raise ValueError(f"{key!r} is there twice")
        if isinstance(key, str | float) or (
            isinstance(key, int) and key.bit_length() < 60
        ):
            target[key] = value


def _make_name(parts: list[str]) -> ImportedName:
    """Return a name that a pickle may have, of module and member, which is not imported."""
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("a name in it is no text")
    path = ".".join(parts)
    of_torch = next(
        (path.removeprefix(top) for top in IN_TORCH if path.startswith(top)), ""
    )
    is_known = path in DICTS | TENSORS | PARAMETERS | PASSED_OVER
    is_known = is_known or of_torch in STORAGES or of_torch in OF_DTYPES
    if not is_known and not path.startswith(PASSED_OVER_FROM):
        raise UnsafePickleError(f"{path:.100}")
    return ImportedName(path)


def _make_called_value(call: list[Any]) -> object:
    """Return what a known name would make of arguments."""
    name, arguments = call
    if not isinstance(name, ImportedName) or not isinstance(arguments, tuple):
        raise ValueError("it calls what is no name")
    if name in DICTS:
        pairs = arguments[0] if arguments else []
        if not isinstance(pairs, list):
            raise ValueError("it makes a dict of something that is no list")
        entries: dict[Any, Any] = {}
        _add_pairs(entries, [each for key, value in pairs for each in (key, value)])
        pairs.clear()  # a list that is read again and again would be endless work
        return entries
    if name in PARAMETERS:
        return arguments[0]
    if name not in TENSORS:
        return UNUSED
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without a storage")
    has_dtype = name.endswith("_v3")
    dtype = OF_DTYPES[arguments[6].rpartition(".")[2]] if has_dtype else storage.dtype
    return PickledTensor(storage, dtype, offset, shape, strides)


# Instructions that make a value of so many of the last ones.
MADE: dict[str, tuple[int, Callable[[list[Any]], object]]] = {
    **{
        "EMPTY_TUPLE": (0, tuple),
        "TUPLE1": (1, tuple),
        "TUPLE2": (2, tuple),
        "TUPLE3": (3, tuple),
    },
    **{"TUPLE": (TO_MARK, tuple), "EMPTY_LIST": (0, list), "LIST": (TO_MARK, list)},
    **{"EMPTY_DICT": (0, dict), "STACK_GLOBAL": (2, _make_name)},
    **dict.fromkeys(("REDUCE", "NEWOBJ"), (2, _make_called_value)),
}


def _find_tensors(
    path: Path, value: object, bounds: dict[str, Bounds], top: str = ""
) -> dict[str, StoredTensor]:
    """Find the tensors of a state dict, and their bytes in storages by top and key."""
    tensors = {}
    for name, tensor in _find_state_dict(value).items():
        try:
            tensors[name] = _make_stored_tensor(
                path, tensor, bounds[top + tensor.storage.key]
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"tensor {name!r}: {error}") from error
    return tensors


def _find_state_dict(value: object) -> dict[str, PickledTensor]:
    for candidate in (
        value,
        *(value.get(name) for name in WRAPPERS if isinstance(value, dict)),
    ):
        if isinstance(candidate, dict):
            tensors = {
                name: t for name, t in candidate.items() if isinstance(t, PickledTensor)
            }
            if tensors:
                if not all(isinstance(name, str) for name in tensors):
                    raise ValueError("the names of its tensors are no strings")
                return tensors
    raise ValueError("it holds no dict of tensors")


def _make_stored_tensor(
    path: Path, pickled: PickledTensor, bounds: Bounds
) -> StoredTensor:
    """Find a tensor in the bytes of its storage, which must hold all of its values."""
    shape = pickled.shape
    strides = pickled.strides
    offset = pickled.offset
    is_told = (
        isinstance(shape, tuple)
        and isinstance(strides, tuple)
        and len(shape) == len(strides) <= MOST_DIMENSIONS
    )
    if not is_told or not all(
        type(n) is int and n >= 0 for n in (*shape, *strides, offset)
    ):
        raise ValueError("it has no shape")
    storage = pickled.storage
    bits = BITS[pickled.dtype]
    start = bounds[0] + (storage.first * BITS[storage.dtype] + offset * bits) // 8
    tensor = StoredTensor(path, pickled.dtype, shape, start, strides)
    last = min(bounds[1], bounds[0] + storage.num_values * BITS[storage.dtype] // 8)
    num_bytes = math.prod(shape) * bits // 8
    if tensor.span[1] > last or num_bytes > max(0, last - start):
        raise ValueError(
            f"it should take {num_bytes} bytes, and the file has {last - start} of it"
        )
    return tensor
