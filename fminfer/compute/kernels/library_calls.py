"""How the CPU's library is called: its functions, and the structs that they take.

Sources say what each argument and field is: `calls.h` and `sums.h`, and each function's
own file.
"""

from __future__ import annotations

import ctypes
from typing import Any

ADDRESS = ctypes.c_void_p
NUMBER = ctypes.c_int64
KINDS: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "p": ADDRESS,
    "n": NUMBER,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
}
FUNCTIONS = {
    "fminfer_attention": "p",
    "fminfer_multiply": "p",
    "fminfer_multiply_items": "pn",
    "fminfer_mix": "p",
    "fminfer_rms_norm": "ppffpp",
    "fminfer_layer_norm": "pppfpp",
    "fminfer_rotate": "pppn",
    "fminfer_gate": "ppn",
    "fminfer_panel": "",
    "fminfer_panel_bytes": "nnn",
    "fminfer_pack_experts": "pnnnnpn",
    "fminfer_pack_blocks": "npnnnnnpn",
    "fminfer_unpack_rows": "npnnpnpn",
    "fminfer_draw": "pnnnpppppppi",
    "fminfer_score": "pnnnpppi",
    "fminfer_sums_bytes": "nn",
    "fminfer_sum": "ppnnn",
    "fminfer_gather": "pppn",
}
# what these return
SIZES = ("fminfer_panel", "fminfer_panel_bytes", "fminfer_sums_bytes")


class Library(ctypes.CDLL):
    """The built library, whose functions check what they are given."""

    def __getitem__(self, name: Any) -> Any:
        function = super().__getitem__(name)
        if name in FUNCTIONS:
            function.argtypes = [KINDS[letter] for letter in FUNCTIONS[name]]
        if name in SIZES:
            function.restype = NUMBER
        return function


def _make_fields(*groups: tuple[type[Any], str]) -> list[tuple[str, type[Any]]]:
    """Return the fields of a struct, of types with the names that have each."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class Arguments(ctypes.Structure):
    """A step's attention in a layer."""

    _fields_ = _make_fields(
        (
            ADDRESS,
            "query out keys values new_keys new_values slots rows tables runs members",
        ),
        (ADDRESS, "slopes sinks relative"),
        (NUMBER, "num_rows num_runs num_tokens query_head query_token"),
        (NUMBER, "new_key_head new_key_token new_value_head new_value_token"),
        (NUMBER, "heads kv_heads head_dim block_size window ahead reach"),
        (NUMBER, "type kv_type num_threads"),
        (ctypes.c_float, "scaling softcap"),
    )


class RowSizes(ctypes.Structure):
    """Rows that a part of a layer walks through."""

    _fields_ = _make_fields(
        (ADDRESS, "x out"),
        (NUMBER, "outer inner width outer_step inner_step type num_threads"),
    )


class PackedCall(ctypes.Structure):
    """A packed weight, or some outputs of one."""

    _fields_ = _make_fields((ADDRESS, "weight"), (NUMBER, "outputs type block is_lent"))


class ProductCall(ctypes.Structure):
    """A product with a packed weight."""

    _fields_ = _make_fields(
        (ADDRESS, "x parts bias out"),
        (NUMBER, "num_parts rows inputs outputs x_type out_type num_threads"),
    )


class ExpertCall(ctypes.Structure):
    """A mixture of experts."""

    _fields_ = _make_fields(
        (ADDRESS, "x"),
        (PackedCall, "up down"),
        (ADDRESS, "chosen shares out space up_bias down_bias"),
        (
            NUMBER,
            "tokens top_k num_experts hidden size is_gated activation x_type num_threads",
        ),
        (ctypes.c_float, "limit"),
    )


class SumsStruct(ctypes.Structure):
    """One process's way to others that share a stage's layers."""

    _fields_ = _make_fields(
        (ADDRESS, "memory"), (NUMBER, "capacity index count turn is_over")
    )
