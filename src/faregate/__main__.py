"""`python -m faregate` is the command line."""

from faregate.cli import main

main()
