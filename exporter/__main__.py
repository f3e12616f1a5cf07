"""The program ``linexport``, and ``python -m linexport``.

Signals are handled before anything that takes time is imported.
"""

from __future__ import annotations

import json
import sys

from linexport.system import memory, signals


def main() -> None:
    """Run the command line."""
    signals.install()
    memory.own_process()
    try:
        from linexport.cli import main as run

        run()
    except (Exception, KeyboardInterrupt) as error:
        # A command answers for itself: this was before one began.
        if not isinstance(error, KeyboardInterrupt) and not signals.received():
            raise
        message, code = signals.interruption()
        if "--json" in sys.argv[1:]:
            answer = {"status": "error", "exit_code": code, "message": message}
            sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        else:
            sys.stderr.write(f"Error: {message}\n")
        sys.exit(code)


if __name__ == "__main__":
    main()
