"""`python -m ckptctl`: the command line."""

from ckptctl.cli.main import main

if __name__ == "__main__":
    main()
