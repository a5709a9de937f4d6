"""llama-server in the environment of the package xllamacpp: ``llama_server.py MODEL PORT``.

Options for trials come as NAME=VALUE after that: flash (on, off, auto), ubatch, batch,
slots (separate, shared), parallel (the number of slots).
"""

from __future__ import annotations

import signal
import sys

import xllamacpp

NUM_SLOTS = 32  # as many as the workload with most streams
NUM_SHARED_TOKENS = 32768  # of a cache that all slots share
NUM_SLOT_TOKENS = 2304  # of one slot's own cache; the longest prompt has 2,048


def main() -> None:
    """Serves until it is told to stop."""
    model, port, *pairs = sys.argv[1:]
    options = dict(pair.split("=") for pair in pairs)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.kv_unified = options.get("slots", "separate") == "shared"
    params.n_parallel = int(options.get("parallel", NUM_SLOTS))
    params.n_ctx = NUM_SHARED_TOKENS if params.kv_unified else params.n_parallel * NUM_SLOT_TOKENS
    params.n_batch = int(options.get("batch", 2048))
    params.n_ubatch = int(options.get("ubatch", 512))
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    flash = options.get("flash", "auto").upper()
    params.flash_attn_type = getattr(
        xllamacpp.llama_flash_attn_type,
        {"ON": "LLAMA_FLASH_ATTN_TYPE_ENABLED", "OFF": "LLAMA_FLASH_ATTN_TYPE_DISABLED"}.get(
            flash, "LLAMA_FLASH_ATTN_TYPE_AUTO"
        ),
    )
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])


if __name__ == "__main__":
    main()
