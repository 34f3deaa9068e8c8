"""`python -m meshmark`, for when the command is not installed."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]  # `python -m` puts the working directory first, which may be a stranger's

from meshmark.cli.commands import main  # noqa: E402

sys.exit(main())
