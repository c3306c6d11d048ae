"""`python -m meshfn`: see `programs/cli.py`."""

import sys

if __name__ == "__main__":
    try:
        from .programs.cli import main
    except KeyboardInterrupt:  # while torch is imported
        sys.exit(130)
    sys.exit(main())
