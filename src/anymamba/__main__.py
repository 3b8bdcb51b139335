"""`python -m anymamba`: the command line."""

import sys

from anymamba.cli.main import main

sys.exit(main())
