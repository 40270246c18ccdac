"""The command line. `docs/reference/cli.md` tells every command, option and exit code."""


def main() -> None:
    """The program `skerry`."""
    import sys

    from skerry.cli.app import start

    sys.exit(start(sys.argv[1:]))
