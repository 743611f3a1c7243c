"""`python -m fminfer` is `fminfer`."""

from fminfer.cli.app import main

main()
