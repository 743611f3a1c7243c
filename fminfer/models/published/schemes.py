"""What a config's `quantization_config` says of each matrix: how it is stored."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fminfer.compute.values.weights import Shape
from fminfer.core.errors import CheckpointError
from fminfer.models.holding import StoredFormat
from fminfer.models.published.compressed_groups import ModuleGroup, parse_groups
from fminfer.models.published.float_readers import (
    MXFP4_EXPERTS,
    Float8Scheme,
    make_float8_reader,
)
from fminfer.models.published.quantization_fields import (
    REMEDY,
    ModuleRules,
    QuantizationFields,
    compile_pattern,
)
from fminfer.models.published.whole_readers import (
    AWQ,
    GPTQ,
    WholeScheme,
    make_whole_reader,
)

FindReader = Callable[[str, Shape], StoredFormat | None]
# Methods that do not run -> what they are.
REFUSED = {
    "aqlm": "codebooks of vectors",
    "auto-round": "it has several layouts; files that say gptq, awq or compressed-tensors run",
    "bitnet": "numbers of three values, with activations of 8 bits",
    "bitsandbytes": "blocks of bitsandbytes' own",
    "eetq": "matrices in the order of EETQ's kernels",
    "higgs": "codebooks of vectors",
    "hqq": "groups of HQQ's own",
    "modelopt": "its scales have the names of other methods, and another meaning",
    "quanto": "tensors of quanto's own",
    "quark": "files of compressed-tensors run",
    "spqr": "small groups, and outliers apart",
    "torchao": "tensors of torchao's own",
    "vptq": "codebooks of vectors",
}
# What a quantizer notes of its work, and what tells other engines how to compute.
HARMLESS = """
    act_group_aware autoround_version awq_gemm_checkpoint backend batch_size
    block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
    dequantize disable_exllama do_fuse exllama_config fuse_max_seq_len
    global_compression_ratio hyb_act iters max_input_length meta
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
    modules_in_block_to_quantize modules_to_fuse mse nsamples pad_token_id
    quantization_status quantizer run_compressed seqlen static_groups sym tokenizer
    true_sequential uri use_cuda_fp16 use_exllama use_optimized_inference v2 v2_alpha
"""
KV_CACHE = (
    "scales for a KV cache in 8 bits are not applied; take the model without them"
)


@dataclass(slots=True, frozen=True)
class Scheme:
    """How the matrices of a published checkpoint are stored."""

    method: str
    # by a module's path and a matrix's shape; None: it is stored as plain floats
    find_reader: FindReader
    # a pattern of the names of tensors that nothing reads, such as scales of activations
    passed_over: str = ""
    has_zero_biases: bool = False  # there may be biases that no model has, all 0
    has_head: bool = False  # the head is quantized, as far as the config says

    def describe(self, dtype: str) -> str:
        """Describe what is quantized, and what is not."""
        return (
            f"weights are quantized by {self.method}, and activations stay in {dtype}"
        )


def parse_scheme(value: object) -> Scheme | None:
    """Parse a `quantization_config`; None: there is none.

    Raises:
        CheckpointError: it does not run.
    """
    if value is None:
        return None
    fields = QuantizationFields(value)
    method = fields.find("quant_method")
    parse = METHODS.get(method) if isinstance(method, str) else None
    if parse is None:
        kind = REFUSED.get(method, "") if isinstance(method, str) else ""
        raise CheckpointError(
            "config.json sets quantization_config: its weights are quantized by "
            f"{reprlib.repr(method)}{f' ({kind})' if kind else ''}, which does not run. "
            f"These do: {', '.join(METHODS)}. {REMEDY}"
        )
    fields.refuse("kv_cache_scheme", KV_CACHE)
    scheme = parse(fields)
    fields.check_unread(HARMLESS)
    return scheme


# What a config says of some modules; None: they stay plain floats.
Override = tuple[ModuleRules, WholeScheme | None]


def _find_whole_reader(
    overrides: tuple[Override, ...], default: WholeScheme, module: str, shape: Shape
) -> StoredFormat | None:
    specs = (spec for modules, spec in overrides if modules.match(module))
    spec = next(specs, default)
    return None if spec is None or len(shape) > 2 else make_whole_reader(spec, shape)


def _parse_gptq(fields: QuantizationFields) -> Scheme:
    fields.refuse("is_marlin_format", "numbers lie in the order of Marlin's kernels")
    fields.choose("pack_dtype", ("int32",), "int32")
    versions = ("gptq", "gptq_v2")
    version = fields.choose(
        "checkpoint_format", versions, fields.choose("format", versions, "gptq")
    )
    default = _read_gptq_numbers(
        fields, WholeScheme(GPTQ, bits=0, group=0, added=int(version == "gptq"))
    )
    overrides: list[Override] = [(fields.read_rules("modules_to_not_convert"), None)]
    for key, part in fields.read_parts("dynamic").items():
        pattern = compile_pattern(key.removeprefix("-:").removeprefix("+:"), "dynamic")
        spec = None if key.startswith("-:") else _read_gptq_numbers(part, default)
        part.check_unread(HARMLESS)
        overrides.append((ModuleRules(frozenset(), (pattern,)), spec))
    return Scheme(
        "gptq",
        partial(_find_whole_reader, tuple(overrides), default),
        passed_over=r".*\.bias$",
        has_zero_biases=True,
        has_head=fields.choose("lm_head", (False, True), False),
    )


def _read_gptq_numbers(fields: QuantizationFields, default: WholeScheme) -> WholeScheme:
    group = fields.read_group("group_size", default.group)
    is_ordered = fields.choose("desc_act", (False, True), default.is_ordered)
    return replace(
        default,
        bits=fields.choose("bits", (4, 8), default.bits),
        group=group,
        is_ordered=is_ordered and group > 0,
    )


def _parse_awq(fields: QuantizationFields) -> Scheme:
    if fields.find("backend") == "llm-awq":
        raise fields.refusal_error("backend", "numbers lie in the order of its kernels")
    for name in ("version", "format", "checkpoint_format"):
        fields.choose(name, ("gemm", "GEMM"), "gemm")
    fields.choose("pack_dtype", ("int32",), "int32")
    fields.choose("desc_act", (False,), False)
    fields.choose("zero_point", (True, False), True)  # zeros are stored in any case
    fields.refuse("lm_head", "its head is in floats")
    spec = WholeScheme(
        AWQ, bits=fields.choose("bits", (4,)), group=fields.read_group("group_size")
    )
    ignored = fields.read_rules("modules_to_not_convert")
    return Scheme("awq", partial(_find_whole_reader, ((ignored, None),), spec))


def _parse_fp8(fields: QuantizationFields) -> Scheme:
    fields.choose("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.choose("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.choose("scale_fmt", ("float", "ue8m0"), "float")
    fields.choose("expert_dtype", ("fp8",), "fp8")
    fields.refuse("modules_to_convert", "other modules than matrices are quantized")
    tile = fields.read_tile("weight_block_size")
    ignored = fields.read_rules("modules_to_not_convert", "ignored_layers")
    spec = Float8Scheme(tile, ("weight_scale_inv", "weight_scale"))
    passed_over = r".*\.(input_scale|activation_scale)$"
    return Scheme("fp8", partial(_find_float8_reader, ignored, spec), passed_over)


def _parse_fbgemm(fields: QuantizationFields) -> Scheme:
    fields.find("activation_scale_ub")  # of activations, which stay as they are
    ignored = fields.read_rules("modules_to_not_convert")
    find = partial(_find_float8_reader, ignored, Float8Scheme((1, 0)))
    return Scheme("fbgemm_fp8", find, r".*\.input_scale_ub$")


def _find_float8_reader(
    ignored: ModuleRules, spec: Float8Scheme, module: str, shape: Shape
) -> StoredFormat | None:
    if len(shape) > 2 or ignored.match(module):
        return None
    return make_float8_reader(spec, shape)


def _parse_mxfp4(fields: QuantizationFields) -> Scheme:
    ignored = fields.read_rules("modules_to_not_convert")
    return Scheme("mxfp4", partial(_find_mxfp4_reader, ignored))


def _find_mxfp4_reader(
    ignored: ModuleRules, module: str, shape: Shape
) -> StoredFormat | None:
    is_of_experts = len(shape) > 2
    return MXFP4_EXPERTS if is_of_experts and not ignored.match(module) else None


def _parse_compressed(fields: QuantizationFields) -> Scheme:
    groups = parse_groups(fields)
    ignored = fields.read_rules("ignore")
    fields.find("version")
    return Scheme(
        "compressed-tensors",
        partial(_find_compressed_reader, groups, ignored),
        r".*\.(weight_shape|input_(scale|zero_point|global_scale))$",
        has_head=True,
    )


def _find_compressed_reader(
    groups: tuple[ModuleGroup, ...], ignored: ModuleRules, module: str, shape: Shape
) -> StoredFormat | None:
    """Return how a matrix is stored. A group that names the module comes first."""
    if len(shape) > 2 or ignored.match(module):
        return None
    matching = [each for each in groups if each.modules.match(module)]
    for group in matching or [each for each in groups if each.is_of_all]:
        return group.make_reader(shape)
    return None


METHODS = {
    "gptq": _parse_gptq,
    "awq": _parse_awq,
    "compressed-tensors": _parse_compressed,
    "fp8": _parse_fp8,
    "fbgemm_fp8": _parse_fbgemm,
    "mxfp4": _parse_mxfp4,
}
