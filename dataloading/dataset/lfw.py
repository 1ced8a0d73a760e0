"""A folder of JPEG files in the layout of Labeled Faces in the Wild (LFW), as the course has it."""

from __future__ import annotations

from dataloading.dataset.image_files import ImageFiles


class LFWDataset(ImageFiles):
    """The files ``<root>/<Person_Name>/<Person_Name>_<NNNN>.jpg``, or such files directly in the folder; a class is a person."""

    layout = "<folder>/<Person_Name>/<Person_Name>_<NNNN>.jpg, or <folder>/<name>.jpg"

    def class_of(self, name: str) -> str:
        """The person: the folder, or the file's name up to the number."""
        folder, slash, _ = name.partition("/")
        return folder if slash else name.rsplit(".", 1)[0].rsplit("_", 1)[0]
