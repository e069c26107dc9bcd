"""The content of memfeed.json, and the check of all it claims before a file is opened.

docs/format.md is the specification.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import msgspec

from memfeed.errors import StoreError
from memfeed.schema.codec import array_dtype, codec_of_field
from memfeed.schema.fields import DEEPEST, DTYPES, HEAP_OF_BYTES, Field, Node, Schema, display
from memfeed.schema.kept_tensors import SIZED, SIZED_KEYS, part_names
from memfeed.schema.names import is_stem, same_file
from memfeed.store.dataset_attributes import TARGETS_FILE, Attributes, attributes_problem, metadata_problem
from memfeed.store.ragged import column_files

CHUNK_BYTES = 4 << 20
MOST_ROWS = 1 << 48
LARGEST_FILE = 1 << 62
MOST_EMPTY_ROWS = 1 << 24  # rows that take no byte: no file's size confirms their count


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One probed sample: its index in the dataset, and the xxh3-64 of each field's bytes."""

    index: int
    hashes: tuple[str, ...]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts about a dataset that show later whether its store is stale.

    ``length`` is the dataset's length (None if it has none), ``source`` hashes of its classes' source text,
    ``digests`` the hashes of the plain data in its attributes, and of the files they name, by attribute.
    """

    kind: str
    length: int | None = None
    source: str = ""
    source_name: str = ""
    probes: tuple[Probe, ...] = ()
    digests: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of memfeed.json. ``rows`` is the count of rows, ``files`` has the size of each in bytes."""

    format: str
    version: int
    rows: int
    schema: Schema
    files: dict[str, int]
    checksums: str
    fingerprint: Fingerprint | None = None
    skipped: tuple[int, ...] = ()
    chunk_bytes: int = CHUNK_BYTES
    attributes: Attributes | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET

    @property
    def extra_files(self) -> dict[str, int]:
        """The files that belong to no field, with their sizes in bytes."""
        targets = self.attributes.targets if self.attributes else None
        return {TARGETS_FILE: 8 * self.rows} if targets is not None and targets.field is None else {}


def required_version(manifest: Manifest) -> int:
    """Return the lowest version of the format that has all features of a manifest."""
    has_extras = manifest.attributes is not msgspec.UNSET or manifest.metadata is not msgspec.UNSET
    has_losses = bool(manifest.attributes and manifest.attributes.losses)
    if has_losses or any(field.coding is not None for field in manifest.schema):
        return 3
    is_new = has_extras or _is_new_node(manifest.schema.structure)
    is_new = is_new or any(field.kind == "jagged" and field.ragged_dim for field in manifest.schema.fields)
    return 2 if is_new else 1


def _is_new_node(node: Node) -> bool:
    """Return True if a node, or one below it, has a kind or a key that version 1 does not have."""
    return (
        node.kind in ("graph", "tensor", "tv_tensor") or bool(node.dim_names) or any(map(_is_new_node, node.children))
    )


def manifest_problem(manifest: Manifest) -> str:
    """Return a phrase that says what is wrong with a manifest, or an empty string."""
    if not 0 <= manifest.rows <= MOST_ROWS:
        return f"{manifest.rows} rows"
    if manifest.chunk_bytes != CHUNK_BYTES:
        return f"checksum chunks of {manifest.chunk_bytes} bytes"
    problem = schema_problem(manifest.schema, manifest.rows)
    if manifest.attributes and not problem:
        problem = attributes_problem(manifest.attributes, manifest.schema.decoded.fields)
    if manifest.metadata and not problem:
        problem = metadata_problem(manifest.metadata)
    problem = problem or _files_problem(manifest)
    if problem:
        return problem
    if not all(0 <= index <= MOST_ROWS for index in manifest.skipped):
        return "a skipped index out of range"
    if any(one >= other for one, other in pairwise(manifest.skipped)):
        return "skipped indices out of order"
    problem = fingerprint_problem(manifest.fingerprint, manifest.schema)
    if not problem and manifest.version < required_version(manifest):
        return f"version {manifest.version} with features of version {required_version(manifest)}"
    return problem


def schema_problem(schema: Schema, row_count: int) -> str:
    """Return a phrase that says what is wrong with a schema, or with the names of its files, or an empty string."""
    problem = node_problem(schema.structure)
    if problem:
        return problem
    if [field.path for field in schema.fields] != list(schema.structure.leaves()):
        return "fields that are not the leaves of the structure"
    stems: set[str] = set()  # in lower case: some file systems do not tell "A" from "a"
    for index, field in enumerate(schema.fields):
        problem = field_problem(field, index)
        if problem:
            return f"field {display(field.path)!r}: {problem}"
        if same_file(field.stem) in stems:
            return f"two fields with the file name {field.stem!r}"
        stems.add(same_file(field.stem))
        if math.prod(dim for dim in (row_count, *field.shape) if dim) * field.itemsize > LARGEST_FILE:
            return f"{row_count} rows of shape {field.shape}, too many to address"
    inside = next((stem for stem in stems if any(stem[: at.start()] in stems for at in re.finditer("/", stem))), None)
    return "" if inside is None else f"a field with the file name {inside!r} inside another field's"


def _files_problem(manifest: Manifest) -> str:
    """Return a phrase that says what is wrong with the list of files, or an empty string."""
    expected: dict[str, int | None] = {**manifest.extra_files}
    for field in manifest.schema.fields:
        expected |= column_files(field, manifest.rows)
    if set(expected) != set(manifest.files):
        odd = sorted(set(expected) ^ set(manifest.files))
        return f"a list of files that is not that of its fields ({odd[0]!r})"
    for name, size in expected.items():
        claimed = manifest.files[name]
        if not 0 <= claimed <= LARGEST_FILE or (size is not None and claimed != size):
            return f"{claimed} bytes for {name}, where its shape gives {size}"
    if manifest.rows > MOST_EMPTY_ROWS and not any(manifest.files.values()):
        return f"{manifest.rows} rows in no byte at all"
    return ""


def fingerprint_problem(fingerprint: Fingerprint | None, schema: Schema) -> str:
    """Return a phrase that says what is wrong with a fingerprint, or an empty string."""
    for probe in fingerprint.probes if fingerprint else ():
        if not 0 <= probe.index <= MOST_ROWS or len(probe.hashes) != len(schema):
            return f"a fingerprint that does not fit its fields (sample {probe.index})"
    return ""


def codec_problem(field: Field) -> str:
    """Return a phrase that says what is wrong with the codec of a coded field, or an empty string."""
    assert field.coding is not None
    if field.coding.kind not in ("fixed", "jagged", "list"):
        return f"coded rows of {field.coding.kind}"
    try:
        return codec_of_field(field).accepts(array_dtype(field.decoded), field.coding.shape)
    except ModuleNotFoundError:
        return ""  # the library is asked for when a row is read
    except StoreError as error:
        return str(error)


def node_problem(node: Node, depth: int = 0) -> str:
    """Return a phrase that says what is wrong with a structure, or an empty string."""
    if depth > DEEPEST:
        return f"a structure deeper than {DEEPEST}"
    if node.kind == "tv_tensor":
        return tv_tensor_problem(node)
    if node.kind == "shared" or node.value is not None:
        return "a value in the structure"  # only directories of tensordict have those
    if node.kind in ("leaf", "none"):
        return "a leaf that holds something" if node.children or node.keys else ""
    has_keys = node.kind not in ("tuple", "list")
    if (has_keys != bool(node.keys) and node.children) or (node.keys and not has_keys):
        return f"a {node.kind} {'without' if has_keys else 'with'} keys"
    if has_keys and (len(node.keys) != len(node.children) or len(set(node.keys)) != len(node.keys)):
        return f"a {node.kind} whose keys do not match its parts"
    if node.kind in ("namedtuple", "dataclass", "tensorclass"):
        bad = [name for name in (node.name, *node.keys) if not (isinstance(name, str) and name.isidentifier())]
        if bad:
            return f"{bad[0]!r} as a Python name"
    if node.kind == "tensor" and node.keys != part_names(node.name):
        return f"a tensor with other parts than {', '.join(part_names(node.name))}"
    if node.kind in ("tensordict", "graph") and not all(isinstance(key, str) for key in node.keys):
        return f"a {node.kind} with keys that are no strings"
    if any(isinstance(key, int) and not -(1 << 63) <= key < 1 << 64 for key in node.keys):
        return "a key beyond 64 bits"
    if node.kind == "tensordict" and node.name and not node.name.isidentifier():
        return f"{node.name!r} as a Python name"
    if node.dim_names and len(node.dim_names) != node.batch_dims + 1:
        return f"{len(node.dim_names)} names for {node.batch_dims + 1} dims"
    if not 0 <= node.batch_dims <= DEEPEST:
        return f"{node.batch_dims} batch dims"
    return next((problem for child in node.children if (problem := node_problem(child, depth + 1))), "")


def tv_tensor_problem(node: Node) -> str:
    """Return a phrase that says what is wrong with a node of kind tv_tensor, or an empty string."""
    if node.name not in SIZED or node.keys != SIZED_KEYS or [child.kind for child in node.children] != ["leaf"] * 2:
        return f"a tv_tensor {node.name!r} of the parts {node.keys}"
    values = node.value.items() if isinstance(node.value, dict) else [("", 0)]
    if not all(key.isidentifier() and (value is None or isinstance(value, str)) for key, value in values):
        return f"a tv_tensor with the options {node.value!r:.100}"
    return ""


def field_problem(field: Field, field_index: int) -> str:
    """Return a phrase that says what is wrong with one field, or an empty string."""
    if not is_stem(field.stem) or field.stem.count("/") > DEEPEST:
        return f"the file name {field.stem!r}"
    if (field.coding is not None) != (field.kind == "coded"):
        return f"{field.kind} values with the coding {field.coding}"
    if field.coding is not None:
        problem = field_problem(field.decoded, field_index) or codec_problem(field)
        if problem:
            return problem
    if field.dtype not in DTYPES:
        return f"the dtype {field.dtype!r}"
    if field.kind in HEAP_OF_BYTES and (field.dtype != "uint8" or field.shape):
        return f"{field.kind} values with dtype {field.dtype} and shape {field.shape}"
    if len(field.shape) > DEEPEST or any(dim is not None and not 0 <= dim <= MOST_ROWS for dim in field.shape):
        return f"the shape {field.shape}"
    if math.prod(dim for dim in field.shape if dim) * field.itemsize > LARGEST_FILE:
        return f"rows of shape {field.shape}, too large to address"
    varying = [axis for axis, dim in enumerate(field.shape) if dim is None]
    expected = {"fixed": 0, "jagged": 1, "list": len(field.shape)}.get(field.kind, 0)
    if len(varying) != expected:
        return f"{field.kind} with shape {field.shape}"
    if field.optional and field.kind in ("fixed", "jagged"):
        return f"{field.kind} values that may be None"
    ranks = {"tensor": None, "scalar": 0, "list": 1}
    if (
        field.form != "tensor"
        and field.coding is None
        and (field.kind in HEAP_OF_BYTES or len(field.shape) != ranks[field.form])
    ):
        return f"{field.kind} with shape {field.shape} in the form of a {field.form}"
    if field.lengths_of is not None and not (field.decoded.kind == "jagged" and 0 <= field.lengths_of <= field_index):
        return f"lengths of field {field.lengths_of}"
    return ""
