"""What a store keeps beside its columns, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from memfeed.errors import brief, listed
from memfeed.store.manifest import Manifest

MOST_SKIPPED = 20
LINE_WIDTH = 160
MOST_KEYS = 20


def manifest_lines(manifest: Manifest | None) -> Iterator[str]:
    """Yield the samples that were skipped, the classes and the metadata; nothing for a directory without a manifest."""
    if manifest is None:
        return
    if manifest.skipped:
        more = ", ..." if len(manifest.skipped) > MOST_SKIPPED else ""
        indices = ", ".join(map(str, manifest.skipped[:MOST_SKIPPED]))
        yield f"samples skipped: {len(manifest.skipped):,}, dataset indices {indices}{more}"
    if manifest.attributes and manifest.attributes.classes is not None:
        classes = manifest.attributes.classes
        yield f"classes: {len(classes):,}: {listed(classes, LINE_WIDTH)}"
    metadata = manifest.metadata or {}
    for key in list(metadata)[:MOST_KEYS]:
        yield f"metadata {brief_key(key)}: {brief(metadata[key], LINE_WIDTH)}"
    if len(metadata) > MOST_KEYS:
        yield f"metadata: {len(metadata) - MOST_KEYS:,} more keys"


def brief_key(key: str) -> str:
    """Return a key, cut to a width that a line has room for."""
    return key if len(key) <= LINE_WIDTH else f"{key[: LINE_WIDTH - 3]}..."
