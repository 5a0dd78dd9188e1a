"""`longtail` on a pretended GPU: its tensors claim `cuda:0`; vLLM generates on the CPU."""

import sys
import tempfile
from pathlib import Path

from support.pretend_cuda import load, pretended

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        load(Path(folder))
    with pretended():
        from longtail.cli.main import main

        sys.exit(main())
