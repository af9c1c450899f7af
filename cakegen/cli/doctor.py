"""`cakegen doctor`: what this machine can do, and what stands in the way. Imports cakegen inside functions."""

from __future__ import annotations

import click


@click.command("doctor")
@click.option("--export", "export", default="kimi_k3_latent_moe", show_default=True, help="Export, or a tree's folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor_command(export: str, as_json: bool) -> None:
    """Look at Python, torch, the driver, NVRTC, the devices and their routes, the cache and the settings.

    Exit status 1: something that is here is wrong. What is absent (a GPU, say) only limits what can be done.
    """
    import dataclasses
    import json

    from cakegen.doctor import PROBLEM, examine_devices, examine_machine

    findings = [*examine_machine(export), *examine_devices(export)]
    problems = sum(finding.state == PROBLEM for finding in findings)
    if as_json:
        values = {"problems": problems, "findings": [dataclasses.asdict(finding) for finding in findings]}
        click.echo(json.dumps(values, indent=1))
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            click.echo(f"{finding.state:8} {finding.topic:{width}}  {finding.text}")
        click.echo(f"{problems} problems")
    if problems:
        raise click.exceptions.Exit(1)
