"""Every program of a small model compiled by libtpu for chips that are not here; and that the check would see a copied cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "compile_for_tpu.py"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("topology", "chips"), [("v5e:2x2", 4), ("v6e:2x2", 1)])
def test_every_program_of_a_small_model_compiles_without_a_copy_of_the_cache(tmp_path, topology, chips):
    out = tmp_path / "report.json"
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
    command = [sys.executable, str(TOOL), "--model", "tiny", "--topology", topology, "--chips", str(chips), *sizes, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    programs = {p["program"] for p in found["programs"]}
    assert programs >= {"forward", "head", "greedy", "sample", "logprobs", "select", "block_copy", "gather_blocks", "scatter_blocks", "load_history"}
    for p in found["programs"]:
        assert not p["cache_copies"] and not p["has_wide_numbers"], p
        if p["program"] == "forward":
            regions = 1 if p["axes"]["rows"] == p["axes"]["decode_rows"] else 2
            assert p["kernels"] == regions and p["cache_copies"] == 0  # one kernel a region, whatever the number of layers
            assert p["donated_bytes"] > 0.95 * p["argument_bytes"]  # the cache; the weights are small
            assert (p["all_reduces"] > 0) is (chips > 1)


def test_a_copied_cache_would_be_seen():

    from oarlock_tpu import abstract
    from oarlock_tpu.vendor import jax, jnp

    chip = abstract.described("v5e:2x2")[0]
    cache = jax.ShapeDtypeStruct((64, 32, 256), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(chip))
    wasteful = jax.jit(lambda cache: (cache.at[0].set(1), cache))  # not donated, and wanted whole: it must be copied
    text = wasteful.trace(cache).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert abstract.count_copies(text, [(64, 32, 256)]) > 0
    thrifty = jax.jit(lambda cache: cache.at[0].set(1), donate_argnums=0)
    text = thrifty.trace(cache).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert abstract.count_copies(text, [(64, 32, 256)]) == 0
