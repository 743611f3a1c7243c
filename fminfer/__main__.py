"""`python -m fminfer` is `fminfer`."""

from fminfer.cli import main

main()
