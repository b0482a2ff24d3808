"""These tests run kernels in Triton's interpreter, which has to be chosen before Triton is imported.

So they need a process of their own, with TRITON_INTERPRET=1, which `test_interpreted.py` starts. Elsewhere they are not
collected.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
