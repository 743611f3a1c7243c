"""Options of ranks: how layers and machines are divided, and how ranks find each other."""

from __future__ import annotations

from fminfer.cli.options.option_groups import RANKS, in_group
from fminfer.cli.options.value_types import Numbers
from fminfer.core.config import EngineConfig
from fminfer.pipeline.ranks import RankConfig

DEFAULTS, RANK_DEFAULTS = EngineConfig(), RankConfig()
_option = in_group(RANKS)

LAYOUT_OPTIONS = [
    _option(
        "--world-size",
        type=int,
        help="Number of ranks: processes that share the model's layers.  [default: 1]",
    ),
    _option(
        "--data-group-size",
        type=int,
        default=RANK_DEFAULTS.data_group_size,
        show_default=True,
        help="Number of pipelines, each with the whole model. They share one input.",
    ),
    _option(
        "--pipeline-group-size",
        type=int,
        help="Stages of the pipeline.  [default: the world's size]",
    ),
    _option(
        "--num-layers",
        type=int,
        help="Layers of each rank; the last one may have fewer.  [default: balanced by cost]",
    ),
    _option("--stage-layers", type=Numbers(), help="Layers of each rank: 9,9,8."),
]
RANK_OPTIONS = [
    _option("--rank", type=int, help="Be this rank. You start the others yourself."),
    _option(
        "--rendezvous",
        metavar="HOST:PORT|FOLDER",
        help="Where ranks that are started apart, in any order, find each other. Without --rank "
        "they are numbered as they come.",
    ),
    _option(
        "--dist-url",
        metavar="tcp://HOST:PORT",
        help="Where rank 0 listens for ranks that are started apart.",
    ),
    _option(
        "--cuda-id",
        "cuda_ids",
        type=Numbers(),
        default=DEFAULTS.cuda_ids,
        help="The GPUs of this machine's ranks, in their order: 0,1,2.  [default: all]",
    ),
    _option(
        "--join-timeout",
        "join_timeout_s",
        type=float,
        default=RANK_DEFAULTS.join_timeout_s,
        show_default=True,
        help="Seconds that a rank may take to join.",
    ),
    _option(
        "--rank-timeout",
        "rank_timeout_s",
        type=float,
        default=RANK_DEFAULTS.rank_timeout_s,
        show_default=True,
        help="Seconds that a rank may be silent before the run ends.",
    ),
]
