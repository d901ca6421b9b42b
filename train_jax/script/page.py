"""The report of a run of a script: that of any run, with the images and texts of `preview`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from train_jax.errors import UserError
from train_jax.report.run_page import RunFiles, curves_of_evaluations, render_run
from train_jax.run.folder import RunFolder
from train_jax.storage.json_files import TEXT, find_object, list_of, optional, record_of

_REMEDY = "remove it and run `trm evaluate` to write it again"


def page(files: RunFiles) -> str:
    """Renders the report."""
    items = read_preview(files.folder)
    return render_run("script.html.j2", files, curves_of_evaluations(files), previews=items)


def read_preview(folder: RunFolder) -> Sequence[dict[str, str]]:
    """Returns the images and texts of a run; none if there is no file. Raises `UserError` for a damaged one."""
    item = record_of({"name": TEXT, "text": optional(TEXT), "png": optional(TEXT)})
    path = folder.evaluation("previews")
    items = (find_object(path, {"items": list_of(item)}, remedy=_REMEDY) or {"items": []})["items"]
    found = [{"name": each["name"], "text": each.get("text") or "", "png": each.get("png") or ""} for each in items]
    if not all(re.fullmatch(r"[A-Za-z0-9+/]*=*", each["png"]) for each in found):
        raise UserError(f"{path} has an image that is not base64; {_REMEDY}")
    return found
