"""`python -m pipeline` is `dflash`: what the launcher starts."""

from pipeline.cli import main

main()
