"""The header of TileLang's C, precompiled: g++ needs three quarters of a second to parse it, and a
quarter for the kernel itself. The precompiled header is kept in TileLang's cache. If it does not
fit, for example after a compiler update, g++ falls back to the header's text.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tilelang.contrib.cc import get_cplus_compiler
from tilelang.env import TILELANG_TEMPLATE_PATH, env

HEADER = "#include <tl_templates/cpp/common.h>\n"


@functools.cache
def flags(*options: str) -> list[str]:
    """The flags that make g++ use the precompiled header; `options` are the kernel's other flags.
    None if it is not available: TileLang splits its flags at spaces, so the path must not contain
    one, and other compilers do this in other ways."""
    compiler = get_cplus_compiler() or ""
    command = [compiler, "-std=c++17", "-fPIC", *options, "-I" + TILELANG_TEMPLATE_PATH]
    key = hashlib.sha256(repr(command).encode()).hexdigest()[:16]
    header = Path(env.TILELANG_CACHE_DIR).absolute() / f"header-{key}" / "common.h"
    if Path(compiler).name != "g++" or any(c.isspace() for c in str(header)):
        return []
    compiled = Path(f"{header}.gch")
    try:
        if not compiled.exists():
            header.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=header.parent) as room:
                text, made = Path(room, "common.h"), Path(room, "common.h.gch")
                text.write_text(HEADER)
                command += ["-x", "c++-header", str(text), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True)
                os.replace(text, header)  # atomic, because several processes may write it at once
                os.replace(made, compiled)
    except (OSError, subprocess.CalledProcessError):
        return []
    return ["-include", str(header)]
