"""Pictures of rounds on an H200 from the committed measurements, one file for each batch size."""

from __future__ import annotations

import json
from pathlib import Path

from specla.bench.resident_plots import plot

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "rounds-h200"


def main() -> None:
    reports = sorted(
        (json.loads(path.read_text()) for path in RESULTS.glob("batch-*.json")),
        key=lambda report: report["batches"][0]["batch"],
    )
    whole = reports[0] | {"batches": [made for report in reports for made in report["batches"]]}
    for path in plot(whole, RESULTS):
        print(path)


if __name__ == "__main__":
    main()
