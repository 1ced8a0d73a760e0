"""Data sets, and torch's loader."""

DECODERS = ("pillow", "simplejpeg")  # of JPEG files; see dataloading/dataset/decoders.py
