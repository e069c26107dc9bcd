"""Write docs/benchmarks.md, its details and its charts from benchmarks/results/ and the reasons in missed.py.

python benchmarks/report.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import charts
import report_distributed
import report_gpu
import report_loading
import report_peers
import report_resources
import report_store
import report_transforms
from measure import RESULTS
from report_tables import Result
from summary import DETAILS, TOPICS, first_page

DOCS = Path(__file__).parents[1] / "docs"

PREFACE = """# Benchmarks: the details

The tables behind [benchmarks.md](benchmarks.md), by topic, written by `benchmarks/report.py`. Times are medians; ratios
are medians of the ratios of each round. The machine is named under each title. Below a table of targets is the reason
for each missed target, if it was measured; a line says so where it is an inference.
"""

SECTIONS: dict[str, Callable[[Result], str]] = {
    "tutorial": report_loading.tutorial,
    "loader": report_loading.loader,
    "others": report_peers.others,
    "augment": report_peers.augment,
    "cold": report_loading.cold,
    "scale": report_resources.scale,
    "fleet": report_distributed.fleet,
    "busy": report_resources.busy,
    "curves": report_resources.curves,
    "remote": report_distributed.remote,
    "remote-faults": report_distributed.remote_faults,
    "imports": report_resources.imports,
    "convert": report_store.convert,
    "columnar": report_store.columnar,
    "ray": report_distributed.ray_conversion,
    "windows": report_loading.windows,
    "verify": report_store.verify,
    "first_epoch": report_loading.first_epoch,
    "memoize": report_peers.memoize,
    "transforms": report_transforms.transforms,
    "weight": report_transforms.weight,
    "coded_rows": report_store.coded_rows,
    "forms": report_peers.forms,
    "device-cuda": report_gpu.device,
    "device-cuda-photographs": report_gpu.device_photographs,
    "kernels": report_gpu.kernels,
    "sequences": report_loading.sequences,
    "device-cpu": report_gpu.device,
    "to_device-cuda": report_gpu.to_device,
    "to_device": report_gpu.to_device,
    "torture": report_store.torture,
}
CHARTS = {
    "tutorial": charts.tutorial,
    "loader": charts.loader,
    "others": charts.others,
    "curves": charts.curves,
    "fleet": charts.fleet,
    "forms": charts.forms,
}


def report(results: Path, docs: Path) -> None:
    """Write the pages and the charts of all results in ``results`` to the directory ``docs``."""
    page, titles, found = [PREFACE], {}, {}
    docs.mkdir(parents=True, exist_ok=True)
    for topic, names in TOPICS.items():
        sources = {name: results / f"{name}.json" for name in names if (results / f"{name}.json").exists()}
        if sources:
            page.append(f"## {topic}\n")
        for name, source in sources.items():
            result = found[name] = charts.read(source)
            title, _, rest = SECTIONS[name](result).partition("\n\n")
            titles[name] = title.removeprefix("## ")
            if result["quick"]:
                rest = "*From a quick run, which only shows that the benchmark works. Ignore its figures.*\n\n" + rest
            page.append(f"#{title}\n\n*{charts.machine_line(result)}*\n\n{rest}")
            if name in CHARTS:
                CHARTS[name](source, docs / f"{name}.png")
    (docs / DETAILS).write_text("\n".join(page).rstrip() + "\n")
    (docs / "benchmarks.md").write_text(first_page(found, titles))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    report(options.results, options.docs)


if __name__ == "__main__":
    main()
