"""`fminfer doctor`: what to paste when something is slow or wrong."""

from __future__ import annotations

import click

from fminfer.core.terminal import wrap_lines

WIDTH = 88


@click.command()
def doctor() -> None:
    """Show the machine, the kernels, versions and folders on one page, to paste into a report.

    No keys, tokens and names of home folders are on it. It ends with what could be better, and
    what to do. The first call may build kernels.
    """
    from fminfer.estimate.machine_report import make_machine_report

    report = make_machine_report()
    for title, facts in report.sections.items():
        click.echo(title)
        for name, text in facts or [("none", "")]:
            first, *rest = wrap_lines(text, WIDTH - 18).splitlines() or [""]
            click.echo(f"  {name:<15} {first}".rstrip())
            for line in rest:
                click.echo(f"{'':18}{line}")
    click.echo()
    for finding in report.findings or ["Nothing is wrong."]:
        click.echo(wrap_lines(finding, WIDTH))
