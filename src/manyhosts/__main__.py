"""`python -m manyhosts` is the command `manyhosts`."""

from __future__ import annotations

import sys

from manyhosts.cli.main import main

sys.exit(main())
