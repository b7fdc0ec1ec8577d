"""A process with memory that others pull from: prints metadata and address in hexadecimal, serves until killed."""

from __future__ import annotations

import time

from storage_agent.nixl_window import PROGRESS_INTERVAL_S, NixlWindow


def main() -> None:
    window = NixlWindow("lender", 1 << 20)
    with window.exclusive() as memory:
        for at in range(0, len(memory), 8):
            memory[at : at + 8] = at.to_bytes(8, "little")
        print(window.metadata.hex(), hex(window.address), flush=True)
    while True:
        window.progress()
        time.sleep(PROGRESS_INTERVAL_S)


if __name__ == "__main__":
    main()
