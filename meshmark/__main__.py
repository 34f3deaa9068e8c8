"""`python -m meshmark`, where the command is not installed."""

import sys

from meshmark.cli import main

sys.exit(main())
