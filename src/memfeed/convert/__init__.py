"""Dataset -> rows of a build: read samples, pack them, write them where they belong.

Workers are those of torch's DataLoader. Each writes its own rows straight to the files; only small reports come back.
"""

from memfeed.convert.drive import OnReport, convert_columns, convert_map, convert_stream, default_workers, note_skips
from memfeed.convert.run import Drifted, Plan, Report, promote_now, take_apart, write_run

__all__ = [
    "Drifted",
    "OnReport",
    "Plan",
    "Report",
    "convert_columns",
    "convert_map",
    "convert_stream",
    "default_workers",
    "note_skips",
    "promote_now",
    "take_apart",
    "write_run",
]
