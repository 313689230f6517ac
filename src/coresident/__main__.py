"""`python -m coresident` is the `coresident` command."""

from coresident.cli.app import main

if __name__ == "__main__":
    main()
