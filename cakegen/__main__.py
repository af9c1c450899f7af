"""`python -m cakegen`: the command line."""

from cakegen.cli.main import main

main()
