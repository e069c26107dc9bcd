"""``memfeed cache``: a dataset of the user's, or a tree of images, into a store."""

from __future__ import annotations

import importlib
import inspect
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import memfeed
from memfeed.cli.errors import UsageError
from memfeed.convert.image_folder import FIELDS, image_folder, to_pixels
from memfeed.schema.fields import DTYPES

MOST_CLASSES = 20


class OnError(str, Enum):
    """What to do where the dataset raises."""

    SKIP = "skip"
    RAISE = "raise"


def cache(
    places: Annotated[
        list[str], typer.Argument(metavar="[MODULE:FACTORY] OUT", help="Where the dataset comes from, and the store.")
    ],
    images: Annotated[
        Path | None, typer.Option(help="A tree of images, one directory per class, in place of MODULE:FACTORY.")
    ] = None,
    resize: Annotated[
        str | None,
        typer.Option(help="With --images: 256 scales the short side, 256x256 squashes to that height and width."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that read and write; default: chosen.")] = None,
    on_error: Annotated[OnError, typer.Option(help="Where the dataset raises: stop, or leave it out.")] = OnError.RAISE,
    fields: Annotated[str | None, typer.Option(help="Names for the leaves of a tuple, as image,label.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Cast a field, as mask=uint8; may be repeated.")] = None,
    allow_random: Annotated[bool, typer.Option("--allow-random", help="Keep one draw of random samples.")] = False,
    copy_existing: Annotated[bool, typer.Option("--copy-existing", help="Copy data that is mapped already.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a store that is there.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Compute rows again whose bytes have rotted.")] = False,
    check: Annotated[bool, typer.Option(help="Compare a store that is there with the dataset.")] = True,
    progress: Annotated[bool, typer.Option(help="Show the budget and a progress bar.")] = True,
) -> None:
    """Write a dataset once into a store.

    MODULE is imported with the current directory on the path. FACTORY is called if it can be, else it is the dataset.
    """
    if len(places) != (2 if images is None else 1):
        raise UsageError(
            f"found {' '.join(places)!r}; expected `memfeed cache module:factory OUT`, "
            "or `memfeed cache --images DIR OUT`"
        )
    if images is None and resize is not None:
        raise UsageError("found --resize without --images; expected both, or do the resizing in the dataset itself")
    dataset = image_folder(images, to_pixels(resize)) if images is not None else load(places[0])
    names = tuple(name.strip() for name in fields.split(",")) if fields else None
    store = memfeed.cache(
        dataset,
        places[-1],
        fields=FIELDS if names is None and images is not None else names,
        dtypes=dict(_cast(text) for text in dtype) if dtype else None,
        workers=workers,
        on_error=on_error.value,
        allow_random=allow_random,
        copy_existing=copy_existing,
        check=check,
        overwrite=overwrite,
        repair=repair,
        progress=progress,
    )
    typer.echo(repr(store))
    if images is not None:
        shown = [f"{number} {name}" for number, name in enumerate(dataset.classes[:MOST_CLASSES])]
        typer.echo(f"  classes: {', '.join(shown)}{', ...' if len(dataset.classes) > MOST_CLASSES else ''}")
    if store.skipped:
        typer.echo(f"  left out: {len(store.skipped):,} samples (memfeed inspect {store.path} lists them)")


def load(text: str) -> Any:
    """The object that ``module:factory`` stands for, called if it can be.

    Raises UsageError if there is no such thing, or if the user's own code raises.
    """
    found = _find(text)
    return _made(text, found) if callable(found) else found


def load_transform(text: str) -> Any:
    """The transform that ``module:name`` stands for, or that the function there makes: one that needs no argument.

    Raises UsageError if there is no such thing, or if the user's own code raises.
    """
    found = _find(text)
    if callable(found) and not isinstance(found, torch.nn.Module):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError):
            return found  # it takes a batch
        return _made(text, found)
    return found


def _find(text: str) -> Any:
    module, colon, name = text.partition(":")
    if not (colon and name and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])):
        raise UsageError(f"found {text!r}; expected module:factory, as my_data:make_train for make_train in my_data.py")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise _raised(f"importing {module}", error) from error
        raise UsageError(
            f"found no module {error.name!r} in {here} or installed; expected the one that has {name}"
        ) from None
    except Exception as error:
        raise _raised(f"importing {module}", error) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(
                f"{text}: found no {part!r} in {module} ({found.__file__}); expected a dataset or a function"
            )
        found = getattr(found, part)
    return found


def _made(text: str, factory: Any) -> Any:
    try:
        return factory()
    except Exception as error:
        raise _raised(f"calling {text}", error) from error


def _raised(doing: str, error: Exception) -> UsageError:
    return UsageError(f"{doing} raised {type(error).__name__}: {error}")


def _cast(text: str) -> tuple[str, torch.dtype]:
    field, _, name = text.rpartition("=")
    if not field or name not in DTYPES:
        raise UsageError(
            f"found --dtype {text!r}; expected field=dtype, as mask=uint8, with one of {', '.join(DTYPES)}"
        )
    return field, DTYPES[name]
