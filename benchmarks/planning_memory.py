"""What planning a capture needs in memory, a row, from so many rows to ten times as many, beside what the index needs a row.

    python benchmarks/planning_memory.py [--rows 20000] [--target demo/tiny-chat]

The rows are the shipped conversations over and over, each with a number of its own, so that none is a duplicate. Each plan, down to
its plan.parquet, is made by a process of its own; the growth is the difference of their peaks. What does not grow is what a
few groups of rows on their way need.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cache.plan import write_plan
from cache.store import LocalStore
from capture.planning import plan_capture
from capture.settings import DEFAULT_DATA, scan_data, settle
from schemas.options import CaptureOptions
from schemas.say import Silent

TIMES = 10


def peak() -> int:
    """The most memory this program has had, in bytes; ru_maxrss would count the process that began it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def work(options: CaptureOptions) -> None:
    """Plan one capture and write the plan; print what it held and needed."""
    settings = settle(options, Silent())
    before = peak()
    manifest, plan, collected = plan_capture(settings, scan_data(options, Silent()), Silent())
    write_plan(LocalStore(Path(options.out)), plan)
    totals, index = manifest.totals, int(collected.samples.rows().nbytes)
    print(
        json.dumps(
            {"samples": totals.samples, "tokens": totals.tokens, "index": index, "before": before, "peak": peak()}
        )
    )


def write_rows(path: Path, rows: int) -> None:
    """The shipped conversations, over and over, the first message of each with its number."""
    shipped = [json.loads(line) for line in DEFAULT_DATA.read_text(encoding="utf-8").splitlines()]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(rows):
            row = shipped[number % len(shipped)]
            first, *others = row["messages"]
            messages = [{**first, "content": f"{number}: {first['content']}"}, *others]
            file.write(json.dumps({"id": f"row {number}", "messages": messages}) + "\n")


def main() -> None:
    """Plan both in processes of their own; print the growth a row and what the index and the tokens come to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--target", default="demo/tiny-chat")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return work(CaptureOptions.model_validate_json(given.worker))
    found = []
    for rows in (given.rows, TIMES * given.rows):
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder, "rows.jsonl"), rows)
            options = CaptureOptions(target=given.target, data=(f"{folder}/rows.jsonl",), out=f"{folder}/hs.zarr")
            command = [sys.executable, __file__, "--worker", options.model_dump_json()]
            found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(
            f"{rows:>9,} rows, {found[-1]['tokens']:,} tokens ({5 * found[-1]['tokens'] / 1e6:,.0f} MB with masks): "
            f"{(found[-1]['peak'] - found[-1]['before']) / 1e6:,.0f} MB at the peak of planning",
            flush=True,
        )
    few, many = found
    samples = many["samples"] - few["samples"]
    growth, index, tokens = ((many[name] - few[name]) / samples for name in ("peak", "index", "tokens"))
    print(
        f"a row more: {growth:,.0f} bytes of memory, of which index {index:,.0f}; its tokens and mask are {5 * tokens:,.0f}"
    )
    return None


if __name__ == "__main__":
    main()
