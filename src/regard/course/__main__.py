"""`python -m regard.course NUMBER FILE RESULT SECONDS`: the process in which `checking.check_file` checks a file."""

import sys

from .checking import check_here

check_here(*sys.argv[1:])
