"""What `Loader.stats` returns."""

from __future__ import annotations

from typing import Any


class Stats(dict[str, Any]):
    """A dict, which a notebook shows as bars and a table."""

    def _repr_html_(self) -> str:
        from memfeed.loading.loader_html import stats_html  # a training shows no page

        return stats_html(self)
