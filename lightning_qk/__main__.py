"""``python -m lightning_qk fit | validate | test | sweep | report | doctor``."""

from __future__ import annotations

import sys

USAGE = """usage: lightning-qk COMMAND [options]

  fit        train one run              -c configs/base.yaml -c configs/proxy.yaml -c configs/arms/fault.yaml
  validate   validation loss of a checkpoint
  test       test loss of a checkpoint
  sweep      run all arms of an experiment   -c configs/experiments/demo.yaml; with --status: where its runs are
  doctor     versions, what will run where, self-tests of the kernels
  report     tables and figure of run directories   runs/demo

Every command has --help. A mistake ends in one line; LIGHTNING_QK_TRACEBACK=1 shows where.
A file configs/... that is not here is the one that the package brings."""


def main() -> int:
    """Dispatches to a subcommand; imports only what it needs (data workers import this module again)."""
    command, rest = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command in ("-h", "--help", ""):
        print(USAGE)
        return 0 if command else 2
    if command in ("fit", "validate", "test", "sweep"):
        from lightning_qk.overlays import find_configs

        rest = find_configs(rest)
    if command == "sweep":
        from lightning_qk.sweep import main as sweep

        return sweep(rest)
    if command == "report":
        from lightning_qk.report import main as report

        return report(rest)
    if command == "doctor":
        from lightning_qk.doctor import main as doctor

        return doctor(rest)
    if command not in ("fit", "validate", "test"):
        commands = "fit, validate, test, sweep, report, doctor"
        print(f"error: {command!r} is not a command; the commands are {commands}.", file=sys.stderr)
        return 2
    from lightning_qk.cli import main as cli

    return cli([command, *rest])


if __name__ == "__main__":
    sys.exit(main())
