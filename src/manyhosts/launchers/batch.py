"""The head of a job inside the allocation that its engine gave it, where no terminal holds one.

python -P -m manyhosts.launchers.batch ENGINE RUN_DIR/job.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from manyhosts.control import job_file
from manyhosts.errors import ManyhostsError
from manyhosts.launchers.launcher import LAUNCHERS


def main(words: list[str] | None = None) -> int:
    """Returns the exit code of the run."""
    name, path = sys.argv[1:] if words is None else words
    try:
        return LAUNCHERS.load(name)().run(job_file.load(Path(path)))
    except ManyhostsError as error:
        sys.stderr.write(f"manyhosts: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
