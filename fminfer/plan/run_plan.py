"""`RunPlan`: what was decided of a run, as one value that all others read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from fminfer.compute.values.weights import Format, Use
from fminfer.core.config import STREAMED, EngineConfig, StepSizes
from fminfer.core.option import options_of
from fminfer.core.partition import Part
from fminfer.core.version import __version__
from fminfer.models.arrivals import Arrival
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.fingerprint import compute_fingerprint, config_text
from fminfer.models.holding import Holding
from fminfer.models.sharding import ModelShard
from fminfer.plan.machine_facts import Machine


@dataclass(slots=True, frozen=True)
class ExpectedBytes:
    """What one process takes, in bytes."""

    libraries: int  # Python, torch, rotary tables; on a GPU its context and reserve
    weights: int  # weights, with mapped files
    # the part that must stay: mapped files can be dropped and read again
    held_weights: int
    mapped: int  # the part in mapped files, which leave memory to others
    # steps use weights where they are mapped: none but the head is packed
    reads_files: bool
    work: int  # a step's work
    work_token: int  # of that, each token's beside logits
    kv_token: int  # a token's keys and values
    # of streamed layers: the part of `weights` that is not there after loading
    passing: int = 0
    host: int = 0  # of a GPU's rank: streamed layers in the host's memory

    def total(self, num_kv_tokens: int) -> int:
        """Return the peak, if so many tokens of KV cache are used."""
        return self.libraries + self.weights + self.work + num_kv_tokens * self.kv_token


@dataclass(slots=True, frozen=True)
class Streamed:
    """A rank's streamed layers, which are brought for each pass (--offload)."""

    place: Literal["cpu", "disk"]  # where they come from
    # They come from the system's cache of files, which the ranks of a machine share; otherwise a
    # GPU's layers lie in memory of its own process.
    is_shared: bool
    numbers: tuple[int, ...]
    num_bytes: int  # of all of them, as they are stored


@dataclass(slots=True, frozen=True)
class RankPlan:
    """The place of one rank, and what it takes there."""

    rank: int
    part: Part  # its stage, and its shard of that
    share: ModelShard | None  # what it has of each layer; None: all
    takes: ExpectedBytes
    streamed: Streamed | None = None  # None: all layers stay in memory


@dataclass(slots=True, frozen=True)
class RunPlan:
    """Everything that is decided of a run before it loads, by `make_plan`."""

    config: EngineConfig
    checkpoint: Checkpoint
    machine: Machine
    device: torch.device  # of this process
    dtype: torch.dtype  # of the arithmetic
    kv_dtype: torch.dtype  # of the KV cache
    holding: Holding  # what decides in which format a tensor is held
    # of each tensor in files, by name; none: there are no files
    stored: Mapping[str, Format]
    # how each of these comes, on a CPU and uncut
    arrivals: Mapping[str, Arrival]
    # of each tensor as it is read, and quantized if options say so
    made: Mapping[str, Format]
    held: Mapping[str, Format]  # of each tensor in memory
    formats: Mapping[Use, Format]  # the same of most, by what they are for
    has_kernels: bool  # the CPU's are there, and may be used
    # on a GPU, which has no kernels for blocks: each use makes floats of them
    has_blocks: bool
    packed_by: Literal["kernels", "torch", ""]  # who packs the weights of products
    # why answers may depend on other rows, as far as a plan shows; "": they do not
    dependence: str = ""
    ranks: tuple[RankPlan, ...] = ()  # of one pipeline
    num_kv_tokens: int = 0  # size of each pipeline's KV cache; 0: not one block fits
    shortage: str = ""  # what does not fit, and what to do
    why_reread: str = ""  # weights do not fit, and are read from the disk at each step
    # most tokens of a step, if layers are streamed; 0: as options say
    chunk_size: int = 0
    # the format of most weights before blocks became floats; "": none did
    made_in: str = ""

    @property
    def held_in(self) -> str:
        """What people call the format of most weights in memory."""
        name = self.formats["product"].name
        return name if self.made_in in ("", name) else f"{name} of {self.made_in}"

    @property
    def this_rank(self) -> RankPlan:
        """This process's part."""
        return self.ranks[self.machine.rank]

    @property
    def may_capture(self) -> bool:
        """Whether decode steps may be CUDA graphs, which cannot hold sums of shards.

        If each use makes floats of blocks, a graph would be large, and launches matter little.
        """
        is_apart = self.machine.num_shards > 1 or self.has_blocks
        return self.config.kernels != "off" and not is_apart

    @property
    def takes(self) -> list[ExpectedBytes]:
        """What each rank takes."""
        return [rank.takes for rank in self.ranks]

    @property
    def sizes(self) -> StepSizes:
        """How much is computed at once."""
        # each step brings the layers again: few large steps are better
        if self.chunk_size:
            rows = self.config.max_rows or STREAMED[self.device.type].max_rows
            # Stages that share a disk take turns: of two steps at once, each would read
            # all layers.
            from_disk = any(
                each.streamed and each.streamed.place == "disk" for each in self.ranks
            )
            has_turns = from_disk and self.machine.local_size >= len(self.ranks)
            return StepSizes(
                self.chunk_size, rows, 1 if has_turns else self.machine.num_stages
            )
        return self.config.choose_step_sizes(self.device.type, self.machine.num_stages)

    @property
    def room_bytes(self) -> int:
        """Free before the run: on each device, or in the memory that all processes share."""
        if self.machine.device_bytes is not None:
            return self.machine.device_bytes
        # What this process has is as much as one of the run's own will have.
        return (self.machine.free or 0) + self.machine.process_bytes

    @property
    def shares_memory(self) -> bool:
        """Whether all processes take from the same memory: CPU ranks of this machine do."""
        return self.machine.device_bytes is None and self.device.type == "cpu"

    @property
    def most_kv_tokens(self) -> int:
        """The tokens of KV cache beyond which more is of no use."""
        size = self.config.block_size
        return self.sizes.max_rows * -(-self.checkpoint.context_length // size) * size

    def most_read(self, left: int) -> int:
        """Return how many tokens an encoder can read at once, with so many bytes left for it."""
        return max(self.sizes.chunk_size, left // self.this_rank.takes.work_token)

    def used_kv_tokens(self, num_written: int) -> int:
        """Return the tokens of KV cache that take memory, of those written: a GPU's all do."""
        return num_written if self.device.type == "cpu" else self.num_kv_tokens

    def fingerprint(self) -> dict[str, str]:
        """Return what an answer depends on beside its line; it reads of every weight file."""
        return compute_fingerprint(
            self.config, self.checkpoint, self.dtype, self.kv_dtype
        )

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on every rank, by the names that people know."""
        config = hashlib.sha256(config_text(self.checkpoint).encode())
        return {
            "fminfer's version": __version__,
            "the model's config": config.hexdigest()[:12],
            "the dtype": name_of(self.dtype),
            "--quantize": self.config.quantized_to,
            "the KV cache's dtype": name_of(self.kv_dtype),
            "the layers of each rank": [rank.part.num_layers for rank in self.ranks],
        } | {
            each.told: getattr(self.config, name)
            for name, each in options_of(type(self.config)).items()
            if each.must_agree
        }


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
