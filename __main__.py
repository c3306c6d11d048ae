"""`python -m meshfn`: see `programs/cli.py`."""

from .programs.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
