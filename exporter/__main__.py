"""The program ``linexport``, and ``python -m linexport``.

Signals are handled before anything that takes time is imported.
"""

from __future__ import annotations

from linexport.system import signals


def main() -> None:
    """Run the command line."""
    signals.install()
    from linexport.system import memory, process_end, unread

    process_end.install()
    unread.install()
    from linexport import option_names
    from linexport.cli import main as run

    memory.own_process()
    option_names.own_process()
    with process_end.exit_code_kept():
        run()


if __name__ == "__main__":
    main()
