"""`python -m splaxel_ns.cuda build`: compiles the kernels ahead of their first use."""

from __future__ import annotations

import sys

from splaxel_ns.cuda._gpu_backend import main

sys.exit(main())
