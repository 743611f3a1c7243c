"""What computes for an engine, to be asked for: its plan, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from fminfer.plan.machine_facts import Machine
from fminfer.plan.run_plan import RunPlan, name_of
from fminfer.plan.streaming import describe_streaming


@dataclass(slots=True, frozen=True)
class Measured:
    """What one pipeline has measured, as its first rank sees it."""

    num_threads: int  # computing threads in each process
    weight_bytes: int  # this rank's weights
    has_kernel: bool  # attention is compiled
    why_plain: str  # why a kernel that should be used is not
    why_slower: str  # why it is slower than it could be
    disk_speed: float = 0.0  # bytes a second of streamed layers; 0: none were read
    why_dependent: str = ""  # why answers may depend on other rows; "": they do not


@dataclass(slots=True, frozen=True)
class LoadedPipeline:
    """What the run is told of a pipeline that can answer. Its plan is made again of this."""

    machine: Machine
    num_kv_tokens: int
    chunk_size: int
    measured: Measured


@dataclass(slots=True, frozen=True)
class PipelineProperties:
    """The plan of the pipelines that compute together, and what they have measured."""

    plan: RunPlan
    measured: Measured
    num_pipelines: int = 1  # those that still compute
    is_team: bool = False  # other processes compute, even if one is left

    @property
    def device(self) -> str:
        """The first rank's, such as cpu or cuda:0."""
        return str(self.plan.device)

    @property
    def dtype(self) -> str:
        """The type of hidden states, such as float32."""
        return name_of(self.plan.dtype)

    @property
    def weight_dtype(self) -> str:
        """The type in which most weights are held."""
        return self.plan.held_in

    @property
    def num_kv_blocks(self) -> int:
        """The size of the KV cache; of several, of the smallest."""
        return self.plan.num_kv_tokens // self.plan.config.block_size

    @property
    def num_stages(self) -> int:
        """The stages of all pipelines."""
        return self.num_pipelines * self.plan.this_rank.part.num_stages

    @property
    def num_ranks(self) -> int:
        """The ranks of all stages."""
        return self.num_pipelines * len(self.plan.ranks)

    @property
    def is_alone(self) -> bool:
        """Whether one process computes, which is this one."""
        return self.num_ranks == 1 and not self.is_team

    @property
    def streaming(self) -> str:
        """Which layers are streamed, and what a pass takes; "": none."""
        return describe_streaming(self.plan, self.measured.disk_speed)
