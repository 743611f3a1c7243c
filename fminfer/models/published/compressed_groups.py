"""What `quant_method` compressed-tensors says: groups of modules, and how each is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fminfer.compute.values.weights import Shape
from fminfer.models.holding import StoredFormat
from fminfer.models.published.float_readers import (
    NVFP4,
    NVFP4_GROUP,
    Float8Scheme,
    make_float8_reader,
)
from fminfer.models.published.quantization_fields import (
    ModuleRules,
    QuantizationFields,
)
from fminfer.models.published.whole_readers import (
    BYTES,
    PACKED,
    WholeLayout,
    WholeScheme,
    make_whole_reader,
)

MakeReader = Callable[[Shape], StoredFormat]
ALL_MODULES = "Linear"  # a target: the class that has matrices
# Whether groups are of inputs in act-order. By "weight" and "static" only the work was.
ACT_ORDERS: dict[str | bool | None, bool] = {
    None: False,
    False: False,
    "weight": False,
    "static": False,
    True: True,
    "group": True,
    "dynamic": True,
}
HARMLESS = "observer observer_kwargs scale_dtype zp_dtype"


@dataclass(slots=True, frozen=True)
class ModuleGroup:
    """Modules that are stored in one way."""

    modules: ModuleRules
    make_reader: MakeReader

    @property
    def is_of_all(self) -> bool:
        return ALL_MODULES in self.modules.paths


def parse_groups(fields: QuantizationFields) -> tuple[ModuleGroup, ...]:
    """Parse `config_groups`."""
    fields.refuse("sparsity_config", "sparse weights do not run")
    fields.refuse("transform_config", "rotations of weights do not run")
    default = fields.choose("format", (*PARSERS, "mixed-precision"))
    groups = []
    for part in fields.read_parts("config_groups").values():
        part.refuse("output_activations", "outputs in 8 bits do not run")
        # these stay in the type of the arithmetic
        part.find("input_activations")
        weights = part.read_part("weights")
        parse = PARSERS[part.choose("format", tuple(PARSERS), default)]
        weights.refuse("dynamic", "weights have scales of their own")
        group = ModuleGroup(part.read_rules("targets"), parse(weights))
        weights.check_unread(HARMLESS)
        part.check_unread("")
        groups.append(group)
    return tuple(groups)


def _read_strategy(fields: QuantizationFields, *allowed: str) -> tuple[str, int]:
    """Return which weights share a scale, and how many inputs of a row do; 0: all."""
    strategy = fields.choose("strategy", allowed)
    group = fields.read_group("group_size")
    if ("group" in strategy) != (group > 0):
        raise fields.refusal_error("group_size", f"the strategy is {strategy!r}")
    return strategy, group


def _parse_whole(
    layout: WholeLayout, bits: tuple[int, ...], fields: QuantizationFields
) -> MakeReader:
    fields.choose("type", ("int",), "int")
    act_order = fields.choose("actorder", tuple(ACT_ORDERS))
    spec = WholeScheme(
        layout,
        bits=fields.choose("num_bits", bits),
        group=_read_strategy(fields, "group", "channel")[1],
        is_ordered=ACT_ORDERS[act_order],
        has_zeros=not fields.choose("symmetric", (True, False), True),
    )
    return partial(make_whole_reader, spec)


def _parse_float8(fields: QuantizationFields) -> MakeReader:
    fields.choose("type", ("float",))
    fields.choose("num_bits", (8,))
    fields.choose("symmetric", (True,), True)
    strategy, group = _read_strategy(fields, "group", "channel", "tensor", "block")
    tile = (0 if strategy == "tensor" else 1, group)
    if strategy == "block":
        tile = fields.read_tile("block_structure")
    return partial(make_float8_reader, Float8Scheme(tile))


def _parse_naive(fields: QuantizationFields) -> MakeReader:
    if fields.choose("type", ("int", "float"), "int") == "int":
        return _parse_whole(BYTES, (8,), fields)
    return _parse_float8(fields)


def _parse_nvfp4(fields: QuantizationFields) -> MakeReader:
    fields.choose("type", ("float",))
    fields.choose("num_bits", (4,))
    fields.choose("symmetric", (True,), True)
    _, group = _read_strategy(fields, "tensor_group", "group")
    if group != NVFP4_GROUP:
        raise fields.refusal_error("group_size", f"{NVFP4_GROUP} runs")
    return lambda shape: NVFP4


# Of each `format`, what reads `weights`.
PARSERS: dict[str, Callable[[QuantizationFields], MakeReader]] = {
    "pack-quantized": partial(_parse_whole, PACKED, (4, 8)),
    "int-quantized": partial(_parse_whole, BYTES, (8,)),
    "float-quantized": _parse_float8,
    "naive-quantized": _parse_naive,
    "nvfp4-pack-quantized": _parse_nvfp4,
}
