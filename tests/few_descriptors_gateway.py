"""A gateway that may open few files: `python -m tests.few_descriptors_gateway SOFT HARD`, then its own options."""

import resource
import sys

from gateway.__main__ import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv.pop(1)), int(sys.argv.pop(1))))
    main()
