"""Entry points: `python -m jobs.NAME`, here or through `ray job submit`."""

import sys

from jobs._installed import lacking

if lacking():
    sys.exit(lacking())
