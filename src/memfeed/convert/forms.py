"""The ``forms=`` of `memfeed.cache`: in which form each field is stored; floats are rounded to 16 bits before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from memfeed.codecs import CODECS, Codec, parse_codec
from memfeed.codecs.jpeg import ErrorSum
from memfeed.errors import SchemaError, brief, listed
from memfeed.schema import values
from memfeed.schema.codec import Int64Array, array_dtype, codec_of_field
from memfeed.schema.containers import map_leaves
from memfeed.schema.fields import RAW, Field, Path, Schema
from memfeed.schema.names import find_field
from memfeed.store.dataset_attributes import Keep, Loss
from memfeed.store.manifest import Manifest
from memfeed.system.messages import parse_bytes

Shape = tuple[int | None, ...]
SMALLEST_SIDE = 8  # pixels; a smaller one is a mistake
LOSSY = "lossy"
SMALL_BYTES = 64  # rows of fixed size up to this are coded only if a user names their field: a blob has 16 more
_NUMBERS = ("fixed", "jagged", "list")
_COLORS = 3  # channels


class Forms(msgspec.Struct, frozen=True, kw_only=True):
    """In which forms fields are stored.

    Args:
        keep: what is stored of images of several sizes that a random step resizes; see `memfeed.cache`.
        keep_name: the name of the field for which ``keep`` was given; None for all.
        floats: the dtype to which all floats are rounded.
        dtypes: the casts of single fields, by name.
        codecs: the codecs of single fields, by name; None for a field that is stored raw.
        codec: that of all other fields that it accepts.
        lossy: the names of the fields that a budget may store in a lossy form; True for all.
    """

    keep: Keep | None = None
    keep_name: Any = None
    floats: torch.dtype | None = None
    dtypes: Mapping[Any, torch.dtype] = {}
    codecs: Mapping[Any, Codec | None] = {}
    codec: Codec | None = None
    lossy: bool | frozenset[Any] = False

    @property
    def has_codecs(self) -> bool:
        """True if the user says how fields are coded."""
        return bool(self.codecs) or self.codec is not None


def forms_of(given: Any) -> Forms:
    """Return what ``forms=`` says: one form for all fields that it suits, or ``{field: form}``.

    Raises ValueError for anything else.
    """
    if given is None:
        return Forms()
    if not isinstance(given, Mapping):
        keep, codec, dtype, lossy = _parts(given, given)
        if dtype is not None:
            raise ValueError(
                f"found forms={brief(given)}; expected the fields that get this dtype: forms={{float: {dtype}}} rounds "
                "all floats, forms={field: dtype} casts one"
            )
        return Forms(keep=keep, codec=codec, lossy=lossy)
    keeps: dict[Any, Keep] = {}
    dtypes: dict[Any, torch.dtype] = {}
    codecs: dict[Any, Codec | None] = {}
    allowed = set()
    for name, form in given.items():
        keep, codec, dtype, lossy = _parts(form, given)
        if name is float and (keep is not None or codec is not None or dtype is None or lossy):
            raise ValueError(f"found forms={brief(given)}; expected a dtype for float: forms={{float: torch.float16}}")
        if keep is not None:
            keeps[name] = keep
        if dtype is not None:
            dtypes[name] = dtype
        if codec is not None or form == RAW:
            codecs[name] = codec
        if lossy:
            allowed.add(name)
    if len(set(keeps.values())) > 1:
        raise ValueError(
            f"found forms={brief(given, 120)} with several sizes of images; expected one, because a random step gets "
            "all of them"
        )
    keep_name, keep = next(iter(keeps.items()), (None, None))
    floats = dtypes.pop(float, None)
    wider = [name for name, dtype in dtypes.items() if dtype.is_floating_point]
    if floats is not None and wider:
        raise ValueError(
            f"found forms={brief(given, 120)}, whose float rounds field {wider[0]!r} too; expected no other dtype of "
            "floats beside it: leave one of them out"
        )
    return Forms(
        keep=keep, keep_name=keep_name, floats=floats, dtypes=dtypes, codecs=codecs, lossy=frozenset(allowed) or False
    )


def codecs_of(given: Any) -> Forms:
    """Return the codecs that ``forms=`` says. Raise ValueError for dtypes and sizes of images, which need a dataset."""
    forms = forms_of(given)
    if forms.keep is not None or forms.dtypes or forms.floats is not None or forms.lossy:
        raise ValueError(
            f'found forms={brief(given)}; expected codecs, or "raw", as forms="zstd": other forms need the dataset, '
            "make the store with memfeed.cache(dataset, path, forms=...)"
        )
    return forms


def _parts(form: Any, given: Any) -> tuple[Keep | None, Codec | None, torch.dtype | None, bool]:
    """Return what one form says: what is kept of images, the codec, the dtype, and if a lossy form is allowed."""
    keep, codec, dtype, lossy = None, None, None, False
    for part in form if isinstance(form, tuple) else (form,):
        is_side = isinstance(part, int) and not isinstance(part, bool) and part >= SMALLEST_SIDE
        if (is_side or part in ("full", "encoded")) and keep is None:
            keep = part
        elif isinstance(part, torch.dtype) and dtype is None:
            dtype = part
        elif isinstance(part, str) and part == LOSSY:
            lossy = True
        elif isinstance(part, str) and part == RAW and form == RAW:
            pass
        elif codec is None and (found := _codec(part)) is not None:
            codec = found
        else:
            raise ValueError(
                f'found forms={brief(given, 120)}; expected for each field "raw", "full", "encoded", the short side of '
                f'images in pixels ({SMALLEST_SIDE} or more), a dtype, a codec as "jpeg:95", "zstd" or "lz4", or a '
                'tuple of these, as (256, "jpeg:95")'
            )
    if keep == "encoded" and codec is not None:
        raise ValueError(
            f'found forms={brief(given, 120)}; expected one of both, because the files that "encoded" stores are '
            "compressed already"
        )
    return keep, codec, dtype, lossy


def _codec(part: Any) -> Codec | None:
    """Return the codec that this part of a form is; None if it is none."""
    if not isinstance(part, str) or part == RAW:
        return cast("Codec", part) if isinstance(part, tuple(CODECS.values())) else None
    try:
        return parse_codec(part)
    except ValueError:
        return None


def coded_schema(schema: Schema, forms: Forms, shapes: Sequence[Shape] | None = None) -> Schema:
    """Return the schema of a store whose fields have these forms; ``schema`` is that of its samples.

    ``shapes`` has for each field the shape of some rows, with None for dims in which they differ: a field of any shape
    says nothing about where its channels are.

    Raises FieldError for a name that no field has, SchemaError for a field that its codec cannot hold.
    """
    if not forms.has_codecs and forms.keep_name is None:
        return schema
    paths, names = [field.path for field in schema], [field.name for field in schema]
    if forms.keep_name is not None:
        named = schema.fields[find_field(forms.keep_name, paths, names)]
        if named.kind != "bytes" and named.rank < 2:
            raise SchemaError(
                f"field {named.name}: found forms={{{forms.keep_name!r}: {forms.keep!r}}} for {named.describe()}; "
                "expected the field of the images that a random step resizes"
            )
    chosen = {find_field(name, paths, names): codec for name, codec in forms.codecs.items()}
    fields, masks = [], {path for path, leaf in schema.structure.of_kind("leaf") if leaf.name == "Mask"}
    for index, field in enumerate(schema):
        shape = field.shape if shapes is None else shapes[index]
        is_suited = _suits(field, forms.codec, shape, is_mask=field.path in masks)
        codec = chosen.get(index, forms.codec if is_suited else None)
        fields.append(field if codec is None else _coded(field, codec, shape))
    if forms.codec is not None and all(field.coding is None for field in fields):
        shown = listed([f"{field.name}: {field.describe()}" for field in schema], 200)
        raise SchemaError(
            f"found no field that {forms.codec.name} suits ({shown}); expected one, of more than {SMALL_BYTES} bytes a "
            f"row{'' if forms.codec.lossless else ', with three channels, for one channel may be a mask'}: "
            f'leave forms= out, or name the field: forms={{{names[0]!r}: "{forms.codec.name}"}}'
        )
    return Schema(fields=tuple(fields), structure=schema.structure)


def observed_shapes(schema: Schema, dims: Sequence[Int64Array | None]) -> list[Shape]:
    """Return the shape of some rows of each field, with None for dims in which they differ.

    ``dims`` has those of the rows of each ragged field, int64 [k, rank]; a row that is None has -1.
    """
    found: list[Shape] = []
    for field, of_field in zip(schema, dims, strict=True):
        known = None if of_field is None else of_field[of_field[:, 0] >= 0][:, : len(field.shape)]
        if known is None or not len(known):
            found.append(field.shape)
        else:
            same = (known == known[0]).all(axis=0).tolist()
            found.append(tuple(dim if one else None for dim, one in zip(known[0].tolist(), same, strict=True)))
    return found


def common_shapes(schema: Schema, rows: Sequence[Sequence[Any]]) -> list[Shape]:
    """Return what `observed_shapes` does, of rows that are given as their leaves."""
    dims: list[Int64Array | None] = []
    for index, field in enumerate(schema):
        shapes = [np.shape(row[index]) for row in rows if row[index] is not None] if field.rank else []
        is_array = field.kind in ("jagged", "list") and len(shapes) > 0
        dims.append(np.array(shapes, np.int64) if is_array else None)
    return observed_shapes(schema, dims)


def codings_of(schema: Schema) -> dict[Path, str]:
    """Return the coding of each field of a store, as text."""
    return {field.path: field.form_text for field in schema}


def asked_codings(schema: Schema, forms: Forms, shapes: Sequence[Shape] | None = None) -> dict[Path, str]:
    """Return the codings that are asked for, as text, of the fields that are named or that a codec for all suits.

    ``schema`` and ``shapes`` are those of the samples, see `coded_schema`. Without shapes, a field of images of any
    shape is left out, which may have one channel: a lossy codec for all does not suit it then.
    """
    named = {schema.fields[schema.field_index(name)].path for name in forms.codecs}
    unsure = set[Path]()
    if shapes is None and forms.codec is not None and not forms.codec.lossless:
        unsure = {field.path for field in schema if None in field.shape} - named
        shapes = [tuple(_COLORS if dim is None else dim for dim in field.shape) for field in schema]
    codings = codings_of(coded_schema(schema, forms, shapes))
    return {path: text for path, text in codings.items() if path in named or (text != RAW and path not in unsure)}


def has_forms(manifest: Manifest | None, given: Any, budget: int | str | None) -> bool:
    """Return True if a store is in the forms that ``forms=`` says, and within ``budget=``; False if it is no store."""
    forms, limit = forms_of(given), parse_bytes("budget", budget)
    if manifest is None:
        return False
    schema, kept = manifest.schema.decoded, manifest.attributes.keep if manifest.attributes else None
    dtypes = all(schema.fields[schema.field_index(name)].torch_dtype == dtype for name, dtype in forms.dtypes.items())
    is_wide = forms.floats is not None and any(field.dtype in ("float32", "float64") for field in schema)
    is_within = limit is None or sum(manifest.files.values()) <= limit
    has_codings = asked_codings(schema, forms).items() <= codings_of(manifest.schema).items()
    return forms.keep in (None, kept) and dtypes and not is_wide and is_within and has_codings


def _suits(field: Field, codec: Codec | None, shape: Shape, *, is_mask: bool) -> bool:
    """Return True if a codec for all fields is one for this field: a lossy one for images in color.

    Planes of one channel may be masks, whose numbers are classes.
    """
    if codec is None or field.kind not in _NUMBERS or not field.rank:
        return False
    if not codec.lossless and (is_mask or field.rank != 3 or _COLORS not in (shape[0], shape[-1])):
        return False
    is_small = field.kind == "fixed" and field.row_bytes <= SMALL_BYTES
    return not is_small and not codec.accepts(array_dtype(field), shape)


def _coded(field: Field, codec: Codec, shape: Shape) -> Field:
    problem = codec.accepts(array_dtype(field), shape) if field.kind in _NUMBERS else f"this has rows of {field.kind}"
    if problem:
        raise SchemaError(
            f"field {field.name}: found that {problem}; expected rows that {codec.name} can hold: choose another "
            "form, or leave this field raw"
        )
    codec = codec.fitted(array_dtype(field), shape)
    return field.coded(codec.name, dict(codec.parameters()))


def losses_of(schema: Schema, rows_of: Callable[[int], Iterable[npt.NDArray[Any]]]) -> tuple[Loss, ...]:
    """Return what the lossy codecs of a schema change in some rows; ``rows_of`` returns the decoded rows of a field."""
    found = []
    for index, field in enumerate(schema):
        codec = None if field.coding is None else codec_of_field(field)
        if codec is None or codec.lossless:
            continue
        errors, rows = ErrorSum(), list(rows_of(index))
        for row in rows:
            decoded = np.empty_like(row)
            codec.decode(np.frombuffer(codec.encode(row), np.uint8), decoded)
            errors.add(row, decoded)
        error = errors.error()
        psnr = round(error.psnr, 2) if error.mean else None
        found.append(Loss(field=index, samples=len(rows), mean=round(error.mean, 4), largest=error.largest, psnr=psnr))
    return tuple(found)


def lossy_before(manifest: Manifest | None) -> frozenset[int]:
    """Return the fields that `memfeed.recode` stored without loss after a lossy codec had changed their rows."""
    losses = manifest.attributes.losses if manifest is not None and manifest.attributes else ()
    schema = manifest.schema if manifest is not None else ()
    codecs = {index: codec_of_field(field) for index, field in enumerate(schema) if field.coding is not None}
    return frozenset(loss.field for loss in losses if loss.field not in codecs or codecs[loss.field].lossless)


DTYPES = (torch.float16, torch.bfloat16)


class Rounded:
    """A map-style dataset whose float32 and float64 tensors and arrays are rounded to a 16-bit dtype.

    Args:
        dataset: with ``len`` and ``[]``.
        dtype: float16, which has 11 significant bits and values up to 65,504, or bfloat16, which has 8 and the range of
            float32.
    """

    def __init__(self, dataset: Any, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"found forms={{float: {dtype!r}}}; expected torch.float16 or torch.bfloat16")
        self.dataset, self.dtype = dataset, dtype

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        return map_leaves(lambda leaf: self._rounded(leaf, index), sample)

    def _rounded(self, leaf: Any, index: int) -> Any:
        if not isinstance(leaf, torch.Tensor | np.ndarray) or values.holds_more(leaf):
            return leaf
        tensor = values.as_tensor(leaf)
        if tensor is None or tensor.dtype not in (torch.float32, torch.float64):
            return leaf
        rounded = (leaf if isinstance(leaf, torch.Tensor) else tensor).to(self.dtype)  # a tv_tensor keeps its class
        if bool((too_large := rounded.isinf() & ~tensor.isinf()).any()):
            value = tensor[too_large].abs().max()
            holds_more = not value.to(torch.bfloat16).isinf()
            raise SchemaError(
                f"found the value {value.item():g} in sample {index}, beyond what {self.dtype} holds; expected at most "
                f"{torch.finfo(self.dtype).max:,.5g}: "
                + ("choose forms={float: torch.bfloat16}" if holds_more else "leave forms={float: ...} out")
            )
        return rounded
