"""The headers of a GGUF model's files: metadata, and where its tensors are.

A key of the model's architecture that nobody reads may change answers. Such a file is refused.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fminfer.compute.values.spec import Model
from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import broken_file_error
from fminfer.machine.user_cache import make_cache_folder
from fminfer.models.families.tensor_names import (
    BY_PAIRS,
    WITH_ONE,
    XIELU,
    Architecture,
    Sources,
    make_sources,
    parameter_source,
    with_layout,
)
from fminfer.models.stored.gguf_file import Metadata, read_gguf
from fminfer.models.stored.stored_tensors import StoredTensor
from fminfer.models.stored.weight_folder import find_weights
from fminfer.text import gguf_tokenizer, gguf_vocabulary

LAST_NORM = "output_norm.weight"
ONLY_WITH = "and fminfer computes such a model only with"
MOST = 1 << 20  # of whole numbers, so that a broken file asks for no endless lists
# Keys of an architecture that nothing reads → why they change no answer.
HARMLESS = {
    "vocab_size": "the rows of the embedding count",
    "rope.scaling.finetuned": "it tells of training",
    "tensor_data_layout": "each architecture here has one",
    "expert_shared_feed_forward_length": "the shapes of tensors are checked",
    # Granite 4's models have them, also those of attention alone.
    **dict.fromkeys(
        (
            "ssm.conv_kernel",
            "ssm.state_size",
            "ssm.group_count",
            "ssm.inner_size",
            "ssm.time_step_rank",
        ),
        "tensors of layers with a state are refused",
    ),
}


@dataclass(slots=True)
class GgufModel:
    """The headers of a model's GGUF files. A missing or wrong value is a CheckpointError.

    Methods get keys of its architecture without the architecture's name.
    """

    path: Path  # of the first file, which has the metadata
    metadata: Metadata
    tensors: Mapping[str, StoredTensor]
    header: tuple[int, int]  # the bytes of the first file that hold the metadata
    _read: set[str] = field(default_factory=set)

    @property
    def arch(self) -> str:
        """The name of its architecture, such as "llama"."""
        return str(self.metadata.get("general.architecture"))

    @property
    def hidden_size(self) -> int:
        """The length of hidden states, which is that of the last norm.

        OLMo's norms have no weights. There the matrices are checked alone, as all others.
        """
        size = self.read_integer("embedding_length", least=1)
        stored = getattr(self.tensors.get(LAST_NORM), "shape", None)
        if stored != (size,) and self.arch != "olmo":
            raise broken_file_error(
                self.path, f"embedding_length is {size}, {LAST_NORM} has {stored}"
            )
        return size

    @property
    def num_layers(self) -> int:
        """How many layers compute a token, by the metadata and by the names of tensors.

        Behind them stand those that predict further tokens, which nothing reads.
        """
        num = self.read_integer("block_count")
        numbers = {n.split(".")[1] for n in self.tensors if n.startswith("blk.")}
        if num != len(numbers) or not num:
            raise broken_file_error(
                self.path, f"block_count is {num}, and {len(numbers)} are stored"
            )
        return num - self.read_integer("nextn_predict_layers", 0, most=num - 1)

    @property
    def heads(self) -> int:
        """How many heads a layer has."""
        return self.read_integer("attention.head_count", least=1, most=self.hidden_size)

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""
        return self.read_integer("context_length", most=1 << 40)

    def find_value(self, key: str) -> object:
        """Return a value; None: there is none."""
        self._read.add(f"{self.arch}.{key}")
        return self.metadata.get(f"{self.arch}.{key}")

    def read_integer(
        self, key: str, default: int | None = None, *, least: int = 0, most: int = MOST
    ) -> int:
        """Return a whole number. One for each layer must be the same for all."""
        value = self.find_value(key)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise self._unsupported_error(
                    key, value, f"{ONLY_WITH} one number for all layers"
                )
            value = value[0]
        value = default if value is None else value
        if type(value) is not int or not least <= value <= max(most, default or 0):
            raise self._broken_value_error(
                key, value, f"whole number from {least} to {most}"
            )
        return value

    def read_number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        value = self.find_value(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self._broken_value_error(key, value, "number")
        return float(value)

    def check_value(self, key: str, *allowed: object) -> None:
        """Raise a CheckpointError for a key with another value; a missing one is fine."""
        value = self.find_value(key)
        if value is not None and value not in allowed:
            *first, last = map(str, allowed)
            allowed_text = f"{', '.join(first)} or {last}" if first else last
            raise self._unsupported_error(key, value, f"{ONLY_WITH} {allowed_text}")

    def count_rows(self, tensor: str) -> int:
        """Return the outputs of a stored matrix."""
        matrix = self.tensors.get(tensor)
        if matrix is None or len(matrix.shape) != 2:
            raise broken_file_error(self.path, f"it stores no matrix {tensor!r}")
        return matrix.shape[0]

    def check_unread_keys(self) -> None:
        """Raise a CheckpointError for a key that nobody has read."""
        for key, value in self.metadata.items():
            short_key = key.removeprefix(f"{self.arch}.")
            if short_key != key and key not in self._read and short_key not in HARMLESS:
                why = "which fminfer does not read for this architecture and may change answers"
                raise self._unsupported_error(short_key, value, why)

    def _unsupported_error(self, key: str, value: object, why: str) -> CheckpointError:
        statement = f"{self.path} sets {self.arch}.{key} to {f'{value!r:.60}'}"
        return CheckpointError(
            f"{statement}, {why}; take the same model in safetensors"
        )

    def _broken_value_error(
        self, key: str, value: object, kind: str
    ) -> CheckpointError:
        if value is None:
            return broken_file_error(self.path, f"it lacks the key {self.arch}.{key}")
        return broken_file_error(
            self.path, f"{self.arch}.{key} is {value!r:.60}, and no {kind}"
        )


def read_gguf_model(path: Path) -> GgufModel:
    """Read the headers of a model's files; the first one's metadata count."""
    headers = [read_gguf(file) for file in find_weights(path).files]
    first, metadata = headers[0]
    tensors = {name: each for file, _ in headers for name, each in file.tensors.items()}
    model = GgufModel(path, metadata, tensors, first.header)
    kind = metadata.get("general.type", "model")
    if kind != "model" or model.arch == "clip":
        raise CheckpointError(
            f"{path} is no language model (general.type {kind!r}, architecture {model.arch!r}); "
            "give the model's own file"
        )
    num = metadata.get("split.count", 0) or 1
    if num != len(headers):
        raise CheckpointError(
            f"{path} has split.count {num}, but its name says {len(headers)} part(s); "
            "give all parts the names that they had, such as m-00001-of-00003.gguf"
        )
    for number, (file, part_metadata) in enumerate(headers):
        if part_metadata.get("split.no", 0) != number:
            raise CheckpointError(
                f"{file.path} is part {number + 1} by its name, and has split.no "
                f"{part_metadata.get('split.no')!r}, which counts from 0; fetch it again"
            )
    return model


# Where tensors are: names are the same for nearly all architectures.
OUTER = make_sources(
    embed="token_embd",
    positions="position_embd",
    embed_norm="token_embd_norm",
    final_norm="output_norm",
    head="output",
)
INNER = make_sources(
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
) | {
    "choice": parameter_source("exp_probs_b.bias"),
    "sinks": parameter_source("attn_sinks.weight"),
    **{
        f"xielu.{ours}": parameter_source(f"xielu.{theirs}")
        for ours, theirs in XIELU.items()
    },
}
LATENT = make_sources(
    q="attn_q",
    q_down="attn_q_a",
    q_norm="attn_q_a_norm",
    q_up="attn_q_b",
    kv_down="attn_kv_a_mqa",
    kv_norm="attn_kv_a_norm",
)
# llama.cpp's converter reorders their rows of queries and keys
PAIRED = ("llama", "granite", "granitemoe", "smollm3", "olmo", "mistral3", "arcee")
WITH_ONES = ("gemma", "gemma2", "gemma3", "nemotron")
NORMS = (
    "before_attention",
    "after_attention",
    "before_mlp",
    "after_mlp",
    "q_norm",
    "k_norm",
)
LEFT_OUT = (
    r"rope_freqs\.weight$|rope_factors_(long|short)\.weight$|blk\.\d+\.attn_rot_embd\."
)


def gguf_architecture(model: GgufModel, spec: Model) -> Architecture:
    """Return a spec with the sources of its tensors in a GGUF file.

    Some names differ by architecture, and some files join tensors that others store apart.
    """
    modules = {name.partition(".")[2].partition(".")[2] for name in model.tensors}
    outer = OUTER
    inner = dict(INNER)
    if "attn_qkv.weight" in modules:
        inner |= make_sources(qkv="attn_qkv")
    if "ffn_gate.weight" not in modules:
        inner |= make_sources(up="ffn_up")
    if "ffn_gate_up_exps.0.weight" in modules:
        inner |= make_sources(experts__up="ffn_gate_up_exps.*")
    if model.arch == "falcon" and "attn_norm_2.weight" in modules:
        inner |= make_sources(before_attention="attn_norm_2", before_mlp="attn_norm")
    if model.arch in ("gpt-oss", "seed_oss", "glm4moe"):
        inner |= make_sources(before_mlp="post_attention_norm|ffn_norm")
    if model.arch == "deepseek2":
        is_old = "attn_kv_b.weight" in modules
        inner |= LATENT | make_sources(
            kv_up="attn_kv_b" if is_old else "attn_k_b.* attn_v_b.*"
        )
    if model.arch in PAIRED:
        inner = with_layout(BY_PAIRS, inner, "qkv")
    if model.arch in WITH_ONES:
        inner = _with_one(inner, *NORMS)
        outer = _with_one(outer, "final_norm")
    predicting = range(model.num_layers, model.read_integer("block_count"))
    for number in predicting:
        if (name := f"blk.{number}.nextn.eh_proj.weight") not in model.tensors:
            raise broken_file_error(
                model.path, f"layer {number} predicts further tokens without {name}"
            )
    left_out = "|".join([LEFT_OUT, *(rf"blk\.{number}\." for number in predicting)])
    return Architecture(spec, outer, inner, "blk.{}.", "blk.", left_out=left_out)


def _with_one(sources: Sources, *norms: str) -> Sources:
    """Return sources in which the weights of norms, and not their biases, are one more."""
    return sources | {
        f"{name}.weight": parameter_source(f"{sources[name].names[0]}.weight", WITH_ONE)
        for name in norms
    }


def cache_small_files(model: GgufModel, *, has_tokenizer: bool) -> Path:
    """Return the folder of a model's small files in the user's cache; write it if it is new.

    All other code reads such files. Without a tokenizer, generation_config.json is all.
    """
    write = (
        gguf_tokenizer.write_tokenizer_files
        if has_tokenizer
        else gguf_tokenizer.write_generation_config
    )
    try:
        cache = make_cache_folder()
        if cache is None:
            cache = Path(tempfile.mkdtemp(prefix="fminfer-"))
            atexit.register(shutil.rmtree, cache, ignore_errors=True)
        folder = cache / f"gguf-{_cache_key(model)}{'' if has_tokenizer else '-ends'}"
        if not folder.is_dir():
            part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=cache))
            try:
                write(model.metadata, part)
                part.rename(folder)
            except OSError:
                # else another process was first, with the same files
                if not folder.is_dir():
                    raise
            finally:
                shutil.rmtree(part, ignore_errors=True)
        return folder
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer of {model.path} cannot be written to the cache folder: {error}. Set "
            "XDG_CACHE_HOME to a folder that you can write"
        ) from error


def _cache_key(model: GgufModel) -> str:
    """Return a digest of the header, and of the code that writes the small files."""
    first, last = model.header
    digest = hashlib.blake2b(digest_size=16)
    for code in (gguf_tokenizer.__file__, gguf_vocabulary.__file__):
        digest.update(Path(code).read_bytes())
    with model.path.open("rb") as file:
        file.seek(first)
        digest.update(file.read(last - first))
    return digest.hexdigest()
