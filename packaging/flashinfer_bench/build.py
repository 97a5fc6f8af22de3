"""Writes solutions for flashinfer-bench's definitions of DeepSeek sparse attention.

    python packaging/flashinfer_bench/build.py OUT

``OUT`` is a folder in the form of flashinfer-trace, such as a checkout of it.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))

DEFINITIONS = {
    "dsa_topk_indexer_fp8_h64_d128_topk2048_ps64": "dsa_topk_indexer.py",
    "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps1": "dsa_sparse_attention.py",
    "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64": "dsa_sparse_attention.py",
}
"""The file of each definition's solution."""


def solution(definition: str) -> dict[str, Any]:
    """The solution of a definition."""
    file = DEFINITIONS[definition]
    content = (HERE / file).read_text(encoding="utf-8")
    version = PROJECT["project"]["version"]
    return {
        "name": f"sparsemla_{definition}",
        "definition": definition,
        "author": "sparsemla",
        "description": content.splitlines()[0].strip('"'),
        "spec": {
            "language": "python",
            "target_hardware": ["cpu", "cuda"],
            "entry_point": f"{file}::run",
            "dependencies": [f"sparsemla >= {version}"],
            "destination_passing_style": True,
        },
        "sources": [{"path": file, "content": content}],
    }


def build(out: Path) -> None:
    """Write a file for each definition."""
    for definition in DEFINITIONS:
        path = out / "solutions/sparsemla/dsa_paged" / definition / f"sparsemla_{definition}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(solution(definition), indent=2) + "\n"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="A folder in the form of flashinfer-trace.")
    build(parser.parse_args().out)
