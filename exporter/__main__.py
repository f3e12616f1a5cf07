"""``python -m linexport``."""

from linexport.cli import main

main()
