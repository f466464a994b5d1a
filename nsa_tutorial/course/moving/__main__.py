"""A figure as a page: `python -m nsa_tutorial.course.moving masks page.html`."""

import argparse
from pathlib import Path

from nsa_tutorial.course.moving import NAMES, page


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_tutorial.course.moving", description=__doc__.partition(":")[0]
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("path", type=Path, help="the page to write")
    chosen = parser.parse_args()
    chosen.path.write_text(page(chosen.name), encoding="utf-8")
    print(f"{chosen.path}: {chosen.path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
