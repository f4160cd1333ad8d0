"""Command line: `python -m warpsmith doctor [--json]`, and `pins` for work on this project."""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m warpsmith")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="report on libraries, GPUs, kernels and hooks; exit status 1 if one fails"
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--hub",
        action="store_true",
        help="download and load kernels that come from the Hub (otherwise only its cache is read)",
    )
    commands.add_parser("pins", help="rewrite pins.toml from kernels/*/build.toml (checkout only)")
    arguments = parser.parse_args(argv)
    if arguments.command == "pins":
        from . import pins

        return pins.write()

    from . import doctor as report

    return report.run(as_json=arguments.json, use_hub=arguments.hub)


if __name__ == "__main__":
    sys.exit(main())
