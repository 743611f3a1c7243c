"""Options that only old command lines need, and what they mean today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from fminfer.cli.options.option_groups import OLD, GroupedOption, in_group
from fminfer.cli.options.value_types import PipelineMode

KERNELS_OF_OLD = {"auto": "auto", "eager": "off", "compiled": "require"}  # of --attention
_option = in_group(OLD)


class KernelsOption(GroupedOption):
    """--kernels, which --attention may say under its old name."""

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Take the value of --attention if that alone is given."""
        old = opts.get("attention")
        meant = KERNELS_OF_OLD.get(old or "")  # click itself refuses any other word
        if meant is not None:
            opts = {"kernels": meant, **opts}
            if opts["kernels"] != meant:
                raise click.UsageError(
                    f"--kernels {opts['kernels']} and --attention {old} contradict each other: "
                    f"--attention {old} is the old name of --kernels {meant}. Give --kernels alone",
                    ctx,
                )
        return super().handle_parse_result(ctx, opts, args)


OLD_MODEL_OPTIONS = [
    _option("--model-type", help="Checked against the model's config (opt, bloom, gptj, …)."),
    _option("--fp16", is_flag=True, help="The same as --dtype float16."),
    _option(
        "--attention",
        type=click.Choice([*KERNELS_OF_OLD]),
        expose_value=False,  # `KernelsOption` reads it
        help="The same as --kernels auto, off or require.",
    ),
]
OLD_RUN_OPTIONS = [
    _option(
        "--pp-mode",
        type=PipelineMode(),
        help="Any name that begins with pipe_. There is one schedule.",
    ),
]
