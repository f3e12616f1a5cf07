"""Write the generated parts of README.md and docs/ again.

    python tools/generate_docs.py            write them
    python tools/generate_docs.py --check    change nothing; exit 1 where a page is out of date

Tables of families, targets, feature maps, commands and measurements come from the code and from
docs/data/; the picture of README.md is drawn from the same data. Diagrams are drawn from their
text. Commands that install linexport are those of ``linexport.system.install``. See
``tools/pages``.
"""

from __future__ import annotations

import argparse
import sys

from pages import ROOT, filled, install_commands, pages
from pages.diagrams import diagrams
from pages.picture import pictures


def main() -> int:
    """Write or check every page and picture."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--check", action="store_true", help="change nothing")
    check = options.parse_args().check
    wanted = {path: filled(path.read_text(encoding="utf-8")) for path in pages()}
    wanted = {path: install_commands.current(text) for path, text in wanted.items()}
    others = {path: path.read_text(encoding="utf-8") for path in install_commands.texts()}
    wanted |= {path: install_commands.current(text) for path, text in others.items()}
    wanted |= pictures() | diagrams()
    old = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in old:
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'written'}")
        if not check:
            path.write_text(wanted[path], encoding="utf-8")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
