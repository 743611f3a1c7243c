"""Where the tensors of a GGUF model are: names are the same for nearly all architectures."""

from __future__ import annotations

from fminfer.compute.spec import Model
from fminfer.models.families.tensor_names import (
    BY_PAIRS,
    WITH_ONE,
    Architecture,
    Layout,
    Sources,
    laid_out,
    parameter,
    sources,
)
from fminfer.models.gguf.metadata import GgufModel

OUTER = sources(
    embed="token_embd",
    positions="position_embd",
    embed_norm="token_embd_norm",
    final_norm="output_norm",
    head="output",
)
INNER = sources(
    before_attention="attn_norm",
    after_attention="post_attention_norm",
    before_mlp="ffn_norm",
    after_mlp="post_ffw_norm",
    qkv="attn_q attn_k attn_v",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    out="attn_output",
    up="ffn_gate ffn_up",
    down="ffn_down",
    router="ffn_gate_inp",
    experts__up="ffn_gate_exps.*|ffn_gate.* ffn_up_exps.*|ffn_up.*",
    experts__down="ffn_down_exps.*|ffn_down.*",
    shared__up="ffn_gate_shexp ffn_up_shexp",
    shared__down="ffn_down_shexp",
    shared_gate="ffn_gate_inp_shexp",
) | {"choice": parameter("exp_probs_b.bias"), "sinks": parameter("attn_sinks.weight")}
LATENT = sources(
    q="attn_q",
    q_down="attn_q_a",
    q_norm="attn_q_a_norm",
    q_up="attn_q_b",
    kv_down="attn_kv_a_mqa",
    kv_norm="attn_kv_a_norm",
)
PAIRED = ("llama", "granite")  # llama.cpp's converter reorders their rows of queries and keys
WITH_ONES = ("gemma", "gemma2", "gemma3")
NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp", "q_norm", "k_norm")
LEFT_OUT = r"rope_freqs\.weight$|rope_factors_(long|short)\.weight$|blk\.\d+\.attn_rot_embd\."


def gguf_architecture(model: GgufModel, spec: Model) -> Architecture:
    """Return where a GGUF file has the tensors of a spec."""
    outer, inner = OUTER, INNER | _of_file(model)
    if model.arch in PAIRED:
        inner = _laid_out(BY_PAIRS, inner, "qkv")
    if model.arch in WITH_ONES:
        inner, outer = _laid_out(WITH_ONE, inner, *NORMS), _laid_out(WITH_ONE, outer, "final_norm")
    return Architecture(spec, outer, inner, "blk.{}.", "blk.", left_out=LEFT_OUT)


def _laid_out(layout: Layout, where: Sources, *names: str) -> Sources:
    return where | laid_out(layout, {name: where[name] for name in names})


def _of_file(model: GgufModel) -> Sources:
    """Return what differs by architecture, and what a file has joined that others have in parts."""
    modules = {name.partition(".")[2].partition(".")[2] for name in model.tensors}
    found: Sources = {}
    if "attn_qkv.weight" in modules:
        found |= sources(qkv="attn_qkv")
    if "ffn_gate.weight" not in modules:
        found |= sources(up="ffn_up")
    if "ffn_gate_up_exps.0.weight" in modules:
        found |= sources(experts__up="ffn_gate_up_exps.*")
    if model.arch == "falcon" and "attn_norm_2.weight" in modules:
        found |= sources(before_attention="attn_norm_2", before_mlp="attn_norm")
    if model.arch == "gpt-oss":
        found |= sources(before_mlp="post_attention_norm|ffn_norm")
    if model.arch == "deepseek2":
        is_old = "attn_kv_b.weight" in modules
        found |= LATENT | sources(kv_up="attn_kv_b" if is_old else "attn_k_b.* attn_v_b.*")
    return found
