"""Options of the model and its ranks, and of answers that are kept for other runs."""

from __future__ import annotations

from pathlib import Path

from fminfer.cli.options.option_groups import KEPT, MODEL, RANKS, in_group
from fminfer.cli.options.value_types import ByteSize, Numbers, PathOrUrl
from fminfer.core.config import EngineConfig
from fminfer.files.cache_place import DEFAULT_BYTES
from fminfer.pipeline.ranks import RankConfig
from fminfer.server.settings import ServerSettings

_option = in_group(MODEL)

MODEL_OPTIONS = [
    _option(
        "--model-name",
        "--model",
        "model",
        help="A local folder, a Hugging Face hub id, or demo: the small model of the package.  "
        "[default: demo; a run then refuses lines that name another model]",
    ),
    _option(
        "--random-init",
        metavar="CONFIG_OR_SIZE",
        help="Random weights, for benchmarks, in the shape of a config.json, a hub id's, or a "
        "known size (llama-160m, bloom-176b, …).",
    ),
    _option(
        "--tokenizer",
        metavar="FOLDER_OR_ID",
        help="A tokenizer from elsewhere: a local folder or hub id.  [default: the model's own]",
    ),
    _option(
        "--model-config",
        metavar="CONFIG_OR_SIZE",
        help="A config from elsewhere: a config.json, its folder, a hub id or a known size.  "
        "[default: the model's own]",
    ),
    _option(
        "--revision",
        help="Branch, tag or commit of a hub model.  [default: its main branch]",
    ),
    _option(
        "--without-adapter",
        is_flag=True,
        help="Answer with the model alone where a LoRA adapter lies beside it. Otherwise such a "
        "folder is refused: adapters are not applied.",
    ),
    _option(
        "--max-model-len",
        type=int,
        help="Most tokens of a prompt and its completion together.  [default: the model's context]",
    ),
    _option("--max-layers", type=int, help="Use only the model's first N layers."),
]


SERVED_DEFAULTS = ServerSettings()
_kept_option = in_group(KEPT)

RESULT_CACHE_OPTIONS = [
    _kept_option(
        "--result-cache",
        metavar="FOLDER",
        type=PathOrUrl(path_type=Path),
        help="Keep answers here, and take them for equal requests of other runs and servers. This "
        "serves greedy and scored requests, and those with a seed of their own.  [default: none is "
        "kept]",
    ),
    _kept_option(
        "--result-cache-size",
        "result_cache_bytes",
        type=ByteSize(),
        help="Most disk space of these answers: 500M, 10G. The one that was not used for longest "
        f"goes first.  [default: {DEFAULT_BYTES // 2**30}G]",
    ),
]
SERVED_CACHE_OPTIONS = [
    _kept_option(
        "--cache-size",
        metavar="N",
        type=int,
        default=SERVED_DEFAULTS.cache_size,
        show_default=True,
        help="Also keep in memory the answers to the last N requests, for equal ones. 0: none.",
    ),
    _kept_option(
        "--cache-list-size",
        metavar="N",
        type=int,
        default=SERVED_DEFAULTS.cache_list_size,
        show_default=True,
        help="Above 1: also keep in memory N answers to each request that draws without a seed. "
        "Once N are there, one of them comes back at random. Needs --cache-size.",
    ),
]


DEFAULTS, RANK_DEFAULTS = EngineConfig(), RankConfig()
_rank_option = in_group(RANKS)

LAYOUT_OPTIONS = [
    _rank_option(
        "--world-size",
        type=int,
        help="Number of ranks: processes that share the model's layers.  [default: 1]",
    ),
    _rank_option(
        "--data-group-size",
        type=int,
        default=RANK_DEFAULTS.data_group_size,
        show_default=True,
        help="Number of pipelines, each with the whole model. They share one input.",
    ),
    _rank_option(
        "--pipeline-group-size",
        type=int,
        help="Stages of the pipeline.  [default: the world's size]",
    ),
    _rank_option(
        "--num-layers",
        type=int,
        help="Layers of each rank; the last one may have fewer.  [default: balanced by cost]",
    ),
    _rank_option("--stage-layers", type=Numbers(), help="Layers of each rank: 9,9,8."),
]
RANK_OPTIONS = [
    _rank_option("--rank", type=int, help="Be this rank. You start the others yourself."),
    _rank_option(
        "--rendezvous",
        metavar="HOST:PORT|FOLDER",
        help="Where ranks that are started apart, in any order, find each other. Without --rank "
        "they are numbered as they come.",
    ),
    _rank_option(
        "--dist-url",
        metavar="tcp://HOST:PORT",
        help="Where rank 0 listens for ranks that are started apart.",
    ),
    _rank_option(
        "--cuda-id",
        "cuda_ids",
        type=Numbers(),
        default=DEFAULTS.cuda_ids,
        help="The GPUs of this machine's ranks, in their order: 0,1,2.  [default: all]",
    ),
    _rank_option(
        "--join-timeout",
        "join_timeout_s",
        type=float,
        default=RANK_DEFAULTS.join_timeout_s,
        show_default=True,
        help="Seconds that a rank may take to join.",
    ),
    _rank_option(
        "--rank-timeout",
        "rank_timeout_s",
        type=float,
        default=RANK_DEFAULTS.rank_timeout_s,
        show_default=True,
        help="Seconds that a rank may be silent before the run ends.",
    ),
]
