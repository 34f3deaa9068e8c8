"""`python -m meshmark`, for when the command is not installed."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]  # `python -m` puts the working directory first, which may be a stranger's
if (here := os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) not in sys.path:
    sys.path.append(here)  # a checkout that is not installed: processes that this one starts look here too

from meshmark.cli.commands import main  # noqa: E402

sys.exit(main())
